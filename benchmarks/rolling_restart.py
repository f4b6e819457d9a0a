"""Do callers notice when every gateway is restarted? Real processes behind a real HAProxy, at a steady rate.

    python -m benchmarks.rolling_restart                     # 4 gateways, two minutes
    python -m benchmarks.rolling_restart --gateways 2 --rate 5 --json

Gateways without an engine share one SQLite file. In front of them is HAProxy with the shipped
``deploy/haproxy/haproxy.cfg``, behind them one stand-in worker, whose streams take seconds. Requests come at
a steady rate, answered or not, every second one streamed. Each gateway in turn gets SIGTERM and is restarted;
the next one follows once HAProxy sends to it. An answer counts only when it is complete, right and no
fallback, and the ledger must have each exactly once. It needs HAProxy (``apt-get install haproxy``).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sqlite3
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import aiohttp
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.forwarding.workload import answer_text
from benchmarks.rolling_site import DEFAULT, DRAIN_S, KEY, SLOTS, Broken, Plan, Site, site
from ops.chaos.caller import ChaosCaller
from ops.chaos.workload import ChaosRequest, ObservedAnswer

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 90.0
POLL_S = 0.05
# Reports may lag five seconds behind the answers; a busy machine takes longer.
LEDGER_TIMEOUT_S = 60.0
# With this many requests in flight, the load is no longer steady.
MAX_UNDER_WAY = 512
MAX_TOKENS = 200
# The format of a request's ticket; the worker's answer begins with it, so every answer is unique.
TICKET = "{:08d}"


@dataclass(frozen=True, slots=True)
class Restart:
    """The restart of one gateway, in seconds from its SIGTERM.

    ``noticed_s``: until HAProxy sends it no more requests. ``ended_s``: until the process has ended.
    ``back_s``: until HAProxy sends requests to the new process.
    """

    gateway: str
    noticed_s: float
    ended_s: float
    back_s: float


@dataclass(frozen=True, slots=True)
class Latencies:
    """Milliseconds of complete answers."""

    answers: int
    ttft_p50: float
    ttft_p99: float
    whole_p50: float
    whole_p99: float


@dataclass(frozen=True, slots=True)
class Result:
    """``failed``: answers incomplete, wrong or not from the backend; ``broken``: the streams among them."""

    gateways: int
    requests: int
    streams: int
    failed: int
    broken: int
    failures: Mapping[str, int]
    ledger_missing: int
    ledger_doubled: int
    connections_tried_again: int
    restarts: Sequence[Restart]
    steady: Latencies
    rolling: Latencies

    @property
    def good(self) -> bool:
        """Return whether no caller noticed the restarts."""
        return not (self.failed or self.ledger_missing or self.ledger_doubled)


async def until(holds: Callable[[], bool], what: str, timeout_s: float) -> float:
    """Wait until ``holds`` is true; return the seconds. Raises Broken on a timeout."""
    begun = time.monotonic()
    while not holds():
        if time.monotonic() - begun > timeout_s:
            raise Broken(f"{what} did not happen within {timeout_s:g} s")
        await asyncio.sleep(POLL_S)
    return time.monotonic() - begun


async def restart(here: Site, place: int) -> Restart:
    """Restart one gateway by SIGTERM. Raises Broken when it ends with an error or does not come back."""
    name, process, begun = f"gateway-{place + 1}", here.running[place], time.monotonic()
    process.send_signal(signal.SIGTERM)
    noticed_s = await until(lambda: not here.up(place), f"{name} being left alone", STOP_TIMEOUT_S)
    await until(lambda: process.poll() is not None, f"{name}'s end", STOP_TIMEOUT_S)
    ended_s = time.monotonic() - begun
    if process.returncode:
        raise Broken(f"{name} ended with {process.returncode}; its log: {here.folder}/{name}.log")
    here.start(place)
    await until(lambda: here.up(place), f"{name} being back", START_TIMEOUT_S)
    return Restart(name, noticed_s, ended_s, time.monotonic() - begun)


class Load:
    """Requests at a steady rate, each with its own expected answer."""

    def __init__(self, plan: Plan, caller: ChaosCaller, clock: Callable[[], float]) -> None:
        self.answers: list[ObservedAnswer] = []
        self._plan = plan
        self._caller = caller
        self._clock = clock
        self._over = asyncio.Event()
        self._under_way = 0

    def stop(self) -> None:
        """Send no more requests."""
        self._over.set()

    async def run(self) -> None:
        """Send requests until stopped, then wait for the answers. Raises Broken when they pile up."""
        async with asyncio.TaskGroup() as tasks:
            number = 0
            while not self._over.is_set():
                if self._under_way >= MAX_UNDER_WAY:
                    raise Broken(f"{MAX_UNDER_WAY} requests are under way; take a smaller --rate")
                tasks.create_task(self._ask(number))
                number += 1
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, number / self._plan.rate - self._clock())):
                        await self._over.wait()

    async def _ask(self, number: int) -> None:
        ticket = TICKET.format(number)
        question = ChaosRequest(f"roll-{number}", f"Recommend something; ticket {ticket}", number % 2 == 0)
        self._under_way += 1
        answers = await self._caller.ask(question, MAX_TOKENS, None)
        self._under_way -= 1
        if answers.code is None and answers.text != answer_text(ticket):
            answers.code = "wrong_answer"
        elif answers.code is None and answers.answer is not None and answers.answer["fallback"] is not None:
            answers.code = "fallback"
        self.answers.append(answers)


async def measure(here: Site, tell: Callable[[str, int], None]) -> Result:
    """Run once over a started site. ``tell`` gets the current step, and how many gateways are back."""
    plan = here.plan
    tell("starting", 0)
    for place in range(SLOTS):
        wanted = place < plan.gateways
        await until(lambda: here.up(place) is wanted, f"gateway-{place + 1}'s state", START_TIMEOUT_S)  # noqa: B023 - awaited here
    async with aiohttp.ClientSession() as session:
        control = f"http://127.0.0.1:{here.worker_port}/control"
        async with session.post(control, json={"step_ms": plan.step_ms}) as response:
            response.raise_for_status()
    begun = time.monotonic()

    def clock() -> float:
        return time.monotonic() - begun

    restarts: list[Restart] = []
    async with (
        ChaosCaller(here.url, key=KEY, timeout_s=DRAIN_S, clock=clock) as caller,
        asyncio.TaskGroup() as tasks,
    ):
        load = Load(plan, caller, clock)
        tasks.create_task(load.run())
        tell("steady load", 0)
        await asyncio.sleep(plan.steady_s)
        from_s = clock()
        for place in range(plan.gateways):
            tell(f"restarting gateway-{place + 1}", place)
            restarts.append(await restart(here, place))
        until_s = clock()
        tell("steady load", plan.gateways)
        await asyncio.sleep(plan.steady_s)
        load.stop()
    figures = here.status()
    asked = {one.question.request_id for one in load.answers if one.code is None}
    tell("waiting for the ledger", plan.gateways)
    with contextlib.suppress(Broken):  # rows that are missing then are reported as missing
        await until(lambda: asked <= set(_rows(here)), "the ledger being whole", LEDGER_TIMEOUT_S)
    return _result(here, load.answers, restarts, (from_s, until_s), figures)


def _result(
    here: Site,
    answers: Sequence[ObservedAnswer],
    restarts: Sequence[Restart],
    rolling: tuple[float, float],
    figures: Mapping[str, Mapping[str, str]],
) -> Result:
    bad = [one for one in answers if one.code is not None]
    whole = [one for one in answers if one not in bad]
    during = [one for one in whole if rolling[0] <= one.sent_s < rolling[1]]
    rows = _rows(here)
    return Result(
        gateways=here.plan.gateways,
        requests=len(answers),
        streams=sum(one.question.stream for one in answers),
        failed=len(bad),
        broken=sum(one.question.stream and one.first_s is not None for one in bad),
        failures=dict(Counter(one.code for one in bad if one.code is not None)),
        ledger_missing=sum(one.question.request_id not in rows for one in whole),
        ledger_doubled=sum(count > 1 for count in rows.values()),
        connections_tried_again=int(figures["BACKEND"]["wretr"] or 0),
        restarts=restarts,
        steady=_latencies([one for one in whole if one not in during]),
        rolling=_latencies(during),
    )


def _rows(here: Site) -> Counter[str]:
    """Return the number of ledger rows of each answered request."""
    with contextlib.closing(sqlite3.connect(here.ledger)) as database:
        found = database.execute("SELECT request_id FROM generations WHERE error_code IS NULL")
        return Counter(name for (name,) in found)


def _latencies(answers: Sequence[ObservedAnswer]) -> Latencies:
    ttft = [
        (one.first_s - one.sent_s) * 1e3 for one in answers if one.question.stream and one.first_s is not None
    ]
    # Streams take as long as the worker's steps; the gateway's share shows in answers that are not streamed.
    whole = [
        (one.ended_s - one.sent_s) * 1e3
        for one in answers
        if not one.question.stream and one.ended_s is not None
    ]
    return Latencies(len(answers), *_percentiles(ttft), *_percentiles(whole))


def _percentiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return (values[0], values[0]) if values else (0.0, 0.0)
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return cuts[49], cuts[98]


def show(result: Result, console: Console) -> None:
    """Print the figures as tables."""
    table = Table("figure", "value", title=f"load average {os.getloadavg()[0]:.1f}")
    for name in ("gateways", "requests", "streams", "failed", "broken", "ledger_missing", "ledger_doubled",
                 "connections_tried_again"):  # fmt: skip
        table.add_row(name, str(getattr(result, name)))
    for code, count in result.failures.items():
        table.add_row(f"  {code}", str(count))
    console.print(table)
    latencies = Table("", "answers", "TTFT p50 ms", "p99", "not streamed p50 ms", "p99")
    for name, one in (("steady", result.steady), ("while restarting", result.rolling)):
        figures = (one.ttft_p50, one.ttft_p99, one.whole_p50, one.whole_p99)
        latencies.add_row(name, str(one.answers), *(f"{value:,.0f}" for value in figures))
    console.print(latencies)
    restarts = Table("", "left alone after s", "ended after s", "back after s")
    for back in result.restarts:
        restarts.add_row(back.gateway, *(f"{s:.1f}" for s in (back.noticed_s, back.ended_s, back.back_s)))
    console.print(restarts)


def main(
    gateways: Annotated[int, typer.Option(min=2, max=SLOTS)] = DEFAULT.gateways,
    rate: Annotated[float, typer.Option(min=0.1, max=1_000, help="Requests a second.")] = DEFAULT.rate,
    step_ms: Annotated[
        float, typer.Option(min=1, max=1_000, help="Between a stream's tokens.")
    ] = DEFAULT.step_ms,
    lame_duck: Annotated[
        float, typer.Option(min=0, max=60, help="server.lame_duck_seconds.")
    ] = DEFAULT.lame_duck_s,
    steady: Annotated[
        float, typer.Option(min=0, max=600, help="Seconds before and after.")
    ] = DEFAULT.steady_s,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Measure and print; exit code 1 when an answer failed or the ledger differs."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that its processes end with it
    plan = Plan(gateways, rate, step_ms, lame_duck, steady)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    try:
        with (
            Progress(*columns, console=Console(stderr=True), transient=True) as bar,
            site(plan) as here,
        ):
            line = bar.add_task("", total=gateways)
            result = asyncio.run(
                measure(here, lambda what, back: bar.update(line, description=what, completed=back))
            )
    except* Broken as broken:
        for one in broken.exceptions:
            print(f"rolling_restart: {one}")
        raise typer.Exit(2) from None
    if as_json:
        print(json.dumps(asdict(result)))
    else:
        show(result, Console())
    if not result.good:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
