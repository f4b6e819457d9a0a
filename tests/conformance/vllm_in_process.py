"""vLLM in the process tree of the tests, as a gateway has it in its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from engine.errors import EngineDead
from gateway.backends.vllm.host import VllmHost
from gateway.config.engine import EngineSection
from gateway.contracts.events import Delta
from gateway.prompts.text import sampling_defaults
from tests.conformance.harness import (
    ADAPTERS,
    BLOCK_SIZE,
    DEMO_MODEL,
    MAX_LORA_RANK,
    MAX_MODEL_LEN,
    VLLM_OPTIONS,
    Specimen,
    demo_tokenizer,
    make_adapters,
)


@dataclass(frozen=True)
class RunningVllm:
    """A vLLM host with one backend, and the engine deaths that it has reported."""

    host: VllmHost
    specimen: Specimen
    deaths: list[EngineDead]


@asynccontextmanager
async def vllm_in_process(folder: Path) -> AsyncIterator[RunningVllm]:
    """Start a vLLM host; stop it at the end."""
    deaths: list[EngineDead] = []
    tokenizer = demo_tokenizer()
    section = EngineSection(
        kind="vllm",
        model=str(DEMO_MODEL),
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        max_num_seqs=32,
        kv_cache_bytes=64 << 20,
        **VLLM_OPTIONS,
        enforce_eager=True,
        max_loras=len(ADAPTERS),
        max_lora_rank=MAX_LORA_RANK,
        tool_parser="hermes",
        seed=0,
    )
    host = VllmHost(
        section,
        adapters_registered=True,
        defaults=sampling_defaults(DEMO_MODEL),
        token_bytes=tokenizer.token_bytes,
        on_step=lambda preemptions: None,
        on_death=deaths.append,
        new_seed=lambda: 0,
    )
    await host.start()
    backend = host.backend("local")
    specimen: Specimen

    async def idle() -> bool:
        """Step the engine once more; only then does it report what other requests have left."""
        if host.board.in_flight:
            return False
        await backend.generate(specimen.work("Hello", max_tokens=1, cache_salt="idle"), _ignore)
        return host.board.reported == (0, 0, 0.0)

    specimen = Specimen(backend, idle, make_adapters(folder), tokenizer)
    try:
        yield RunningVllm(host, specimen, deaths)
    finally:
        await host.stop(10.0)


async def _ignore(delta: Delta) -> None:
    """Drop the delta."""
