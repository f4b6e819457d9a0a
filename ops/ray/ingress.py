"""An ingress replica: the whole gateway, with the engine replicas in place of its own engine."""

import os
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI

from gateway.app import create_app
from gateway.backends.embedded import EmbeddedBackend
from gateway.backends.vllm.backend import VllmBackend
from gateway.config.backends import EngineBackend
from gateway.config.errors import ConfigError
from gateway.config.settings import Settings, load_settings
from gateway.contracts.features import KNOWN_FEATURES, Feature
from gateway.http.surfaces import everything, without_admin
from gateway.wiring.build import build
from gateway.wiring.running import Gateway
from observability.logs import configure_logging
from ops.ray.backend import RayBackend
from ops.ray.port import ClusterPlace, EngineReplicas


def ingress_app(place: ClusterPlace, replicas: EngineReplicas) -> FastAPI:
    """The gateway's app for one ingress replica; its lifespan runs the gateway.

    ``app.state.ended``: the gateway has ended; before the end of the app that is a fault. Raises like
    :func:`gateway.wiring.build.build`.
    """
    os.chdir(place.folder)
    settings = load_settings(Path(place.config))
    logs = configure_logging("info", settings.server.log_json)
    gateway = build_ingress(settings, replicas, lambda: logs.dropped)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.ended = False
        try:
            async with gateway.running():
                yield
        finally:
            app.state.ended = True
            logs.close()

    # Serve has one port, so if the operator API has its own port, it is not served here.
    shown = everything if settings.server.admin_port is None else without_admin
    return create_app(gateway.services, lifespan, shown=shown)


def build_ingress(
    settings: Settings, replicas: EngineReplicas, dropped_log_lines: Callable[[], int]
) -> Gateway:
    """The gateway whose backends of kind ``engine`` are the engine replicas.

    Raises ConfigError: there is no such backend, or the configuration cannot be used.
    """
    engines = {name: one for name, one in settings.backends.items() if isinstance(one, EngineBackend)}
    if not engines:
        raise ConfigError(
            "backends: none is of kind engine, so nothing would use engine replicas; allowed: one at least"
        )
    engine = VllmBackend if settings.engine.kind == "vllm" else EmbeddedBackend
    without = settings.incapable(settings.engine.model_id)
    features = KNOWN_FEATURES - without
    if not settings.engine.max_loras:
        features -= {Feature.LORA}
    reporter_name = f"{os.uname().nodename}-{secrets.token_hex(4)}"

    def make_ray_backend(
        name: str, queued: Callable[[], int], limit_context: Callable[[int], None]
    ) -> RayBackend:
        return RayBackend(
            name,
            kind=settings.engine.kind,
            model=settings.engine.model_id,
            replicas=replicas,
            features=features,
            more=engines[name].unknown_fields.features,
            without=without,
            continues=engine.continues,
            section=settings.ray,
            max_running=settings.engine.max_num_seqs,
            reporter_name=f"{reporter_name}/{name}",
            queued=queued,
            on_max_model_len=limit_context,
            clock=time.monotonic,
        )

    return build(
        settings,
        admin_key=os.environ.get("SLUICE_ADMIN_KEY") or None,
        engine_pool=make_ray_backend,
        dropped_log_lines=dropped_log_lines,
    )
