"""Builds the in-process engines: embedded or vLLM, each with its own supervisor."""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

from budgeting.counting import ChatTokenizer
from budgeting.tokenizer_files import read_tokenizer_files
from engine.values import EngineConfig
from gateway.backends.embedded import EmbeddedBackend
from gateway.backends.embedded_host import EmbeddedHost
from gateway.backends.embedded_vectors import EncodePart, ids_alone
from gateway.backends.hermes import CALL_START
from gateway.backends.host import MakeHost
from gateway.backends.lora_slots import LoraSlots, MakeSlots
from gateway.backends.supervised import SupervisedHost
from gateway.backends.vllm.host import VllmHost
from gateway.config.adapters_file import read_registry_file
from gateway.config.engine import EngineSection
from gateway.config.settings import Settings
from gateway.prompts.text import sampling_defaults
from gateway.weights.source import Weights
from gateway.wiring.foundation import Foundation
from resilience.supervisor import Supervisor, SupervisorEvent


@dataclass(frozen=True, slots=True)
class EngineParts:
    """An in-process engine, not started.

    ``name`` is its key in ``engines``, ``None`` for ``engine``; its ``backends`` share an admission gate.
    """

    name: str | None
    section: EngineSection
    weights: Weights
    backends: Sequence[str]
    host: SupervisedHost

    @property
    def gate(self) -> str:
        """The name of the admission gate: the first of the backends' names; empty if there are none."""
        return min(self.backends, default="")


def make_engines(
    base: Foundation,
    *,
    tokenizer: Callable[[Path], ChatTokenizer],
    on_step: Callable[[str, int], None],
    make_slots: MakeSlots,
    encode: Callable[[ChatTokenizer], EncodePart],
) -> Sequence[EngineParts]:
    """Build the engines of ``engine``, if its kind is not ``none``, and of ``engines``.

    ``on_step`` takes the gate and its total of preemptions; ``tokenizer`` takes a tokenizer's folder. Only
    ``engine`` loads adapters.
    """
    starting, settings, emit = asyncio.Lock(), base.settings, base.events.emit
    found = []
    for name, section in settings.engine_sections.items():
        own = tokenizer(section.tokenizer_folder)
        make = engine_maker(
            settings, section, own.token_bytes, make_slots if name is None else LoraSlots, encode(own)
        )
        if make is None:
            continue
        backends = [one for one, of in settings.backends.items() if of.kind == "engine" and of.engine == name]
        gate = min(backends, default="")
        host = SupervisedHost(
            make,
            supervisor=Supervisor(
                max_restarts_per_hour=section.max_restarts_per_hour,
                hang_s=section.hang_seconds,
                stopped_s=section.stopped_seconds,
            ),
            start_timeout_s=section.start_timeout_seconds,
            on_step=partial(on_step, gate),
            emit=partial(_emit_of, emit, gate),
            clock=base.clock,
            starting=starting,
        )
        found.append(EngineParts(name, section, base.weights[name], backends, host))
    return found


def _emit_of(emit: Callable[[SupervisorEvent], None], gate: str, event: SupervisorEvent) -> None:
    emit(replace(event, backend=gate))


def engine_maker(
    settings: Settings,
    section: EngineSection,
    token_bytes: Callable[[int], bytes],
    make_slots: MakeSlots = LoraSlots,
    encode: EncodePart = ids_alone,
) -> MakeHost | None:
    """Return the factory of an engine of the configured kind; the files it needs are read here, once."""
    if section.kind == "none":
        return None
    defaults = sampling_defaults(Path(section.model))
    if section.kind == "embedded":
        config = engine_config(section)
        if section is not settings.engine:
            config = replace(config, max_loras=0)
        make_backend = partial(
            EmbeddedBackend,
            model=section.model_id,
            defaults=defaults,
            token_bytes=token_bytes,
            encode=encode,
            share_prefixes=section.share_prefix_across_tenants,
            calls_tools=calls_as_text(section),
            generates=section.task == "generate",
        )
        return partial(EmbeddedHost, config, make_backend, make_slots=make_slots)
    return partial(
        VllmHost,
        section,
        adapters_registered=section is settings.engine and _any_adapters(settings),
        defaults=defaults,
        token_bytes=token_bytes,
        new_seed=lambda: secrets.randbits(31),
        make_slots=make_slots,
        encode=encode,
    )


def calls_as_text(section: EngineSection) -> bool:
    """Whether the section is an embedded engine whose model writes tool calls as text."""
    return (
        section.kind == "embedded" and CALL_START in read_tokenizer_files(section.tokenizer_folder).template
    )


def _any_adapters(settings: Settings) -> bool:
    file, base = settings.adapters.file, settings.engine.model_id
    return bool(file) and any(
        adapter.base_model == base for adapter in read_registry_file(Path(str(file))).adapters
    )


def engine_config(section: EngineSection) -> EngineConfig:
    """Return the settings of the embedded engine; unset ones have the engine's defaults."""
    given = ((one.name, getattr(section, one.name, None)) for one in fields(EngineConfig))
    return EngineConfig(**{name: value for name, value in given if value is not None})
