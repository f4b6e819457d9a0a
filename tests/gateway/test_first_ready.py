"""The time until the gateway was ready is measured once, from the start of the process."""

from __future__ import annotations

import asyncio
import time

from gateway.health.first_ready import FirstReady
from gateway.wiring.observing import health_collector
from gateway.wiring.serving import first_ready
from tests.gateway.test_health_probe import probe
from tests.scripted import ScriptedBackend


def test_the_time_of_the_first_ready_state_is_kept_whatever_happens_later() -> None:
    now, ready = 3.0, False
    first = FirstReady(lambda: ready, lambda: now)
    assert first.after_s() is None
    now, ready = 41.0, True
    assert first.after_s() == 41.0
    now = 50.0
    assert first.after_s() == 41.0
    ready = False
    assert first.after_s() == 41.0


async def test_the_first_ready_state_is_recorded_without_a_query() -> None:
    now, ready = 7.0, False
    first = FirstReady(lambda: ready, lambda: now)
    async with asyncio.TaskGroup() as tasks:
        looking = tasks.create_task(first.run())
        await asyncio.sleep(0)
        assert not looking.done()
        ready = True
        async with asyncio.timeout(60):
            await looking
    now = 100.0
    assert first.after_s() == 7.0


def test_the_metric_counts_from_the_process_start_which_came_before_the_gateway() -> None:
    health, now = probe(ScriptedBackend()), 1_000.0
    first = first_ready(health, clock=lambda: now, unix_time=lambda: time.time() + 60.0)
    now += 5.0
    *_, after = health_collector(health, first).collect()
    [sample] = after.samples
    assert (sample.name, sample.labels) == ("sluice_ready_after_seconds", {})
    # This process began a moment ago, by a clock that is a minute ahead.
    assert sample.value >= 65.0
