"""Collecting the replicas' signals: a late replica is not a dead one."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from ray.exceptions import RayActorError
from ray.serve.handle import DeploymentHandle

from ops.ray.port import ReplicaLost
from ops.ray.replicas import ServeReplicas
from ops.ray.wire import ReplicaSignals, encode


class Answer:
    """One replica's answer to a broadcast."""

    def __init__(self, reply: bytes | Exception | None) -> None:
        self.reply = reply
        self.cancelled = False

    async def get_async(self) -> bytes:
        if self.reply is None:
            await asyncio.Event().wait()
        if isinstance(self.reply, Exception):
            raise self.reply
        return cast(bytes, self.reply)

    def cancel(self) -> None:
        self.cancelled = True


class Handle:
    """A deployment's handle whose replicas answer as listed."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = answers

    def options(self, **_: object) -> Handle:
        return self

    def broadcast(self, method: str, reporter_name: str, queued: int) -> Handle:
        return self

    async def _fetch_replica_results_async(self) -> tuple[Answer, ...]:
        return self.answers


async def read_signals(*answers: Answer) -> list[str]:
    replicas = ServeReplicas(cast("DeploymentHandle[Any]", Handle(*answers)))
    return [one.replica for one in await replicas.signals("gateway-1", 0, 0.05)]


async def test_a_replica_that_is_late_is_left_out_and_its_question_withdrawn() -> None:
    late = Answer(None)
    assert await read_signals(Answer(encode(ReplicaSignals("a"))), late) == ["a"]
    assert late.cancelled


async def test_replicas_that_are_all_late_are_not_taken_for_none() -> None:
    with pytest.raises(ReplicaLost, match="in time"):
        await read_signals(Answer(None), Answer(RayActorError()))


async def test_a_replica_that_starts_does_not_stand_for_late_ones_that_may_be_ready() -> None:
    starting = encode(ReplicaSignals("b", ready=False))
    with pytest.raises(ReplicaLost, match="in time"):
        await read_signals(Answer(starting), Answer(None))
    assert await read_signals(Answer(starting), Answer(RayActorError())) == ["b"]


async def test_replicas_that_are_all_gone_are_none() -> None:
    assert await read_signals(Answer(RayActorError())) == []
    assert await read_signals() == []


async def test_a_replica_of_another_version_does_not_hide_the_others() -> None:
    unreadable = Answer(b"\xc1")
    assert await read_signals(Answer(encode(ReplicaSignals("a"))), unreadable) == ["a"]
    with pytest.raises(ReplicaLost, match="readable"):
        await read_signals(unreadable)
