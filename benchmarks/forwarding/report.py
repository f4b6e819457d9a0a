"""Summarizes turns to one row per gateway, and prints them: a table, JSON, and the limits."""

from __future__ import annotations

import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from benchmarks.forwarding.gateways import TITLES, Name
from benchmarks.forwarding.loops import Result
from benchmarks.forwarding.rounds import Turn
from benchmarks.forwarding.workload import ANSWER_TOKENS
from gateway.shadow.statistics import quantile

MIB: Final = 1024**2
# Below this share, the gateway's core had time left, so the reached rate is not the gateway's limit.
FULL: Final = 0.9
# Of so little CPU what the process does besides requests is too large a part; it is not reported.
LEAST_CPU_S: Final = 0.01


@dataclass(frozen=True, slots=True)
class Row:
    """One gateway: medians over the rounds; ``None`` where nothing was answered or nothing can be said.

    Attributes:
        req_per_s: rate reached at 64 in flight.
        busy: share of its core that the gateway used for that.
        cpu_ms: CPU per request, at 64 in flight.
        added_slow_ms: p50 and p99 above no gateway at 50 requests per second; ``added_fast_ms`` at 200. In
            the row of no gateway: its own latency.
        paced_per_core: tokens of paced streams per second of CPU; ``flood_per_core`` of unpaced ones.
        flood_tokens_per_event: how many tokens the gateway joined into one event of an unpaced stream.
        added_first_ms: p50 and p99 of the time to first token above no gateway at 10 streams per second.
        rss_mib: resident memory after all loads.
        overloaded: keys of the loads that it did not keep up with.
        failed: wrong or missing answers of all rounds; ``faults`` the first few.
    """

    name: Name
    req_per_s: float | None
    busy: float | None
    cpu_ms: float | None
    added_slow_ms: tuple[float, float] | None
    added_fast_ms: tuple[float, float] | None
    paced_per_core: float | None
    flood_per_core: float | None
    flood_tokens_per_event: float | None
    added_first_ms: tuple[float, float] | None
    rss_mib: float | None
    overloaded: tuple[str, ...]
    failed: int
    faults: tuple[str, ...]

    @property
    def req_per_core(self) -> float | None:
        """Return the requests per second that one whole core can serve, computed from the CPU per request."""
        return 1000 / self.cpu_ms if self.cpu_ms else None

    @property
    def paced_cpu_ms(self) -> float | None:
        """Return the CPU milliseconds of a paced stream."""
        return ANSWER_TOKENS * 1000 / self.paced_per_core if self.paced_per_core else None


@dataclass(frozen=True, slots=True)
class Report:
    """A run: ``said`` is where and how, ``rows`` are medians, ``rounds`` the rows of each round alone."""

    said: str
    rows: Sequence[Row]
    rounds: Sequence[Sequence[Row]]

    @classmethod
    def of(cls, turns: Sequence[Turn], said: str) -> Report:
        """The report of these turns."""
        numbers = sorted({turn.round for turn in turns})
        rounds = [summarize([turn for turn in turns if turn.round == number]) for number in numbers]
        return cls(said, summarize(turns), rounds)

    @classmethod
    def saved(cls, report: Mapping[str, Any]) -> Report:
        """The report of a run's JSON object."""
        return cls(report["said"], _rows(report["rows"]), [_rows(rows) for rows in report["rounds"]])


def _rows(saved: Sequence[Mapping[str, Any]]) -> list[Row]:
    def value(one: Any) -> Any:
        return tuple(one) if isinstance(one, list) else one

    return [Row(**{key: value(row[key]) for key in row} | {"name": Name(row["name"])}) for row in saved]


def summarize(turns: Sequence[Turn]) -> list[Row]:
    """Return one row per gateway, in the order of :class:`Name`; "added": above no gateway in that round."""
    direct = {turn.round: turn.results for turn in turns if turn.name is Name.DIRECT}
    return [
        _row(name, mine, direct) for name in Name if (mine := [turn for turn in turns if turn.name is name])
    ]


def _row(name: Name, turns: Sequence[Turn], direct: Mapping[int, Mapping[str, Result]]) -> Row:
    def median(figure: Callable[[Result], float | None], load: str) -> float | None:
        values = [value for turn in turns if (value := figure(turn.results[load])) is not None]
        return statistics.median(values) if values else None

    def added(load: str, times: Callable[[Result], list[float]]) -> tuple[float, float] | None:
        pairs = [
            (sorted(times(turn.results[load])), sorted(times(direct[turn.round][load]))) for turn in turns
        ]
        if not all(mine and base for mine, base in pairs):
            return None

        def above(share: float) -> float:
            base_counts = name is not Name.DIRECT
            return statistics.median(
                quantile(mine, share) - base_counts * quantile(base, share) for mine, base in pairs
            )

        return above(0.50), above(0.99)

    results = [result for turn in turns for result in turn.results.values()]
    overloaded = {load for turn in turns for load, result in turn.results.items() if result.dropped}
    return Row(
        name=name,
        req_per_s=median(lambda result: result.answers / result.elapsed_s, "closed"),
        busy=median(_busy, "closed"),
        cpu_ms=median(_cpu_ms, "closed"),
        added_slow_ms=None if "slow" in overloaded else added("slow", lambda result: result.latencies_ms),
        added_fast_ms=None if "fast" in overloaded else added("fast", lambda result: result.latencies_ms),
        paced_per_core=median(_tokens_per_cpu_s, "paced"),
        flood_per_core=median(_tokens_per_cpu_s, "flood"),
        flood_tokens_per_event=median(_tokens_per_event, "flood"),
        added_first_ms=None if "streams" in overloaded else added("streams", lambda result: result.first_ms),
        rss_mib=median(lambda result: result.rss_bytes / MIB if result.rss_bytes else None, "flood"),
        overloaded=tuple(sorted(overloaded)),
        failed=sum(result.failed for result in results),
        faults=tuple(dict.fromkeys(fault for result in results for fault in result.faults))[:3],
    )


def _busy(result: Result) -> float | None:
    return result.cpu_s / result.elapsed_s if result.cpu_s else None


def _cpu_ms(result: Result) -> float | None:
    return result.cpu_s * 1e3 / result.answers if result.answers and result.cpu_s >= LEAST_CPU_S else None


def _tokens_per_cpu_s(result: Result) -> float | None:
    return result.tokens / result.cpu_s if result.tokens and result.cpu_s >= LEAST_CPU_S else None


def _tokens_per_event(result: Result) -> float | None:
    return result.whole * ANSWER_TOKENS / result.whole_events if result.whole_events else None


@dataclass(frozen=True, slots=True)
class Bar:
    """A limit on a gateway's cost beside that of ``baseline`` in the same round: on the ratio, or with
    ``above`` on the difference.

    ``limit`` applies when usage is on disk before the end of an answer; ``relaxed``, where it differs, when
    usage is on disk later.
    """

    title: str
    limit: float
    figure: Callable[[Row], float | None]
    baseline: Name
    at_least: bool = False
    above: bool = False
    relaxed: float | None = None

    @property
    def sign(self) -> str:
        return "≥" if self.at_least else "≤"

    def value(self, name: Name, rows: Sequence[Row]) -> float | None:
        """The gateway's figure beside the baseline's; ``None`` if one of them was not measured."""
        figures = {row.name: self.figure(row) for row in rows}
        mine, base = figures.get(name), figures.get(self.baseline)
        if mine is None or base is None:
            return None
        return mine - base if self.above else mine / base

    def spread(self, name: Name, rounds: Sequence[Sequence[Row]]) -> tuple[float, float, float] | None:
        """The median of the rounds, the lowest and the highest; ``None`` if a round has no value."""
        values = [value for rows in rounds if (value := self.value(name, rows)) is not None]
        if not values or len(values) < len(rounds):
            return None
        return statistics.median(values), min(values), max(values)

    def verdict(self, name: Name, rounds: Sequence[Sequence[Row]]) -> str:
        """The value and its spread, and whether the limit is met."""
        limit = self.limit
        if self.relaxed is not None and name is Name.SLUICE_RELAXED:
            limit = self.relaxed
        spread = self.spread(name, rounds)
        if spread is None:
            return f"not measured (limit {self.sign} {limit:,g})"
        middle, low, high = spread
        met = middle >= limit if self.at_least else middle <= limit
        said = f"{figure_text(middle)}, rounds {figure_text(low)} to {figure_text(high)}"
        return f"{said} (limit {self.sign} {limit:,g}): {'met' if met else 'missed'}"


def _part(pair: tuple[float, float] | None, place: int) -> float | None:
    return None if pair is None else pair[place]


BARS: Final = (
    Bar("CPU a request, times the bare proxy's", 2.0, lambda row: row.cpu_ms, Name.FASTAPI),
    Bar("CPU a paced stream, times the bare proxy's", 1.2, lambda row: row.paced_cpu_ms, Name.FASTAPI),
    Bar("requests a second a core, times LiteLLM's", 20, lambda row: row.req_per_core, Name.LITELLM, True),
    Bar(
        "requests a second a core, times TensorZero's",
        0.5,
        lambda row: row.req_per_core,
        Name.TENSORZERO,
        True,
    ),
    Bar(
        "p50 ms above the bare proxy at 200 requests/s",
        2.0,
        lambda row: _part(row.added_fast_ms, 0),
        Name.FASTAPI,
        above=True,
        relaxed=1.0,
    ),
    Bar(
        "p99 ms above the bare proxy at 200 requests/s",
        6.0,
        lambda row: _part(row.added_fast_ms, 1),
        Name.FASTAPI,
        above=True,
        relaxed=3.0,
    ),
    Bar(
        "TTFT p50 ms above the bare proxy at 10 streams/s",
        1.0,
        lambda row: _part(row.added_first_ms, 0),
        Name.FASTAPI,
        above=True,
    ),
    Bar(
        "TTFT p99 ms above the bare proxy at 10 streams/s",
        3.0,
        lambda row: _part(row.added_first_ms, 1),
        Name.FASTAPI,
        above=True,
    ),
)
OURS: Final = frozenset({Name.SLUICE, Name.SLUICE_RELAXED, Name.SLUICE_POOL, Name.SLUICE_UNSEEN})


def figure_text(value: float | None) -> str:
    """Format three significant digits, or all digits before the point; a dash for ``None``."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _pair(pair: tuple[float, float] | None, overloaded: bool) -> str:
    if overloaded:
        return "overloaded"
    return "-" if pair is None else f"{pair[0]:.2f} / {pair[1]:.2f}"


# Heading and cell, in the table's order; the same for the terminal and for Markdown.
COLUMNS: Final[Sequence[tuple[str, Callable[[Row], str]]]] = (
    ("gateway", lambda row: TITLES[row.name]),
    ("req/s at 64", lambda row: ("≥ " if (row.busy or 0) < FULL else "") + figure_text(row.req_per_s)),
    ("CPU ms/req", lambda row: figure_text(row.cpu_ms)),
    ("req/s a core", lambda row: figure_text(row.req_per_core)),
    ("added p50/p99 ms at 50/s", lambda row: _pair(row.added_slow_ms, "slow" in row.overloaded)),
    ("at 200/s", lambda row: _pair(row.added_fast_ms, "fast" in row.overloaded)),
    ("tokens/s a core, paced", lambda row: figure_text(row.paced_per_core)),
    ("unpaced", lambda row: figure_text(row.flood_per_core)),
    ("added TTFT p50/p99 ms", lambda row: _pair(row.added_first_ms, "streams" in row.overloaded)),
    ("RSS MiB", lambda row: figure_text(row.rss_mib)),
)


def print_report(console: Console, report: Report) -> None:
    """Print the table, the limits, and what went wrong."""
    table = Table(title="forwarding, one gateway process on one core", caption=report.said)
    for place, (heading, _) in enumerate(COLUMNS):
        table.add_column(heading, justify="right" if place else "left")
    for row in report.rows:
        table.add_row(*(cell(row) for _, cell in COLUMNS))
    console.print(table)
    for row in report.rows:
        if row.name in OURS:
            console.print(f"\n{TITLES[row.name]}:")
            for bar in BARS:
                console.print(f"  {bar.title}: {bar.verdict(row.name, report.rounds)}")
        if row.failed:
            console.print(
                f"{TITLES[row.name]}: {row.failed} answers failed, e.g. {'; '.join(row.faults)}", style="red"
            )


def markdown(report: Report) -> str:
    """The table as Markdown, and one of the limits."""
    ours = [row.name for row in report.rows if row.name in OURS]
    figures = [[heading for heading, _ in COLUMNS], ["---"] * len(COLUMNS)]
    figures += [[cell(row) for _, cell in COLUMNS] for row in report.rows]
    limits = [["", *map(TITLES.__getitem__, ours)], ["---"] * (len(ours) + 1)]
    limits += [[bar.title, *[bar.verdict(name, report.rounds) for name in ours]] for bar in BARS]
    return "\n".join("".join(f"| {' | '.join(line)} |\n" for line in table) for table in (figures, limits))


def machine(python: str = sys.executable) -> str:
    """Return the operating system, the architecture and the version of ``python``."""
    done = subprocess.run([python, "--version"], capture_output=True, text=True, check=True)
    return f"{platform.system()} {platform.machine()}, {done.stdout.strip()}"
