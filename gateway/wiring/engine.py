"""Makes the engine in process: embedded or vLLM, under its supervisor."""

import secrets
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

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
from resilience.supervisor import Supervisor, SupervisorEvent


def make_engine(
    settings: Settings,
    *,
    token_bytes: Callable[[int], bytes],
    clock: Callable[[], float],
    on_step: Callable[[int], None],
    emit: Callable[[SupervisorEvent], None],
    make_slots: MakeSlots,
    encode: EncodePart,
) -> SupervisedHost | None:
    """The engine of ``settings.engine``, not started; ``None`` when its kind is ``none``."""
    section = settings.engine
    make = engine_maker(settings, token_bytes, make_slots, encode)
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
    settings: Settings,
    token_bytes: Callable[[int], bytes],
    make_slots: MakeSlots = LoraSlots,
    encode: EncodePart = ids_alone,
) -> MakeHost | None:
    """What makes an engine of the configured kind; the files that it needs are read here, once."""
    section = settings.engine
    if section.kind == "none":
        return None
    defaults = sampling_defaults(Path(section.model))
    if section.kind == "embedded":
        config = engine_config(section)
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
                on_step=on_step,
                on_death=on_death,
                make_slots=make_slots,
                encode=encode,
            )

        return embedded
    adapters_registered = _any_adapters(settings)

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
