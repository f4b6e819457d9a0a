"""An engine replica without Serve: its answers, its signals, and when it reports itself unhealthy."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from msgspec.structs import replace

from benchmarks.paced_engine import paced_engine
from gateway.backends.host import EngineHost, MakeHost
from gateway.backends.port import BackendState, PartialAnswer, Work
from gateway.config.settings import Settings
from gateway.contracts.values import Sampling
from ops.ray.port import ClusterPlace
from ops.ray.replica import QUEUE_STALE_S, EngineReplica
from ops.ray.wire import ReplicaPiece, RouterHint, decode_piece, decode_signals, encode
from resilience.failures import FailureKind

WORK = Work("gen_1", tuple(range(300, 340)), (), Sampling(max_tokens=6), cache_salt="acme")


@dataclass
class ReplicaRig:
    """A replica, its engine, and the time of its clock."""

    engines: list[EngineHost]
    now: float = 100.0
    replica: EngineReplica = field(init=False)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[ReplicaRig]:
    config = tmp_path / "sluice.yaml"
    config.write_text(yaml.safe_dump({"engine": {"device": "cpu", "max_num_seqs": 2}}))
    engines: list[EngineHost] = []

    def make_engine(settings: Settings) -> MakeHost:
        make = paced_engine(settings)

        def made(**callbacks: Callable[..., None]) -> EngineHost:
            engines.append(make(**callbacks))  # type: ignore[arg-type]
            return engines[-1]

        return made

    rig = ReplicaRig(engines)
    place = ClusterPlace(str(config), os.getcwd(), "sluice")
    rig.replica = EngineReplica(place, make_engine, "one", lambda: rig.now)
    await rig.replica.start()
    yield rig
    await rig.replica.stop()


async def pieces_of(replica: EngineReplica, work: bytes) -> list[ReplicaPiece]:
    return [decode_piece(data) async for data in replica.generate(encode(RouterHint()), work)]


def text_of(pieces: list[ReplicaPiece]) -> str:
    return "".join(delta.text for piece in pieces for delta in piece.deltas)


async def settled(what: Callable[[], Awaitable[bool]]) -> None:
    for _ in range(6000):
        if await what():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come to that within a minute")


async def test_a_replica_first_names_itself_then_answers_and_ends(rig: ReplicaRig) -> None:
    first, *rest = await pieces_of(rig.replica, encode(WORK))
    assert first == ReplicaPiece(replica="one")
    assert rest[-1].completion is not None
    assert rest[-1].completion.usage.output_tokens == 6


async def test_a_replica_resumes_an_answer_of_another_replica(rig: ReplicaRig) -> None:
    whole = await pieces_of(rig.replica, encode(WORK))
    ids = [token for piece in whole for delta in piece.deltas for token in delta.token_ids]
    texts = [delta.text for piece in whole for delta in piece.deltas]
    partial = PartialAnswer("".join(texts[:2]), tuple(ids[:2]))
    rest = await pieces_of(
        rig.replica, encode(replace(WORK, partial=partial, sampling=Sampling(max_tokens=4)))
    )
    assert partial.text + text_of(rest) == text_of(whole)


async def test_work_that_cannot_be_read_is_told_and_nothing_runs(rig: ReplicaRig) -> None:
    _, last = await pieces_of(rig.replica, b"\x93 of another version")
    assert last.failed is not None
    assert last.failed.kind is FailureKind.INVALID_INPUT


async def test_a_call_that_is_left_frees_the_engine(rig: ReplicaRig) -> None:
    async with aclosing(
        rig.replica.generate(encode(RouterHint()), encode(replace(WORK, sampling=Sampling(max_tokens=3000))))
    ) as data:  # type: ignore[type-var]
        await anext(data)
        assert decode_piece(await anext(data)).deltas

    async def idle() -> bool:
        signals = decode_signals(await rig.replica.signals("a", 0))
        return not signals.load.running

    await settled(idle)


async def test_an_engine_that_is_not_there_sends_the_request_to_another_replica(rig: ReplicaRig) -> None:
    rig.engines[0].state = BackendState.STARTING  # type: ignore[misc]
    _, last = await pieces_of(rig.replica, encode(WORK))
    assert last.failed is not None
    assert last.failed.kind is FailureKind.BACKEND_UNAVAILABLE
    assert last.failed.failure().policy.other_backend
    assert rig.replica.record_routing_stats()["ready"] is False


async def test_the_queues_of_all_gateways_count_while_they_are_told(rig: ReplicaRig) -> None:
    await rig.replica.signals("a", 5)
    await rig.replica.signals("b", 7)
    await rig.replica.signals("b", 3)
    assert rig.replica.record_autoscaling_stats()["queued"] == 8
    rig.now += QUEUE_STALE_S + 1
    await rig.replica.signals("b", 2)
    assert rig.replica.record_autoscaling_stats()["queued"] == 2


async def test_a_replica_is_healthy_until_its_engine_is_stopped(rig: ReplicaRig) -> None:
    rig.replica.check_health()
    await rig.replica.stop()
    with pytest.raises(RuntimeError, match="the engine is stopped"):
        rig.replica.check_health()
