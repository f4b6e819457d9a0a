"""Pieces of a stream that ``Exchange.write`` sends synchronously."""

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import pytest

from gateway.http.exchange import SCOPE_KEY, ClientDisconnect, Exchange


@dataclass
class Flow:
    write_paused: bool = False


class Server:
    """Records what is sent; with ``gone`` it raises OSError instead."""

    def __init__(self, *, gone: bool = False) -> None:
        self.sent: list[MutableMapping[str, Any]] = []
        self.gone = gone

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if self.gone:
            raise OSError("closed")
        self.sent.append(message)


def exchange(server: Server, flow: Flow | None) -> Exchange:
    scope: dict[str, Any] = {"headers": []}
    if flow is not None:
        scope[SCOPE_KEY] = ClientDisconnect(flow)
    return Exchange.open(scope, server.send, clock=lambda: 0.0, new_id=str)


def test_a_piece_is_sent_before_write_returns() -> None:
    server = Server()
    assert exchange(server, Flow()).write(b"data: 1\n\n")
    assert server.sent == [{"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True}]


@pytest.mark.parametrize("flow", [Flow(write_paused=True), None], ids=["write paused", "another server"])
def test_a_piece_that_would_have_to_wait_is_not_sent(flow: Flow | None) -> None:
    server = Server()
    assert not exchange(server, flow).write(b"data: 1\n\n") and not server.sent


def test_nothing_more_is_sent_to_a_caller_who_is_gone() -> None:
    server = Server(gone=True)
    one = exchange(server, Flow())
    assert one.write(b"data: 1\n\n") and one.client_gone
    server.gone = False
    assert one.write(b"data: 2\n\n") and not server.sent
