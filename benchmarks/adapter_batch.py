"""Adapters in one batch, and changes of adapters under load: ``python -m benchmarks.adapter_batch``.

Part 1 sends 32 greedy requests at once, a quarter each for the base model and three adapters, and compares
the answers with those to the same requests sent one at a time. Part 2 has callers ask without a pause for the
base, two adapters and an alias; in every third window, versions of the alias are added, promoted, rolled back
and retired. Reported are failed requests and the times to the first token of the callers whose adapters do
not change. The windows belong to one run, so that a change of the machine's load affects both kinds.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import typer
import uvloop
from rich.console import Console
from rich.table import Table

from adapters.catalogue import AdapterState, Alias
from adapters.registry import AdapterRegistry
from adapters.selection import AdapterOffer
from adapters.values import Adapter, Selection
from budgeting.counting import ChatTokenizer
from budgeting.values import Message, Role
from gateway.backends.host import EngineHost
from gateway.backends.lora_slots import AdapterHolder, LoraSlots
from gateway.backends.port import Backend, Work
from gateway.config.settings import load_settings
from gateway.contracts.events import Delta
from gateway.contracts.values import Sampling
from gateway.wiring.engine import engine_maker
from resilience.failures import BackendFailure

ADAPTERS = ("manga_domain_v3", "general_support_v2", "jp_style_v1")
QUESTIONS = (
    "What is volume one about?",
    "When will my order arrive?",
    "Can I return a book?",
    "Which series is like this one?",
    "Do you ship abroad?",
    "Who wrote it?",
    "How do I pay?",
    "Is the series finished?",
)
ANSWER_TOKENS, LOAD_TOKENS = 32, 12
# Adapter slots of the engine: the three adapters, and the versions of the alias that come and go.
PLACES = 5
ALIAS = "changing"
# How often, and how many times at most, the benchmark checks whether a retired version is still leased.
POLL_S, MOST_POLLS = 0.01, 3000
# How many distinct failure messages are printed.
MOST_LINES = 5
_numbers = count(1)


class Kind(StrEnum):
    """The engine that is measured."""

    EMBEDDED = "embedded"
    VLLM = "vllm"


@dataclass
class Tally:
    """What the callers measured in the windows of one kind."""

    answered: int = 0
    failed: list[str] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    changes: int = 0

    def quantile(self, share: float) -> float:
        """Return a quantile of the times to the first token, in milliseconds."""
        ordered = sorted(self.first_token_s)
        return 1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


@dataclass(frozen=True)
class EngineRig:
    """A running engine, with the tokenizer and the adapters of the requests to it."""

    backend: Backend
    slots: LoraSlots
    tokenizer: ChatTokenizer
    adapters: Mapping[str, Adapter]

    def work(self, question: str, adapter: Adapter | None, salt: str, tokens: int) -> Work:
        """Return a greedy request whose answer no end-of-text token ends."""
        messages = (Message(Role.USER, question),)
        sampling = Sampling(max_tokens=tokens, temperature=0.0, logit_bias={2: -100.0})
        ids = self.tokenizer.encode_chat(messages)
        name = f"batch-{next(_numbers)}"
        return Work(name, ids, messages, sampling, adapter=adapter, cache_salt=salt)


async def text_of(rig: EngineRig, work: Work) -> str:
    """Return the whole answer to a request."""
    pieces: list[str] = []

    async def out(delta: Delta) -> None:
        pieces.append(delta.text)

    await rig.backend.generate(work, out)
    return "".join(pieces)


async def compare(rig: EngineRig) -> tuple[int, int, int]:
    """Return how many answers equal those given alone, of how many, and how many differ from the base's."""
    asked = [(question, one) for question in QUESTIONS for one in (None, *rig.adapters.values())]
    alone = [await text_of(rig, rig.work(q, a, "alone", ANSWER_TOKENS)) for q, a in asked]
    async with asyncio.TaskGroup() as group:
        # A cache salt of their own, so that these requests find nothing that the single runs have cached.
        running = [
            group.create_task(text_of(rig, rig.work(q, a, "together", ANSWER_TOKENS))) for q, a in asked
        ]
    together = [task.result() for task in running]
    equal = sum(one == other for one, other in zip(alone, together, strict=True))
    base = {q: text for (q, a), text in zip(asked, alone, strict=True) if a is None}
    own = sum(text != base[q] for (q, a), text in zip(asked, alone, strict=True) if a is not None)
    return equal, len(asked), own


class Versions:
    """Plays the adapter registry: adds and removes versions of one alias."""

    def __init__(self, rig: EngineRig, step_s: float) -> None:
        self._stand = rig
        self._step_s = step_s
        self._folder = next(iter(rig.adapters.values())).path
        self._number = len(rig.adapters)
        self._versions: dict[str, Adapter] = {}
        self.registry = AdapterRegistry()
        self._first = self._new()
        self._offer(self._first.adapter_id)

    def _new(self) -> Adapter:
        self._number += 1
        made = Adapter(f"{ALIAS}_v{self._number}", self._number, "demo", self._folder)
        self._versions[made.adapter_id] = made
        return made

    def _offer(self, target: str) -> None:
        here = {**self._stand.adapters, **self._versions}
        self.registry.offer(
            AdapterOffer(
                MappingProxyType(here),
                MappingProxyType(dict.fromkeys(here, AdapterState.ACTIVE)),
                MappingProxyType({ALIAS: Alias(ALIAS, target)}),
            )
        )

    async def change(self, tally: Tally, until_s: float) -> None:
        """Add, promote, roll back and retire a version, again and again until ``until_s``."""
        while time.perf_counter() < until_s:
            new = self._new()
            await self._stand.slots.preload(new)
            self._offer(new.adapter_id)
            await asyncio.sleep(self._step_s)
            self._offer(self._first.adapter_id)
            await asyncio.sleep(self._step_s)
            del self._versions[new.adapter_id]
            self._offer(self._first.adapter_id)
            for _ in range(MOST_POLLS):
                if new.adapter_id not in self.registry.leased():
                    break
                await asyncio.sleep(POLL_S)
            await self._stand.slots.unload(new.adapter_id)
            tally.changes += 4


async def call(rig: EngineRig, versions: Versions, name: str | None, tally: Tally, until_s: float) -> None:
    """Send one request after the other until ``until_s``, without a pause."""
    while time.perf_counter() < until_s:
        question = QUESTIONS[next(_numbers) % len(QUESTIONS)]
        first: list[float] = []
        begun = time.perf_counter()

        async def out(delta: Delta, first: list[float] = first) -> None:
            if not first:
                first.append(time.perf_counter())

        with versions.registry.lease(Selection(name)) as lease:
            try:
                # A cache salt of its own each time: a cached prompt would hide how long its prefill waits.
                work = rig.work(question, lease.adapter, f"load-{next(_numbers)}", LOAD_TOKENS)
                await rig.backend.generate(work, out)
            except BackendFailure as failure:
                tally.failed.append(str(failure))
                continue
        tally.answered += 1
        if name != ALIAS:
            tally.first_token_s.append(first[0] - begun)


async def under_load(
    rig: EngineRig, windows: int, window_s: float, step_s: float
) -> tuple[Tally, Tally, Tally]:
    """Run quiet windows, windows with changes, and a control of quiet windows, which shows the noise."""
    versions, quiet, changing, control = Versions(rig, step_s), Tally(), Tally(), Tally()
    others = [None, *list(rig.adapters)[1:]]

    async def window(tally: Tally, *, changes: bool) -> None:
        until_s = time.perf_counter() + window_s
        async with asyncio.TaskGroup() as group:
            for name in (*others, *others, ALIAS):
                group.create_task(call(rig, versions, name, tally, until_s))
            if changes:
                group.create_task(versions.change(tally, until_s))

    await window(Tally(), changes=True)  # what is slow only the first time is counted in neither
    for _ in range(windows):
        await window(quiet, changes=False)
        await window(changing, changes=True)
        await window(control, changes=False)
    return quiet, changing, control


async def measure(
    kind: Kind, model: Path, windows: int, window_s: float, step_s: float, console: Console
) -> None:
    """Start the engine, run both parts and print their figures."""
    environ = {
        "SLUICE_ENGINE__KIND": kind.value,
        "SLUICE_ENGINE__MODEL": str(model),
        "SLUICE_ENGINE__DTYPE": "float32",
        "SLUICE_ENGINE__BLOCK_SIZE": "32",
        "SLUICE_ENGINE__NUM_THREADS": "1",
        "SLUICE_ENGINE__KV_CACHE_BYTES": str(256 << 20),
        "SLUICE_ENGINE__MAX_MODEL_LEN": "1024",
        "SLUICE_ENGINE__MAX_NUM_SEQS": "32",
        "SLUICE_ENGINE__MAX_LORAS": str(PLACES),
        "SLUICE_ENGINE__MAX_LORA_RANK": "16",
        "SLUICE_ENGINE__ENFORCE_EAGER": "true",
    }
    all_slots: list[LoraSlots] = []

    def make_slots(engine: AdapterHolder, places: int) -> LoraSlots:
        all_slots.append(LoraSlots(engine, places))
        return all_slots[-1]

    tokenizer = ChatTokenizer(model)
    settings = load_settings(None, environ)
    make = engine_maker(settings, settings.engine, tokenizer.token_bytes, make_slots)
    if make is None:
        raise RuntimeError("there is no engine")
    host: EngineHost = make(on_step=lambda preemptions: None, on_death=lambda error: None)
    await host.start()
    try:
        folder = model.parent / "adapters"
        adapters = {
            name: Adapter(name, n, "demo", str((folder / name).absolute()))
            for n, name in enumerate(ADAPTERS, 1)
        }
        rig = EngineRig(host.backend("local"), all_slots[-1], tokenizer, MappingProxyType(adapters))
        equal, of, own = await compare(rig)
        console.print(f"[bold]{kind.value}[/bold]: {equal} of {of} answers in one batch equal those alone")
        console.print(f"{own} of {of * 3 // 4} answers of adapters differ from the base model's")
        show(console, kind, await under_load(rig, windows, window_s, step_s))
    finally:
        await host.stop(10.0)


def show(console: Console, kind: Kind, tallies: tuple[Tally, Tally, Tally]) -> None:
    """Print the table of part 2."""
    quiet, changing, control = tallies
    table = Table(title=f"{kind.value}, 7 callers, {os.cpu_count()} cores; time to the first token, ms")
    for heading in ("windows", "answered", "failed", "changes", "p50", "p99", "most"):
        table.add_column(heading, justify="right")
    for name, one in (("quiet", quiet), ("with changes", changing), ("quiet again", control)):
        quantiles = [f"{one.quantile(share):.1f}" for share in (0.5, 0.99, 1.0)]
        table.add_row(name, str(one.answered), str(len(one.failed)), str(one.changes), *quantiles)
    console.print(table)
    for name, one in (("with changes", changing), ("quiet again (noise)", control)):
        ratios = [one.quantile(share) / quiet.quantile(share) for share in (0.5, 0.99)]
        console.print(f"{name} against quiet: p50 × {ratios[0]:.2f}, p99 × {ratios[1]:.2f}")
    for line in list(dict.fromkeys(changing.failed + quiet.failed + control.failed))[:MOST_LINES]:
        console.print(f"failed: {line}")


def main(
    engine: Annotated[Kind, typer.Option()] = Kind.EMBEDDED,
    model: Annotated[Path, typer.Option()] = Path("models/demo"),
    windows: Annotated[int, typer.Option(min=1, help="windows of each sort")] = 5,
    window_s: Annotated[float, typer.Option(min=0.5)] = 4.0,
    step_s: Annotated[float, typer.Option(min=0.0, help="between two changes")] = 1.0,
) -> None:
    """Run both parts on one engine."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(measure(engine, model, windows, window_s, step_s, Console()))


if __name__ == "__main__":
    typer.run(main)
