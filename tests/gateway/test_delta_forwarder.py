"""Pieces of an answer that cannot be passed on at once."""

from collections.abc import Awaitable

import pytest

from budgeting.values import Message, Role
from gateway.backends.delta_forwarder import DeltaForwarder
from gateway.backends.port import Work
from gateway.backends.workers.answer import CompletionReader
from gateway.contracts.events import TAKEN, Delta
from gateway.contracts.values import Sampling

EVENT = b'data: {"choices": [{"index": 0, "delta": {"content": "a"}}]}\n\n'


ROLE = b'data: {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}\n\n'
WORK = Work("gen_1", (), (Message(Role.USER, "hi"),), Sampling())


def forwarder(sent: list[str]) -> DeltaForwarder[bytes]:
    async def push(delta: Delta) -> None:
        sent.append(delta.text)

    return DeltaForwarder(CompletionReader(WORK, lambda token_id: b""), push, lambda: None)


def test_the_start_of_an_answer_and_its_first_text_are_told_apart() -> None:
    told: list[str] = []

    def push(delta: Delta) -> Awaitable[None]:
        told.append(delta.text)
        return TAKEN

    reader = CompletionReader(WORK, lambda token_id: b"")
    one = DeltaForwarder(reader, push, lambda: told.append("start"), lambda: told.append("text"))
    for data in (ROLE, EVENT, EVENT):
        assert one.take(data)
    assert told == ["start", "text", "a", "a"]


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
