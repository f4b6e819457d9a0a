"""The calls of one request are bounded over all loops together: retries, workers of a pool, fallback legs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack

import pytest

from gateway.contracts.values import GenerateRequest
from tests.journey.rig import JourneyRig
from tests.scripted import ScriptedBackend
from tests.workers.raw_worker import RawWorker, pool, sends

Build = Callable[..., JourneyRig]
Ask = Callable[..., GenerateRequest]
SILENT = sends(then="hold")


@pytest.mark.parametrize(("route", "calls"), [({"fallback": []}, 5), ({"fallback": ["far"]}, 5)])
async def test_a_pool_whose_workers_all_time_out_is_called_five_times(
    build_rig: Build, ask: Ask, route: Mapping[str, object], calls: int
) -> None:
    workers = [RawWorker([SILENT] * 20) for _ in range(3)]
    async with AsyncExitStack() as stack:
        gpus = await stack.enter_async_context(
            pool(*workers, affinity=False, first_token_timeout_seconds=0.2, eject_after_failures=100)
        )
        far = ScriptedBackend("far")
        rig = build_rig(backends=[gpus, far], route=route)
        sink = await rig.run(ask())
    assert sum(len(worker.requests) for worker in workers) == calls
    if route["fallback"]:
        assert sink.answer is not None and sink.answer.backend_name == "far"
    else:
        assert sink.error is not None
