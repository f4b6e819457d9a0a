"""Pieces of a stream that ``Exchange.write`` sends synchronously."""

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest
from uvicorn.protocols.http.flow_control import FlowControl

from gateway.http.exchange import SCOPE_KEY, ClientDisconnect, Exchange


def connection(sent: list[bytes]) -> ClientDisconnect:
    return ClientDisconnect(FlowControl(asyncio.Transport()), sent.append)


def exchange(disconnect: ClientDisconnect | None) -> Exchange:
    async def send(message: MutableMapping[str, Any]) -> None:
        raise AssertionError("nothing is sent through the server")

    return Exchange.open({"headers": [], SCOPE_KEY: disconnect}, send, clock=lambda: 0.0, new_id=str)


def test_a_piece_is_sent_as_one_chunk_before_write_returns() -> None:
    sent: list[bytes] = []
    assert exchange(connection(sent)).write(b"data: {}, {}\n\n")
    assert sent == [b"e\r\ndata: {}, {}\n\n\r\n"]


def test_a_piece_that_would_have_to_wait_is_not_sent() -> None:
    sent: list[bytes] = []
    slow = connection(sent)
    assert slow.flow is not None
    slow.flow.pause_writing()
    assert not exchange(slow).write(b"data: 1\n\n") and not sent


@pytest.mark.parametrize("disconnect", [ClientDisconnect(), None])
def test_under_another_server_nothing_is_sent_at_once(disconnect: ClientDisconnect | None) -> None:
    assert not exchange(disconnect).write(b"data: 1\n\n")


def test_nothing_more_is_sent_to_a_caller_who_is_gone() -> None:
    sent: list[bytes] = []
    gone = connection(sent)
    gone.set()
    assert exchange(gone).write(b"data: 1\n\n") and not sent
