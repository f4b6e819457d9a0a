"""Which adapters to keep: ``python -m benchmarks.adapter_residency`` (``--real`` on the embedded engine too).

200 adapters, 8 slots, requests by Zipf's law. Plain LRU, which starts with no adapter loaded, is compared
with what the gateway does: the adapter in least demand is evicted, and those that were in most demand before
a restart are loaded before the gateway is ready. Both get the same requests and run the production class
(``adapters.residency``); LRU is that class with a demand that is always zero. The best hit rate of any fixed
choice of 8 adapters is printed next to them.
Fairness is Jain's index over the adapters: of their hit rates, and of the mean wait for a load.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from rich.console import Console
from rich.table import Table

from adapters.residency import HALF_LIFE_S, AdapterDemand, Full, LoadDecision, Residency
from adapters.values import Adapter
from engine.client import EngineClient
from engine.values import EngineConfig, GenerationRequest, SamplingParams
from gateway.backends.embedded_host import HeldAdapters
from gateway.backends.lora_slots import LoraSlots

SHIPPED = tuple(sorted(Path("models/adapters").iterdir())) if Path("models/adapters").is_dir() else ()
# The P99 target of a whole answer.
ANSWER_S = 1.4
START_S = 60.0
STARTS = 40


class NoHeat(AdapterDemand):
    """A demand that stays zero, so that only the time of the last use decides."""

    def touch(self, name: str, now: float) -> None:
        """Ignore the use."""


class Zipf:
    """Draws adapters by Zipf's law, the first most often; ``shift`` moves the rank of every adapter."""

    def __init__(self, count: int, exponent: float, seed: int) -> None:
        weights = [1 / rank**exponent for rank in range(1, count + 1)]
        self._count, self._sums = count, list(itertools.accumulate(weights))
        self._random = random.Random(seed)
        self.shift = 0

    def draw(self) -> str:
        """Return an adapter's name."""
        rank = bisect(self._sums, self._random.random() * self._sums[-1])
        return f"a{(rank + self.shift) % self._count:03d}"

    def best(self, places: int) -> float:
        """Return the share of requests that the ``places`` most frequent adapters get."""
        share: float = self._sums[places - 1] / self._sums[-1]
        return share


@dataclass
class Tally:
    """The requests, hits and waits of each adapter."""

    asked: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    hits: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    waits: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    at_start: list[bool] = field(default_factory=list)
    full: int = 0

    def add(self, name: str, hit: bool, wait_s: float) -> None:
        """Count one request."""
        self.asked[name] += 1
        self.hits[name] += hit
        self.waits[name].append(wait_s)

    @property
    def hit_rate(self) -> float:
        """Return the share of all requests that found their adapter loaded."""
        return sum(self.hits.values()) / max(1, sum(self.asked.values()))

    def fairness(self) -> tuple[float, float]:
        """Return Jain's index of the hit rates and of the mean waits, over the requested adapters."""
        rates = [self.hits[name] / count for name, count in self.asked.items()]
        return jain(rates), jain(map(statistics.fmean, self.waits.values()))


def jain(values: Iterable[float]) -> float:
    """Return Jain's index: 1 when all values are equal, 1/n when one of n has everything."""
    given = list(values)
    squares = sum(value * value for value in given)
    return sum(given) ** 2 / (len(given) * squares) if squares else 1.0


def simulate(
    requests: Sequence[tuple[float, str]],
    heat: AdapterDemand,
    places: int,
    load_s: float,
    *,
    preload: Sequence[str] = (),
) -> Tally:
    """Replay the requests on a simulated clock; an adapter is in use for the time of an answer."""
    residency, held, tally = Residency(places, heat), set[str](), Tally()
    ends: list[tuple[float, str]] = []
    loads_until = 0.0
    for name in preload[:places]:
        residency.loaded(name, name, 0.0)
        held.add(name)
    for at, name in requests:
        while ends and ends[0][0] <= at:
            ended, other = heappop(ends)
            residency.leave(other, ended)
        residency.enter(name, at)
        decision = residency.decide(name, name, held, at)
        if isinstance(decision, Full):
            tally.full += 1
            residency.leave(name, at)
            continue
        wait_s = 0.0
        if isinstance(decision, LoadDecision):
            if decision.evict is not None:
                residency.unloaded(decision.evict)
                held.discard(decision.evict)
            loads_until = max(at, loads_until) + load_s  # one load at a time
            wait_s = loads_until - at
            residency.loaded(name, name, at)
            held.add(name)
        tally.add(name, not isinstance(decision, LoadDecision), wait_s)
        if at <= START_S:
            tally.at_start.append(not isinstance(decision, LoadDecision))
        heappush(ends, (at + wait_s + ANSWER_S, name))
    return tally


def arrivals(zipf: Zipf, count: int, rate: float, seed: int, *, drift_s: float) -> list[tuple[float, str]]:
    """Poisson arrivals; every ``drift_s`` seconds the ranks move by one."""
    rng, at, made = random.Random(seed), 0.0, []
    for _ in range(count):
        at += rng.expovariate(rate)
        zipf.shift = int(at / drift_s) if drift_s else 0
        made.append((at, zipf.draw()))
    return made


def compare(
    count: int, places: int, requests: int, rate: float, load_s: float, drift_s: float
) -> Mapping[str, Tally]:
    """Run LRU and the gateway's policy on the same requests, after a restart with a history."""
    trace = arrivals(Zipf(count, 1.0, 3), requests, rate, 4, drift_s=drift_s)
    whole = _both(trace, count, places, rate, load_s, seed=1)
    for seed in range(10, 10 + STARTS):  # a minute holds few requests
        short = arrivals(Zipf(count, 1.0, seed), int(rate * START_S), rate, seed, drift_s=0.0)
        for policy, tally in _both(short, count, places, rate, load_s, seed=seed).items():
            whole[policy].at_start += tally.at_start
    return whole


def _both(
    trace: Sequence[tuple[float, str]], count: int, places: int, rate: float, load_s: float, *, seed: int
) -> Mapping[str, Tally]:
    past = arrivals(Zipf(count, 1.0, -seed), int(rate * HALF_LIFE_S * 3), rate, -seed, drift_s=0.0)
    heat = AdapterDemand()
    for at, name in past:
        heat.touch(name, at - past[-1][0])
    hot = heat.most_demanded({name for _, name in past}, 0.0)
    return {
        "LRU, begins empty": simulate(trace, NoHeat(), places, load_s),
        "heat, preloaded": simulate(trace, heat, places, load_s, preload=hot),
    }


async def measure(
    count: int, places: int, requests: int, callers: int
) -> Mapping[str, tuple[Tally, list[float]]]:
    """Measure the same on the embedded engine: hits, waits for loads, and the seconds of each request."""
    found: dict[str, tuple[Tally, list[float]]] = {}
    for policy, heat in (("LRU, begins empty", NoHeat()), ("heat, preloaded", AdapterDemand())):
        client = EngineClient(EngineConfig(model="models/demo", num_threads=1, max_loras=places))
        await client.start()
        try:
            slots = LoraSlots(HeldAdapters(client), places, demand=heat)
            adapters = {
                name: Adapter(name, number + 1, "demo", str(SHIPPED[number % len(SHIPPED)].absolute()))
                for number, name in enumerate(f"a{n:03d}" for n in range(count))
            }
            if not isinstance(heat, NoHeat):
                zipf = Zipf(count, 1.0, 1)
                for _ in range(1_000):
                    heat.touch(zipf.draw(), time.monotonic())
                for name in slots.residency.wanted(adapters, time.monotonic()):
                    await slots.preload(adapters[name])
            found[policy] = await drive(client, slots, adapters, requests, callers)
        finally:
            await client.stop()
    return found


async def drive(
    client: EngineClient, slots: LoraSlots, adapters: Mapping[str, Adapter], requests: int, callers: int
) -> tuple[Tally, list[float]]:
    """Let ``callers`` share the trace; each sends its next request once it has an answer."""
    zipf, tally, seconds = Zipf(len(adapters), 1.0, 3), Tally(), list[float]()
    numbers = iter(range(requests))

    async def caller() -> None:
        for number in numbers:
            name = zipf.draw()
            begun, hit = time.perf_counter(), name in slots.residency.resident
            async with slots.hold(adapters[name]):
                waited = time.perf_counter() - begun
                sampling = SamplingParams(max_tokens=8, temperature=0.0)
                prompt = tuple(range(300, 332))
                with client.submit(
                    GenerationRequest(f"r{number}", prompt, sampling, adapter_id=name)
                ) as ticket:
                    while (await ticket.receive()).finish_reason is None:
                        pass
            tally.add(name, hit, waited)
            seconds.append(time.perf_counter() - begun)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(callers):
            tasks.create_task(caller())
    return tally, seconds


def main(
    adapters: Annotated[int, typer.Option(min=2)] = 200,
    places: Annotated[int, typer.Option(min=1)] = 8,
    requests: Annotated[int, typer.Option(min=100)] = 100_000,
    rate: Annotated[float, typer.Option(min=0.01, help="Requests a second.")] = 2.0,
    load_ms: Annotated[float, typer.Option(min=0, help="Of one load, in the simulation.")] = 20.0,
    real: Annotated[int, typer.Option(min=0, help="Requests on the embedded engine; 0: none.")] = 0,
) -> None:
    """Print the tables."""
    console = Console()
    console.print(
        f"{adapters} adapters, {places} places, Zipf(1.0); a fixed choice of {places} could at best have "
        f"{Zipf(adapters, 1.0, 0).best(places):.1%}"
    )
    for title, drift_s in (("steady", 0.0), ("ranks move by one every ten minutes", 600.0)):
        table = Table(
            "policy", "hit rate", f"in the first {START_S:g} s", "refused: full", "wait ms, mean",
            "fairness of hits", "of waits", title=f"simulated, {requests:,} at {rate:g}/s, {title}",
        )  # fmt: skip
        for policy, tally in compare(adapters, places, requests, rate, load_ms / 1000, drift_s).items():
            waits = [wait for one in tally.waits.values() for wait in one]
            hits, waiting = tally.fairness()
            table.add_row(
                policy, f"{tally.hit_rate:.1%}", f"{statistics.fmean(tally.at_start):.1%}",
                f"{tally.full / requests:.2%}", f"{1000 * statistics.fmean(waits):.1f}", f"{hits:.3f}",
                f"{waiting:.3f}",
            )  # fmt: skip
        console.print(table)
    if real:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            measured = runner.run(measure(adapters, places, real, 2))
        table = Table(
            "policy", "hit rate", "load ms p50", "p99", "request ms p50", "p99", "fairness of hits",
            "of waits", title=f"embedded engine, {real:,} requests of 8 tokens, 2 callers",
        )  # fmt: skip
        for policy, (tally, seconds) in measured.items():
            loads = sorted(wait for one in tally.waits.values() for wait in one if wait > 0.001)
            hits, waiting = tally.fairness()
            table.add_row(
                policy, f"{tally.hit_rate:.1%}", *quantiles(loads), *quantiles(seconds), f"{hits:.3f}",
                f"{waiting:.3f}",
            )  # fmt: skip
        console.print(table)


def quantiles(seconds: Sequence[float]) -> tuple[str, str]:
    """p50 and p99 in milliseconds."""
    ranked = sorted(seconds) or [0.0]
    half, most = (1000 * ranked[int(share * (len(ranked) - 1))] for share in (0.5, 0.99))
    return f"{half:.1f}", f"{most:.1f}"


if __name__ == "__main__":
    typer.run(main)
