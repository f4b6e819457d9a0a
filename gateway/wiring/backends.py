"""The part of the composition root that makes the engine in process and the backends."""

from __future__ import annotations

import os
import secrets
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from adapters.registry_file import read_registry_file
from adapters.values import Adapter
from engine.errors import EngineDead
from engine.values import EngineConfig
from gateway.backends.embedded_host import EmbeddedHost
from gateway.backends.host import EngineHost, MakeHost, Resident
from gateway.backends.lora_slots import LoraSlots, MakeSlots
from gateway.backends.port import Backend
from gateway.backends.supervised import SupervisedHost
from gateway.backends.vllm.host import VllmHost
from gateway.backends.workers.backend import WorkersBackend
from gateway.backends.workers.loras import WorkerLoras
from gateway.config.backends import BedrockSection, EngineBackend, OpenAIBackend
from gateway.config.engine import EngineSection
from gateway.config.errors import ConfigError
from gateway.config.settings import Settings
from gateway.prompts.model_text import sampling_defaults
from gateway.wiring.bedrock import BedrockMissing, make_bedrock
from gateway.wiring.workers import WorkerKeyMissing, already_there, make_workers
from observability.workers import WorkerStatus
from resilience.supervisor import Supervisor
from resilience.supervisor_events import SupervisorEvent


class ResidentBackend(Backend, Resident, Protocol):
    """A backend with loops of its own."""


# Makes a backend by its name, given what tells how many requests wait for it here.
MakeEnginePool = Callable[[str, Callable[[], int]], ResidentBackend]


@dataclass(frozen=True, slots=True)
class Engines:
    """What generates: the engine in process, if there is one, every backend by name, and their loops."""

    host: SupervisedHost | None
    backends: Mapping[str, Backend]
    residents: Mapping[str, Resident]

    @property
    def on_engine(self) -> Collection[str]:
        """The names of the backends on the engine in process."""
        return self.backends.keys() - self.residents.keys()

    def loras(self) -> Sequence[WorkerLoras]:
        """What is loaded on the workers in service that this gateway loads adapters on."""
        return [
            held for one in self.backends.values() if isinstance(one, WorkersBackend) for held in one.loras()
        ]

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
    emit: Callable[[SupervisorEvent], None],
    make_shelf: MakeSlots = LoraSlots,
    bring: Callable[[Adapter], Awaitable[None]] = already_there,
    engine_pool: Callable[[str], ResidentBackend] | None = None,
) -> Engines:
    """Construct what the configuration names; nothing runs yet.

    With ``engine_pool`` the engine runs elsewhere: it makes the backends of kind ``engine``.

    Raises:
        ConfigError: a backend cannot be made of what the configuration says.
    """
    host = None
    if engine_pool is None:
        host = _host(settings, token_bytes, clock, on_step, emit, make_shelf)
    backends: dict[str, Backend] = {}
    residents: dict[str, Resident] = {}
    for name, section in settings.backends.items():
        if isinstance(section, EngineBackend) and host is not None:
            backends[name] = host.backend(name)
        if isinstance(section, EngineBackend) and engine_pool is not None:
            backends[name] = residents[name] = engine_pool(name)
        if isinstance(section, OpenAIBackend):
            pool = _workers(name, section, token_bytes, clock, bring)
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
    bring: Callable[[Adapter], Awaitable[None]],
) -> WorkersBackend:
    try:
        return make_workers(
            name, section, token_bytes=token_bytes, clock=clock, environ=os.environ, bring=bring
        )
    except WorkerKeyMissing as error:
        raise ConfigError(str(error)) from None


def _host(
    settings: Settings,
    token_bytes: Callable[[int], bytes],
    clock: Callable[[], float],
    on_step: Callable[[int], None],
    emit: Callable[[SupervisorEvent], None],
    make_shelf: MakeSlots,
) -> SupervisedHost | None:
    section = settings.engine
    make = engine_maker(settings, token_bytes, make_shelf)
    if make is None:
        return None
    return SupervisedHost(
        make,
        supervisor=Supervisor(
            max_restarts_per_hour=section.max_restarts_per_hour,
            hang_s=section.hang_seconds,
            stopped_s=section.stopped_seconds,
        ),
        start_timeout_s=section.start_timeout_seconds,
        on_step=on_step,
        emit=emit,
        clock=clock,
    )


def engine_maker(
    settings: Settings, token_bytes: Callable[[int], bytes], make_shelf: MakeSlots = LoraSlots
) -> MakeHost | None:
    """What makes an engine of the configured kind; all that it needs is read here, once."""
    section = settings.engine
    if section.kind == "none":
        return None
    defaults = sampling_defaults(Path(section.model))
    if section.kind == "embedded":
        config = engine_config(section)

        def embedded(*, on_step: Callable[[int], None], on_death: Callable[[EngineDead], None]) -> EngineHost:
            return EmbeddedHost(
                config,
                model=section.model_id,
                defaults=defaults,
                token_bytes=token_bytes,
                share_prefixes=section.share_prefix_across_tenants,
                on_step=on_step,
                on_death=on_death,
                make_shelf=make_shelf,
            )

        return embedded
    adapters_registered = _any_adapters(settings)

    def vllm(*, on_step: Callable[[int], None], on_death: Callable[[EngineDead], None]) -> EngineHost:
        return VllmHost(
            section,
            adapters_registered=adapters_registered,
            defaults=defaults,
            token_bytes=token_bytes,
            on_step=on_step,
            on_death=on_death,
            new_seed=lambda: secrets.randbits(31),
            make_shelf=make_shelf,
        )

    return vllm


def _any_adapters(settings: Settings) -> bool:
    """Whether the registry's file lists an adapter of the served model."""
    file, base = settings.adapters.file, settings.engine.model_id
    return bool(file) and any(
        adapter.base_model == base for adapter in read_registry_file(Path(str(file))).adapters
    )


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
