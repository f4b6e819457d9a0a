"""Evaluations of backends: signed, of backends as they are configured now, known to every process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.admin.evaluations import EvaluationAdmin, EvaluationBody
from gateway.contracts.evaluation_report import sign
from gateway.errors import InvalidRequest
from gateway.routing.evaluations import STREAM, BackendEvaluations, digest_of
from gateway.state.audit import Audit
from gateway.state.memory import MemoryStateStore, MemoryStreams
from gateway.state.stream_follower import StreamFollower

KEY = b"shared"
DIGESTS = {"bf16": digest_of({"model": "a"}), "awq": digest_of({"model": "b"})}


def report(**changes: Any) -> dict[str, Any]:
    sides = {
        "base": "bf16",
        "candidate": "awq",
        "base_digest": DIGESTS["bf16"],
        "candidate_digest": DIGESTS["awq"],
    }
    return sign({**sides, "passed": True, "prompts": {"sha256": "0" * 64}, **changes}, KEY)


@asynccontextmanager
async def process(
    streams: MemoryStreams, digests: dict[str, str] = DIGESTS
) -> AsyncIterator[tuple[BackendEvaluations, EvaluationAdmin]]:
    store = MemoryStateStore(streams, unix_time=time.time, poll_s=0.02)
    found = BackendEvaluations(digests=digests, key=KEY)
    follower = StreamFollower(store, STREAM, found.take, copy=None, clock=time.monotonic)
    found.follow(follower)
    await store.open()
    await follower.start(1.0)
    async with asyncio.TaskGroup() as loops:
        running = [loops.create_task(store.run()), loops.create_task(follower.run())]
        try:
            yield found, EvaluationAdmin(found, Audit(store, unix_time=time.time))
        finally:
            for one in running:
                one.cancel()


async def test_a_backend_passes_once_a_signed_report_is_stored_in_every_process() -> None:
    streams = MemoryStreams()
    async with process(streams) as (found, admin):
        assert found.fault("awq") == "the evaluation of backend 'awq' has not been run"
        shown = await admin.add(EvaluationBody(report=report()), who="key_1")
        assert shown["faults"].keys() == {"bf16"} and found.fault("awq") is None
        async with process(streams) as (other, _):
            assert other.fault("awq") is None
        await admin.add(EvaluationBody(report=report(passed=False)), who="key_1")
        assert found.fault("awq") == "the evaluation of backend 'awq' did not pass"


async def test_a_verdict_does_not_hold_for_a_backend_that_is_configured_differently() -> None:
    streams = MemoryStreams()
    async with process(streams) as (_, admin):
        await admin.add(EvaluationBody(report=report()), who="key_1")
    for changed in ("bf16", "awq"):
        async with process(streams, {**DIGESTS, changed: digest_of({"model": "c"})}) as (found, _):
            assert (
                found.fault("awq")
                == f"backend '{changed}' is configured differently than when it was evaluated"
            )


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"signature": "0" * 64}, "not signed"),
        ({"prompts": {}}, "not signed"),
        ({"passed": "yes"}, "does not say whether it passed"),
        ({"candidate": "gone"}, "candidate 'gone' is not a backend"),
        ({"base_digest": "1" * 64}, "base 'bf16' is not a backend, or is configured differently"),
    ],
)
async def test_what_cannot_count_is_refused(changed: dict[str, Any], reason: str) -> None:
    given = {**report(), **changed} if "signature" in changed else report(**changed)
    async with process(MemoryStreams()) as (found, admin):
        with pytest.raises(InvalidRequest, match=reason):
            await admin.add(EvaluationBody(report=given), who="key_1")
        assert found.reports == {}
