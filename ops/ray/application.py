"""The Serve application, which ``sluice ray deploy`` or a ``RayService`` starts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve import Application, Deployment
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from gateway.config.errors import ConfigError
from gateway.config.ray import RaySection
from gateway.config.section import Section
from gateway.config.settings import Settings, load_settings
from observability.logs import configure_logging
from ops.ray.ingress import ingress_app
from ops.ray.placement import placement_of
from ops.ray.port import ClusterPlace
from ops.ray.replica import EngineReplica, MakeEngine, configured_engine
from ops.ray.replicas import ServeReplicas

ENGINES = "Engine"
GATEWAYS = "Gateway"
# Calls that a replica accepts beyond its engine's batch: they wait in the engine, which fills a free place
# within a step. Admission sends fewer; this is only an outer bound.
ENGINE_MARGIN = 32
# Most requests in one ingress replica: above the gateway's own bounds, by which it refuses requests itself.
GATEWAY_ONGOING = 4_096
ROUTING_STATS_S = 1.0  # interval, in seconds, at which replicas report KV figures to Serve's router
# Serve kills a replica whose health check takes longer than the timeout, which allows for a loaded host.
HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 5.0, 30.0
DRAIN_LOOK_S = 0.5  # interval at which Serve checks whether a stopping replica has ended its answers


class Arguments(Section):
    """Arguments of the application in a Serve configuration file.

    ``config`` is the path of the gateway's configuration on every node, ``folder`` the working folder there
    (default: the current one). Serve replaces the replicas when an argument changes, but it does not read the
    file: ``version`` is any text that changes with the file's content.
    """

    config: str
    folder: str | None = None
    version: str = ""


def application(args: Mapping[str, Any]) -> Application:
    """The application builder: ``import_path: ops.ray.application:application``.

    Raises ConfigError, or ValidationError when ``args`` are not :class:`Arguments`.
    """
    given = Arguments.model_validate(args)
    settings = load_settings(Path(given.config))
    place = ClusterPlace(
        str(Path(given.config).resolve()), given.folder or str(Path.cwd()), settings.ray.application
    )
    return make_application(settings, place)


def make_application(
    settings: Settings, place: ClusterPlace, *, make_engine: MakeEngine = configured_engine
) -> Application:
    """Ingress replicas in front of engine replicas; ``make_engine`` must be importable by its module.

    Raises ConfigError: the settings have further engines, which replicas do not run.
    """
    if settings.engines:
        raise ConfigError("engines: replicas run `engine` alone; deploy an application for each engine")
    ray = settings.ray
    engines = _deployment(
        _engine_class(make_engine),
        name=ENGINES,
        max_ongoing_requests=settings.engine.max_num_seqs + ENGINE_MARGIN,
        max_queued_requests=settings.admission.max_queue + ENGINE_MARGIN,
        request_router_config=_router(ray),
        **_replicas(ray, ray.engines_min, ray.engines_max, _engine_scaling(settings)),
        **placement_of(settings.engine, num_cpus=ray.engine_cpus, num_gpus=ray.engine_gpus),
    )
    target = ray.gateway_target_requests or float(settings.engine.max_num_seqs)
    gateways = _deployment(
        _gateway_class(place),
        name=GATEWAYS,
        max_ongoing_requests=GATEWAY_ONGOING,
        ray_actor_options={"num_cpus": ray.gateway_cpus},
        **_replicas(ray, ray.gateways_min, ray.gateways_max, {"target_ongoing_requests": target}),
    )
    return gateways.bind(engines.bind(place))


def _deployment(cls: type, **options: Any) -> Deployment:
    made: Deployment = serve.deployment(**options)(cls)
    return made


def _engine_class(make_engine: MakeEngine) -> type:
    class Engine(EngineReplica):
        async def __init__(self, place: ClusterPlace) -> None:  # type: ignore[misc]
            settings = load_settings(Path(place.config))
            self._logs = configure_logging("info", settings.server.log_json)
            super().__init__(place, make_engine, serve.get_replica_context().replica_tag)
            await self.start()

        async def __del__(self) -> None:
            await self.stop()
            self._logs.close()

    return Engine


def _gateway_class(place: ClusterPlace) -> type:
    def app() -> FastAPI:
        handle = serve.get_deployment_handle(ENGINES, place.application)
        return ingress_app(place, ServeReplicas(handle))

    class Gateway:
        def __init__(self, engines: object) -> None:
            """The parameter ``engines`` makes Serve start them first; the app gets its handle by name."""

        def check_health(self) -> None:
            """Raise RuntimeError if the gateway has ended, so that Serve replaces this ingress replica."""
            if self.app.state.ended:  # type: ignore[attr-defined]
                raise RuntimeError("the gateway's own loops have ended")

    wrapped: type = serve.ingress(app)(Gateway)
    return wrapped


def _replicas(ray: RaySection, least: int, most: int, scaling: dict[str, Any]) -> dict[str, Any]:
    """The options of a deployment with this many replicas; ``scaling`` is used if their number may change."""
    options = {
        "graceful_shutdown_wait_loop_s": DRAIN_LOOK_S,
        "graceful_shutdown_timeout_s": ray.drain_seconds,
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": HEALTH_TIMEOUT_S,
        "max_surge_percent": ray.surge_percent,
    }
    if least == most:
        return {**options, "num_replicas": least}
    autoscaling = AutoscalingConfig(
        min_replicas=least,
        max_replicas=most,
        upscale_delay_s=ray.scale_up_seconds,
        downscale_delay_s=ray.scale_down_seconds,
        metrics_interval_s=ray.metrics_seconds,
        look_back_period_s=3 * ray.metrics_seconds,
        **scaling,
    )
    return {**options, "autoscaling_config": autoscaling}


def _router(ray: RaySection) -> RequestRouterConfig:
    values: dict[str, Any] = {
        "request_router_class": "ops.ray.router.PrefixRouter",
        "request_router_kwargs": {
            "factor": ray.affinity_load_factor,
            "index_blocks": ray.affinity_index_blocks,
            "affinity": ray.affinity,
        },
        "request_routing_stats_period_s": ROUTING_STATS_S,
    }
    return RequestRouterConfig(**values)


def _engine_scaling(settings: Settings) -> dict[str, Any]:
    target = settings.ray.engine_target_sequences or float(settings.engine.max_num_seqs)
    targets = {"target_sequences": target, "target_kv": settings.ray.engine_target_kv}
    policy = {"policy_function": "ops.ray.scaling:QueueAndMemory", "policy_kwargs": targets}
    return {"policy": AutoscalingPolicy.model_validate(policy)}
