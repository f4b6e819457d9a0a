"""Pieces of a worker's answer that cannot be passed on at once."""

import asyncio

import pytest

from budgeting.values import Message, Role
from gateway.backends.port import Work
from gateway.backends.workers.answer import CompletionReader
from gateway.backends.workers.connection import Connection
from gateway.backends.workers.passing_on import PassingOn
from gateway.contracts.events import Delta
from gateway.contracts.values import Sampling

EVENT = b'data: {"choices": [{"index": 0, "delta": {"content": "a"}}]}\n\n'


def passing(sent: list[str]) -> PassingOn:
    async def push(delta: Delta) -> None:
        sent.append(delta.text)

    work = Work("gen_1", (), (Message(Role.USER, "hi"),), Sampling())
    loop = asyncio.get_running_loop()
    connection = Connection(loop, made=lambda _: None, free=lambda _: None, gone=lambda _: None)
    return PassingOn(connection, CompletionReader(work, lambda token_id: b""), push)


async def test_they_go_out_in_order_when_their_task_has_its_turn() -> None:
    sent: list[str] = []
    one = passing(sent)
    assert not one.take(EVENT) and not sent
    await one.rest()
    assert sent == ["a"]


@pytest.mark.filterwarnings("error")
async def test_they_end_with_a_request_that_is_cancelled_before_that() -> None:
    sent: list[str] = []
    one = passing(sent)
    assert not one.take(EVENT)
    one.close()
    await one.rest()
    assert not sent
