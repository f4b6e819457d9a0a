"""The part of the composition root that makes the engine in process and the backends."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from adapters.registry import AdapterRegistry
from engine.errors import EngineDead
from engine.values import EngineConfig
from gateway.backends.bedrock.build import BedrockMissing, make_bedrock
from gateway.backends.embedded_host import EmbeddedHost
from gateway.backends.host import EngineHost, Resident
from gateway.backends.port import Backend
from gateway.backends.vllm.host import VllmHost
from gateway.backends.workers.backend import WorkersBackend
from gateway.backends.workers.build import WorkerKeyMissing, make_workers
from gateway.config import ConfigError, Settings
from gateway.config_backends import BedrockSection, EngineBackend, OpenAIBackend
from gateway.config_engine import EngineSection
from gateway.model_text import sampling_defaults
from observability.workers import WorkerStatus


@dataclass(frozen=True, slots=True)
class Engines:
    """What generates: the engine in process, if there is one, every backend by name, and their loops."""

    host: EngineHost | None
    backends: Mapping[str, Backend]
    residents: Mapping[str, Resident]

    @property
    def on_engine(self) -> Collection[str]:
        """The names of the backends on the engine in process."""
        return self.backends.keys() - self.residents.keys()

    def workers(self) -> Mapping[str, Sequence[WorkerStatus]]:
        """The workers of each pool, as they stand now."""
        pools = {name: one for name, one in self.backends.items() if isinstance(one, WorkersBackend)}
        return {name: pool.status() for name, pool in pools.items()}

    @property
    def beside_the_engine(self) -> bool:
        """Whether some backend can answer when the engine cannot."""
        return bool(self.residents)


def make_engines(
    settings: Settings,
    *,
    token_bytes: Callable[[int], bytes],
    clock: Callable[[], float],
    on_step: Callable[[int], None],
    on_death: Callable[[EngineDead], None],
) -> Engines:
    """Construct what the configuration names; nothing runs yet.

    Raises:
        ConfigError: a backend cannot be made of what the configuration says.
    """
    host = _host(settings, token_bytes, on_step, on_death)
    backends: dict[str, Backend] = {}
    residents: dict[str, Resident] = {}
    for name, section in settings.backends.items():
        if isinstance(section, EngineBackend) and host is not None:
            backends[name] = host.backend(name)
        if isinstance(section, OpenAIBackend):
            pool = _workers(name, section, token_bytes, clock)
            backends[name], residents[name] = pool, pool
        if isinstance(section, BedrockSection):
            try:
                bedrock = make_bedrock(name, section, clock=clock)
            except BedrockMissing as error:
                raise ConfigError(str(error)) from None
            backends[name], residents[name] = bedrock, bedrock
    return Engines(host, backends, residents)


def _workers(
    name: str,
    section: OpenAIBackend,
    token_bytes: Callable[[int], bytes],
    clock: Callable[[], float],
) -> WorkersBackend:
    try:
        return make_workers(name, section, token_bytes=token_bytes, clock=clock, environ=os.environ)
    except WorkerKeyMissing as error:
        raise ConfigError(str(error)) from None


def _host(
    settings: Settings,
    token_bytes: Callable[[int], bytes],
    on_step: Callable[[int], None],
    on_death: Callable[[EngineDead], None],
) -> EngineHost | None:
    section = settings.engine
    if section.kind == "embedded":
        return EmbeddedHost(
            engine_config(section),
            model=section.model_id,
            defaults=sampling_defaults(Path(section.model)),
            token_bytes=token_bytes,
            share_prefixes=section.share_prefix_across_tenants,
            on_step=on_step,
            on_death=on_death,
        )
    if section.kind == "vllm":
        return VllmHost(
            section,
            adapters_registered=_any_adapters(settings),
            defaults=sampling_defaults(Path(section.model)),
            token_bytes=token_bytes,
            on_step=on_step,
            on_death=on_death,
            new_seed=lambda: secrets.randbits(31),
        )
    return None


def _any_adapters(settings: Settings) -> bool:
    """Whether the registry lists an adapter."""
    file, base = settings.adapters.file, settings.engine.model_id
    return bool(file and AdapterRegistry.from_file(Path(file), base_model=base).ids)


def engine_config(section: EngineSection) -> EngineConfig:
    """The embedded engine's settings; what is not set keeps the engine's own default."""
    optional = {
        name: value
        for name in ("max_num_batched_tokens", "kv_cache_bytes")
        if (value := getattr(section, name)) is not None
    }
    return EngineConfig(
        model=section.model,
        dtype=section.dtype,
        device=section.device,
        max_model_len=section.max_model_len,
        block_size=section.block_size,
        max_num_seqs=section.max_num_seqs,
        num_blocks=section.num_blocks,
        num_threads=section.num_threads,
        seed=section.seed,
        enforce_eager=section.enforce_eager,
        enable_prefix_caching=section.enable_prefix_caching,
        gpu_memory_utilization=section.gpu_memory_utilization,
        max_loras=section.max_loras,
        max_lora_rank=section.max_lora_rank,
        **optional,
    )
