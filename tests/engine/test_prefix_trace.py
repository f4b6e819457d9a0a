"""The prefix cache finds nearly all reusable tokens of a real multi-turn trace."""

import pytest

from benchmarks.prefix_cache import (
    TRACE,
    Clock,
    DryEngine,
    Engine,
    ideal_tokens,
    pool_sizes,
    replay,
    requests_of,
    run_engine,
)
from engine.values import EngineSignals
from ops.replay.trace import read_trace
from tests.engine.support import DEMO_MODEL


def replayed(engine: Engine, clock: Clock, *, rows: int | None = None, speed: float = 10.0) -> EngineSignals:
    replay(engine, clock, requests_of(read_trace(TRACE, limit=rows)), speed, step_s=0.02)
    return engine.signals


@pytest.mark.parametrize("speed", [10.0, 1e9])
def test_a_pool_that_holds_the_trace_finds_98_percent_of_the_ideal_even_when_all_arrive_at_once(
    speed: float,
) -> None:
    ideal, blocks = ideal_tokens(read_trace(TRACE))
    clock = Clock()
    found = replayed(DryEngine(2 * blocks, clock), clock, speed=speed).prefix_hits
    assert 0.98 * ideal < found <= ideal


def test_a_smaller_pool_finds_less_and_a_larger_one_more() -> None:
    trace = read_trace(TRACE)
    found = []
    for size in pool_sizes(requests_of(trace), ideal_tokens(trace)[1]):
        clock = Clock()
        found.append(replayed(DryEngine(size, clock), clock).prefix_hits)
    assert len(found) > 3
    assert found == sorted(found)


def test_the_decisions_without_a_model_are_those_of_the_whole_engine() -> None:
    dry_clock, clock = Clock(), Clock()
    dry = replayed(DryEngine(600, dry_clock), dry_clock, rows=40)
    whole = replayed(run_engine(DEMO_MODEL, 600, True, clock), clock, rows=40)
    assert whole.prefix_hits > 0
    assert (whole.prefix_queries, whole.prefix_hits, whole.steps) == (
        dry.prefix_queries,
        dry.prefix_hits,
        dry.steps,
    )
