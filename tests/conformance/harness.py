"""What the conformance suite needs of a backend under test, and the tokenizer and adapters that all share."""

from __future__ import annotations

import asyncio
import importlib.metadata
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from msgspec.structs import replace

from adapters.values import Adapter
from budgeting.counting import ChatTokenizer
from budgeting.values import Message, Role
from gateway.backends.port import Backend, Completion, Work
from gateway.contracts.events import Delta
from gateway.contracts.values import FormatType, ResponseFormat, Sampling, TokenLogprob
from tests.engine.adapters import write_adapter

REPOSITORY = Path(__file__).resolve().parents[2]
DEMO_MODEL = REPOSITORY / "models" / "demo"
# Ids of the adapters that every specimen with LoRA is given; a worker serves them under the same names.
ADAPTERS = ("conform_a", "conform_b")
MAX_LORA_RANK = 8
MAX_MODEL_LEN = 1024
BLOCK_SIZE = 32  # the smallest block of vLLM's CPU attention
IDLE_TIMEOUT_S, IDLE_POLL_S = 20.0, 0.02


def on_gpu() -> bool:
    """Whether vLLM's build for CUDA is installed; the CPU build is a distribution with another name."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return bool(importlib.metadata.version("vllm"))
    return False


# vLLM's options, besides those that a test sets. Its LoRA kernels for a GPU take only half precision; float16 is closer
# to the CPU's float32. Its share of the card must be free when it starts, so each engine of a run takes a small one.
VLLM_DTYPE = "float16" if on_gpu() else "float32"
VLLM_OPTIONS: dict[str, Any] = (
    {"dtype": VLLM_DTYPE, "gpu_memory_utilization": 0.3} if on_gpu() else {"num_threads": 1}
)

T = TypeVar("T")
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Specimen:
    """A running backend of the demo model, and what a test may expect of it.

    Args:
        backend: the port, ready. Adapters of ``adapters`` can be used at once.
        idle: whether nothing is left on the backend: no sequence running or waiting, no KV block held by a
            request, no connection in use, no task of a call. Asked repeatedly until true.
        adapters: what ``Work.adapter`` may be, by id; empty when the backend has no LoRA.
        tokenizer: of the demo model; what the prompts are made with.
        computes: whether a model answers; a scripted backend says the same whatever it is asked.
        max_model_len: longest sequence that it takes, prompt and answer together, in tokens.
        block_size: tokens of a block of its prefix cache; nothing shorter can be found there.
        counts_cached: whether ``usage.cached_tokens`` is real.
        exact_ids: whether it sees ``Work.token_ids`` themselves, not a text that it tokenizes again.
        priority: whether it takes a priority other than 0.
        reports_blocks: whether its load reports KV blocks; a hosted model's does not.
        returns_ids: whether its deltas contain token ids.
        exact_prompt: whether it can tell the prompt's tokens from those of a partial answer.
        script: sets the next answer, or none, where no model of the backend computes it.
    """

    backend: Backend
    idle: Callable[[], Awaitable[bool]]
    adapters: Mapping[str, Adapter] = field(default_factory=lambda: MappingProxyType({}))
    tokenizer: ChatTokenizer = field(default_factory=lambda: demo_tokenizer())
    computes: bool = True
    max_model_len: int = MAX_MODEL_LEN
    block_size: int = BLOCK_SIZE
    counts_cached: bool = True
    exact_ids: bool = True
    priority: bool = True
    reports_blocks: bool = True
    returns_ids: bool = True
    exact_prompt: bool = True
    script: Callable[..., None] | None = None

    async def wait_idle(self) -> None:
        """Wait until nothing is left on the backend; fail when something stays."""
        for _ in range(round(IDLE_TIMEOUT_S / IDLE_POLL_S)):
            if await self.idle():
                return
            await asyncio.sleep(IDLE_POLL_S)
        raise AssertionError(f"something is left on {self.backend.name} after {IDLE_TIMEOUT_S:g} s")

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a raw text."""
        return self.tokenizer.encode(text)

    def chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the token ids of a conversation, with the generation prompt."""
        return self.tokenizer.encode_chat(messages)

    def work(self, text: str, *, raw: bool = False, system: str | None = None, **changes: Any) -> Work:
        """Return the journey's ``Work`` for one user turn (or a raw prompt), greedy unless changed.

        Fields of ``Sampling`` and of ``Work`` are given by their names.
        """
        turns = [Message(Role.USER, text)]
        messages = tuple([Message(Role.SYSTEM, system), *turns] if system is not None else turns)
        asked = {name: changes.pop(name) for name in tuple(changes) if name in Sampling.__struct_fields__}
        work = Work(
            generation_id=f"gen_{next(_numbers)}",
            token_ids=self.encode(text) if raw else self.chat(messages),
            messages=() if raw else messages,
            sampling=Sampling(**{"max_tokens": 16, "temperature": 0.0, **asked}),
            cache_salt="acme",
        )
        return replace(work, **changes)


@dataclass
class CollectedAnswer:
    """An answer as the backend gave it: every delta, and the completion."""

    deltas: list[Delta]
    completion: Completion

    @property
    def text(self) -> str:
        return self.of(0)

    def of(self, index: int) -> str:
        """Return the text of one choice."""
        return "".join(delta.text for delta in self.deltas if delta.index == index)

    @property
    def tokens(self) -> int:
        """The sum of the deltas' token counts."""
        return sum(delta.tokens for delta in self.deltas)

    def logprobs(self, index: int = 0) -> tuple[TokenLogprob, ...]:
        return tuple(entry for delta in self.deltas if delta.index == index for entry in delta.logprobs)


async def collect(backend: Backend, work: Work) -> CollectedAnswer:
    """Generate an answer to its end and record it."""
    deltas: list[Delta] = []

    async def out(delta: Delta) -> None:
        deltas.append(delta)

    completion = await backend.generate(work, out)
    return CollectedAnswer(deltas, completion)


async def collect_all(backend: Backend, works: Iterable[Work]) -> list[CollectedAnswer]:
    """Generate all concurrently: a step of many answers takes an engine about as long as a step of one."""
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(collect(backend, work)) for work in works]
    return [call.result() for call in calls]


def shaped(kind: FormatType, spec: str = "") -> ResponseFormat:
    """Return the response format of a structured answer."""
    return ResponseFormat(kind, spec)


def demo_tokenizer() -> ChatTokenizer:
    """Load the demo model's tokenizer."""
    return ChatTokenizer(DEMO_MODEL)


def make_adapters(folder: Path) -> Mapping[str, Adapter]:
    """Write the adapters of ``ADAPTERS``, which every specimen with LoRA has, under ``folder``."""
    made = {}
    for number, name in enumerate(ADAPTERS, start=1):
        path = folder / name
        if not path.is_dir():
            write_adapter(path, DEMO_MODEL, seed=number, rank=MAX_LORA_RANK)
        made[name] = Adapter(name, number, "demo", str(path))
    return MappingProxyType(made)


@asynccontextmanager
async def in_one_task(specimen: AbstractAsyncContextManager[T]) -> AsyncIterator[T]:
    """Enter and leave the specimen in one task; a test framework's set-up and tear-down run in two."""
    ready: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    over = asyncio.Event()

    async def stage() -> None:
        try:
            async with specimen as running:
                ready.set_result(running)
                await over.wait()
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)

    async with asyncio.TaskGroup() as group:
        group.create_task(stage(), name="stage")
        try:
            yield await ready
        finally:
            over.set()
