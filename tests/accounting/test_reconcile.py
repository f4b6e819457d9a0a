"""Comparison of the engines' own token counters with the ledger."""

from __future__ import annotations

from pathlib import Path

import pytest

from accounting.engine_counts import EngineCounts, HourlyCounts
from accounting.reconcile import compared_lines, engines_query
from accounting.reports import Span
from accounting.values import HOUR_S, EngineCount
from gateway.admin.usage import SpanQuery, UsageAdmin
from tests.accounting.test_ledger import Events, ledger_for, row, running, until, url_of

NOON = 472_236 * HOUR_S
POOL = ("worker", "http://w1")


def count(
    hour: int, prompt: int, generated: int, *, observer: str = "a", covered_s: float = 3600.0
) -> EngineCount:
    return EngineCount(hour, *POOL, observer, prompt, generated, covered_s)


def test_counters_become_differences_by_hour() -> None:
    counts = HourlyCounts("a")
    for minute, totals in ((0, (100, 10)), (30, (150, 15)), (59, (160, 20)), (61, (200, 30))):
        counts.record({POOL: totals}, NOON + 60 * minute, 60.0 * minute)
    assert counts.lines() == [
        count(472_236, 60, 10, covered_s=59 * 60),
        count(472_237, 40, 10, covered_s=120),
    ]


def test_a_counter_that_went_back_is_a_new_engines_and_counts_from_nothing() -> None:
    counts = HourlyCounts("a")
    for second, totals in enumerate(((100, 10), (130, 13), (5, 1), (9, 2))):
        counts.record({POOL: totals}, NOON + second, second)
    assert [(one.prompt_tokens, one.generation_tokens) for one in counts.lines()] == [(39, 5)]


def test_a_clock_that_is_set_covers_no_time() -> None:
    counts = HourlyCounts("a", [POOL])
    for second, unix_s in enumerate((NOON, NOON + 1, NOON - 7_000, NOON + 1_500, NOON + 1_501)):
        counts.record({POOL: (second, second)}, unix_s, second)
    assert {one.hour: one.covered_s for one in counts.lines()} == {472_236: 3.0, 472_234: 1.0}


def test_an_engine_of_this_gateway_is_counted_from_its_start() -> None:
    counts = HourlyCounts("a", [POOL])
    counts.record({POOL: (7, 3)}, NOON, 0.0)
    assert [(one.prompt_tokens, one.generation_tokens) for one in counts.lines()] == [(7, 3)]


def test_hours_that_are_over_are_kept_until_they_are_written() -> None:
    counts = HourlyCounts("a", [POOL])
    counts.record({POOL: (7, 3)}, NOON, 0.0)
    counts.record({POOL: (8, 3)}, NOON + HOUR_S, HOUR_S)
    assert len(counts.lines()) == 2
    counts.written(NOON + HOUR_S)
    assert [one.hour for one in counts.lines()] == [472_237]


async def test_the_ledger_and_the_engine_are_compared_hour_by_hour(tmp_path: Path) -> None:
    async with running(ledger_for(url_of(tmp_path / "l.db"), Events())) as ledger:
        answered = row("g1", started_at=NOON, backend_name="worker", input_tokens=60, output_tokens=10)
        ledger.append(answered.delivered())
        cancelled = row(
            "g2", started_at=NOON, backend_name="worker/a-model", input_tokens=20, output_tokens=1
        )
        ledger.append(cancelled)
        ledger.append(row("g3", kind="shadow", started_at=NOON, backend_name="worker", input_tokens=5))
        ledger.append(row("g4", started_at=NOON))  # degraded: no backend
        fronts = row("g5", kind="front", started_at=NOON, backend_name="worker", output_tokens=2)
        ledger.append(fronts.delivered())
        similar = row("g6", kind="cache", started_at=NOON, backend_name="worker", input_tokens=3)
        ledger.append(similar.delivered())
        await until(lambda: ledger.depth == 0)
        # The counts of an hour are overwritten by each later report.
        await ledger.write_counts([count(472_236, 50, 5)])
        await ledger.write_counts([count(472_236, 95, 13)])
        usage = UsageAdmin(ledger.select, lambda: NOON + HOUR_S)
        [line] = (await usage.reconcile(SpanQuery(since=str(NOON), until=str(NOON + 1))))["rows"]
    assert line == {
        "hour": "2023-11-15T12:00+00:00",
        "backend": "worker",
        "covered": 1.0,
        "requests": 5,
        "engine": {"prompt_tokens": 95, "generation_tokens": 13},
        "ledger": {"prompt_tokens": 88, "generation_tokens": 13},
        "difference": {"prompt_tokens": 7, "generation_tokens": 0},
        "not_billed": {"shadow": 5, "front": 2, "cache": 3, "undelivered": 21},
        "verdict": "engine counts more: probes, warm-ups, summaries, tokens generated again, requests over its end",
    }


@pytest.mark.parametrize(
    ("watched_s", "verdict"),
    [
        (3600.0, "ledger counts more"),
        (120.0, "not compared"),
    ],
)
def test_an_hour_that_was_not_watched_whole_is_not_compared(watched_s: float, verdict: str) -> None:
    names = ("hour", "backend", "engine", "observer", "prompt_tokens", "generation_tokens", "covered_s")
    counted = count(1, 3, 2, covered_s=watched_s)
    booked = {"hour": 1, "backend": POOL[0], "prompt_tokens": 60, "generation_tokens": 10, "requests": 1}
    [line] = compared_lines([booked], [{name: getattr(counted, name) for name in names}], NOON)
    assert str(line["verdict"]).startswith(verdict)


def _summed(*counts: EngineCount, now: float = NOON) -> tuple[object, object]:
    names = ("hour", "backend", "engine", "observer", "prompt_tokens", "generation_tokens", "covered_s")
    [line] = compared_lines([], [{name: getattr(one, name) for name in names} for one in counts], now)
    return line["engine"], line["covered"]


def test_an_engine_of_two_gateways_is_counted_once_and_its_gateways_in_turn_add_up() -> None:
    both = _summed(count(1, 100, 9), count(1, 90, 8, observer="b", covered_s=3000))
    assert both == ({"prompt_tokens": 100, "generation_tokens": 9}, 1.0)
    after = _summed(count(1, 100, 9, covered_s=1800), count(1, 90, 8, observer="b", covered_s=1700))
    assert after == ({"prompt_tokens": 190, "generation_tokens": 17}, round(3500 / 3600, 4))


def test_the_tokens_of_the_hour_that_is_not_over_are_counted_once_too() -> None:
    two = count(1, 100, 9, covered_s=1_800), count(1, 90, 8, observer="b", covered_s=1_790)
    now = HOUR_S + 1_800.0
    assert _summed(*two, now=now) == ({"prompt_tokens": 100, "generation_tokens": 9}, 0.5)


async def test_counts_wait_for_a_database_that_is_away(tmp_path: Path) -> None:
    ledger = ledger_for(url_of(tmp_path / "l.db"), Events())
    counts = HourlyCounts("a", [POOL])
    counts_writer = EngineCounts(
        counts,
        read=lambda: {POOL: (7, 3)},
        write_lines=ledger.write_counts,
        unix_time=lambda: NOON,
        clock=lambda: 0.0,
    )
    await counts_writer.write()
    assert counts.lines()
    async with running(ledger):
        await counts_writer.write()
        found = await ledger.select(engines_query(Span()))
    assert [(one["prompt_tokens"], one["generation_tokens"]) for one in found] == [(7, 3)]
