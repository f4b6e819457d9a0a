"""A pool of workers out of its section of the configuration."""

from __future__ import annotations

import random
import ssl
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType

from adapters.values import Adapter
from gateway.backends.workers.backend import WorkersBackend
from gateway.backends.workers.client import Timeouts, WorkerClient
from gateway.backends.workers.dialect import FEATURES, CompletionWriter, Dialect
from gateway.backends.workers.health import HealthRules
from gateway.backends.workers.hedging import HedgePolicy, HedgeRules
from gateway.backends.workers.in_service import WorkersInService
from gateway.backends.workers.loras import WorkerLoras
from gateway.backends.workers.pool import WorkerPool
from gateway.backends.workers.worker import WatchRules, Worker
from gateway.backends.workers.worker_choice import WorkerChoice
from gateway.config.backends import OpenAIBackend
from gateway.contracts.features import Feature

# A Sluice as worker must not answer with a fallback: this gateway has its own chain and its own books.
NO_FALLBACK = ("prefer", "sluice-no-fallback")
# What tells that a worker can answer, not only that it lives. Servers without it are asked for their models.
PROBE_PATHS: Mapping[Dialect, str] = MappingProxyType(
    {Dialect.VLLM: "/health", Dialect.SLUICE: "/ready", Dialect.OPENAI: "/health"}
)


async def already_there(adapter: Adapter) -> None:
    """The adapter's files lie where it says."""


class WorkerKeyMissing(Exception):
    """The variable that ``api_key_env`` names is not set, or holds what cannot be sent."""


def make_workers(
    name: str,
    section: OpenAIBackend,
    *,
    token_bytes: Callable[[int], bytes],
    clock: Callable[[], float],
    environ: Mapping[str, str],
    bring: Callable[[Adapter], Awaitable[None]] = already_there,
) -> WorkersBackend:
    """Construct the pool; nothing connects yet.

    ``bring`` makes sure that an adapter's files are in the gateway's folder before a worker is to load them.

    Raises:
        WorkerKeyMissing: the key is not there; names the variable.
    """
    found_out = section.dialect == "auto"
    dialect = Dialect.VLLM if found_out else Dialect(section.dialect)
    urls = [url.rstrip("/") for url in section.base_urls]
    key = _key(name, section.api_key_env, environ)
    context = ssl.create_default_context() if any(url.startswith("https:") for url in urls) else None
    headers = (NO_FALLBACK,) if found_out or dialect is Dialect.SLUICE else ()

    def make_client(url: str, timeouts: Timeouts, max_connections: int) -> WorkerClient:
        return WorkerClient(
            url,
            timeouts=timeouts,
            max_connections=max_connections,
            bearer=key,
            headers=headers,
            context=context,
        )

    def make_loras(client: WorkerClient) -> WorkerLoras:
        return WorkerLoras(
            client,
            places=section.max_loaded_adapters,
            folder=section.adapters_folder,
            bring=bring,
            clock=clock,
            fixed=section.adapters,
        )

    features = FEATURES[dialect] if section.features is None else frozenset(section.features)
    choice = WorkerChoice(
        urls,
        factor=section.affinity_load_factor,
        index_blocks=section.affinity_index_blocks,
        affinity=section.affinity,
    )
    presence = WorkersInService(clock)
    workers = [
        Worker(
            url,
            make_client=make_client,
            timeouts=Timeouts(
                connect_s=section.connect_timeout_seconds,
                first_token_s=section.first_token_timeout_seconds,
                idle_s=section.idle_timeout_seconds,
                total_s=section.total_timeout_seconds,
                keepalive_s=section.keepalive_seconds,
            ),
            max_connections=section.max_connections,
            rules=HealthRules(
                eject_after=section.eject_after_failures,
                error_share=section.eject_error_share,
                eject_s=section.eject_seconds,
                eject_max_s=section.eject_max_seconds,
                slow_start_s=section.slow_start_seconds,
            ),
            watch=WatchRules(
                probe_path=section.probe_path or PROBE_PATHS[dialect],
                probe_interval_s=section.probe_interval_seconds,
                probe_timeout_s=section.probe_timeout_seconds,
                metrics_path=section.metrics_path,
                metrics_interval_s=section.metrics_interval_seconds,
                # A Sluice lists what it could load too.
                sluice_probe_path=section.probe_path or PROBE_PATHS[Dialect.SLUICE],
                lists_models=dialect is Dialect.VLLM and Feature.LORA in features,
            ),
            max_running=section.max_running,
            clock=clock,
            presence=presence,
            on_return=choice.forget,
            make_loras=make_loras if section.load_adapters else None,
            on_sluice=(lambda: backend.speak(Dialect.SLUICE)) if found_out else None,
        )
        for url in urls
    ]
    hedge = section.hedge
    rules = HedgeRules(hedge.quantile, hedge.min_ms / 1000, hedge.max_share)
    backend = WorkersBackend(
        name,
        model=section.model,
        workers=workers,
        writer=CompletionWriter(
            model=section.model,
            dialect=dialect,
            token_ids=section.prompt == "token_ids",
            send_priority=section.send_priority,
            adapters=MappingProxyType(dict(section.adapters)),
            loads=section.load_adapters,
            folder=section.adapters_folder,
        ),
        pool=WorkerPool(workers, choice, max_running=section.max_running, random=random.Random()),
        presence=presence,
        features=features,
        token_bytes=token_bytes,
        block_tokens=section.affinity_block_tokens,
        max_attempts=section.max_attempts,
        clock=clock,
        hedging=HedgePolicy(rules) if hedge.enabled else None,
    )
    return backend


def _key(name: str, variable: str | None, environ: Mapping[str, str]) -> str | None:
    if variable is None:
        return None
    key, place = environ.get(variable, ""), f"backends.{name}.api_key_env"
    if not key:
        raise WorkerKeyMissing(f"{place}: the variable {variable} is not set; set it, or leave the key out")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise WorkerKeyMissing(f"{place}: {variable} holds characters that no header may have")
    return key
