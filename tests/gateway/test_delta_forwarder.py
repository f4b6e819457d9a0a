"""Pieces of an answer that cannot be passed on at once."""

import pytest

from budgeting.values import Message, Role
from gateway.backends.delta_forwarder import DeltaForwarder
from gateway.backends.port import Work
from gateway.backends.workers.answer import CompletionReader
from gateway.contracts.events import Delta
from gateway.contracts.values import Sampling

EVENT = b'data: {"choices": [{"index": 0, "delta": {"content": "a"}}]}\n\n'


def forwarder(sent: list[str]) -> DeltaForwarder[bytes]:
    async def push(delta: Delta) -> None:
        sent.append(delta.text)

    work = Work("gen_1", (), (Message(Role.USER, "hi"),), Sampling())
    return DeltaForwarder(CompletionReader(work, lambda token_id: b""), push, lambda: None)


async def test_pieces_are_sent_in_order_when_their_task_runs() -> None:
    sent: list[str] = []
    one = forwarder(sent)
    assert not one.take(EVENT) and not sent
    await one.rest()
    assert sent == ["a"]


@pytest.mark.filterwarnings("error")
async def test_pieces_of_a_request_that_is_cancelled_before_that_are_dropped() -> None:
    sent: list[str] = []
    one = forwarder(sent)
    assert not one.take(EVENT)
    one.close()
    await one.rest()
    assert not sent
