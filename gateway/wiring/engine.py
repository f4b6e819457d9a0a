"""Makes the engines in process: embedded or vLLM, each under a supervisor of its own."""

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from budgeting.counting import ChatTokenizer
from budgeting.tokenizer_files import read_tokenizer_files
from engine.errors import EngineDead
from engine.values import EngineConfig
from gateway.backends.embedded_host import EmbeddedHost
from gateway.backends.embedded_vectors import EncodePart, ids_alone
from gateway.backends.hermes import CALL_START
from gateway.backends.host import EngineHost, MakeHost
from gateway.backends.lora_slots import LoraSlots, MakeSlots
from gateway.backends.supervised import SupervisedHost
from gateway.backends.vllm.host import VllmHost
from gateway.config.adapters_file import read_registry_file
from gateway.config.engine import EngineSection
from gateway.config.settings import Settings
from gateway.prompts.text import sampling_defaults
from gateway.weights.source import Weights
from resilience.supervisor import Supervisor, SupervisorEvent


@dataclass(frozen=True, slots=True)
class EngineParts:
    """An engine in process, not started.

    ``name`` is its key of ``engines``, ``None`` of ``engine``; ``backends`` are on it, and share an admission
    gate.
    """

    name: str | None
    section: EngineSection
    weights: Weights
    backends: Sequence[str]
    host: SupervisedHost

    @property
    def gate(self) -> str:
        """The first of the backends' names; empty where there are none."""
        return min(self.backends, default="")


def make_engines(
    settings: Settings,
    weights: Mapping[str | None, Weights],
    *,
    tokenizer: Callable[[str], ChatTokenizer],
    clock: Callable[[], float],
    on_step: Callable[[str, int], None],
    emit: Callable[[SupervisorEvent], None],
    make_slots: MakeSlots,
    encode: Callable[[ChatTokenizer], EncodePart],
) -> Sequence[EngineParts]:
    """The engines of ``engine``, if its kind is not ``none``, and of ``engines``.

    ``on_step`` takes the gate, and all preemptions; ``tokenizer`` is of a model. Adapters are loaded on
    ``engine`` alone.
    """
    starting = asyncio.Lock()
    found = []
    for name, section in settings.engine_sections.items():
        own = tokenizer(section.model_id)
        make = engine_maker(
            settings, section, own.token_bytes, make_slots if name is None else LoraSlots, encode(own)
        )
        if make is None:
            continue
        backends = [one for one, of in settings.backends.items() if of.kind == "engine" and of.engine == name]
        gate = min(backends, default="")
        host = _supervised(make, section, gate, clock=clock, on_step=on_step, emit=emit, starting=starting)
        found.append(EngineParts(name, section, weights[name], backends, host))
    return found


def _supervised(
    make: MakeHost,
    section: EngineSection,
    gate: str,
    *,
    clock: Callable[[], float],
    on_step: Callable[[str, int], None],
    emit: Callable[[SupervisorEvent], None],
    starting: asyncio.Lock,
) -> SupervisedHost:
    return SupervisedHost(
        make,
        supervisor=Supervisor(
            max_restarts_per_hour=section.max_restarts_per_hour,
            hang_s=section.hang_seconds,
            stopped_s=section.stopped_seconds,
        ),
        start_timeout_s=section.start_timeout_seconds,
        on_step=lambda preemptions: on_step(gate, preemptions),
        emit=lambda event: emit(replace(event, backend=gate)),
        clock=clock,
        starting=starting,
    )


def engine_maker(
    settings: Settings,
    section: EngineSection,
    token_bytes: Callable[[int], bytes],
    make_slots: MakeSlots = LoraSlots,
    encode: EncodePart = ids_alone,
) -> MakeHost | None:
    """What makes an engine of the configured kind; the files that it needs are read here, once."""
    if section.kind == "none":
        return None
    defaults = sampling_defaults(Path(section.model))
    if section.kind == "embedded":
        config = engine_config(section)
        if section is not settings.engine:
            config = replace(config, max_loras=0)
        calls_tools = calls_as_text(section)

        def embedded(
            *,
            on_step: Callable[[int], None],
            on_death: Callable[[EngineDead], None],
            kv_blocks: int | None = None,
        ) -> EngineHost:
            return EmbeddedHost(
                config if kv_blocks is None else replace(config, num_blocks=kv_blocks),
                model=section.model_id,
                defaults=defaults,
                token_bytes=token_bytes,
                share_prefixes=section.share_prefix_across_tenants,
                calls_tools=calls_tools,
                generates=section.task == "generate",
                on_step=on_step,
                on_death=on_death,
                make_slots=make_slots,
                encode=encode,
            )

        return embedded
    adapters_registered = section is settings.engine and _any_adapters(settings)

    def vllm(
        *,
        on_step: Callable[[int], None],
        on_death: Callable[[EngineDead], None],
        kv_blocks: int | None = None,
    ) -> EngineHost:
        return VllmHost(
            section if kv_blocks is None else section.model_copy(update={"num_blocks": kv_blocks}),
            adapters_registered=adapters_registered,
            defaults=defaults,
            token_bytes=token_bytes,
            on_step=on_step,
            on_death=on_death,
            new_seed=lambda: secrets.randbits(31),
            make_slots=make_slots,
            encode=encode,
        )

    return vllm


def calls_as_text(section: EngineSection) -> bool:
    """Whether the engine in process is bound to tool calls that its model writes as text."""
    return (
        section.kind == "embedded" and CALL_START in read_tokenizer_files(section.tokenizer_folder).template
    )


def _any_adapters(settings: Settings) -> bool:
    """Whether the registry's file lists an adapter of the served model."""
    file, base = settings.adapters.file, settings.engine.model_id
    return bool(file) and any(
        adapter.base_model == base for adapter in read_registry_file(Path(str(file))).adapters
    )


def engine_config(section: EngineSection) -> EngineConfig:
    """The settings of the embedded engine; what is not set has the engine's default."""
    given = {one.name: getattr(section, one.name, None) for one in fields(EngineConfig)}
    return EngineConfig(**{name: value for name, value in given.items() if value is not None})
