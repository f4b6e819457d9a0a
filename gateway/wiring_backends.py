"""The part of the composition root that makes the engine in process and the backends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.errors import EngineDead
from engine.values import EngineConfig
from gateway.backends.embedded_host import EmbeddedHost
from gateway.backends.host import EngineHost, Resident
from gateway.backends.port import Backend
from gateway.config import Settings
from gateway.config_backends import EngineBackend
from gateway.config_engine import EngineSection
from gateway.model_text import sampling_defaults


@dataclass(frozen=True, slots=True)
class Engines:
    """What generates: the engine in process, if there is one, every backend by name, and their loops."""

    host: EngineHost | None
    backends: Mapping[str, Backend]
    residents: Mapping[str, Resident]

    @property
    def beside_the_engine(self) -> bool:
        """Whether some backend can answer when the engine cannot."""
        return bool(self.residents)


def make_engines(
    settings: Settings,
    *,
    token_bytes: Callable[[int], bytes],
    clock: Callable[[], float],
    on_preemptions: Callable[[int], None],
    on_death: Callable[[EngineDead], None],
) -> Engines:
    """Construct what the configuration names; nothing runs yet.

    Raises:
        ConfigError: a backend cannot be made of what the configuration says.
    """
    host = _host(settings, token_bytes, on_preemptions, on_death)
    backends: dict[str, Backend] = {}
    residents: dict[str, Resident] = {}
    for name, section in settings.backends.items():
        if isinstance(section, EngineBackend) and host is not None:
            backends[name] = host.backend(name)
    return Engines(host, backends, residents)


def _host(
    settings: Settings,
    token_bytes: Callable[[int], bytes],
    on_preemptions: Callable[[int], None],
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
            on_preemptions=on_preemptions,
            on_death=on_death,
        )
    return None


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
        enable_prefix_caching=section.enable_prefix_caching,
        gpu_memory_utilization=section.gpu_memory_utilization,
        max_loras=section.max_loras,
        max_lora_rank=section.max_lora_rank,
        **optional,
    )
