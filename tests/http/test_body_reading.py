from __future__ import annotations

import asyncio
import gzip
from collections.abc import Sequence
from typing import Any

import pytest

from gateway.errors import BodyTooLarge
from gateway.http.body import DISCARD_FACTOR, BodyTooSlow, read_body
from gateway.http.exchange import ClientGone, Exchange
from gateway.testing import ADMIN_KEY, fake_services


class ArrivingBody:
    """A body in pieces; after the last one nothing comes, or the client leaves."""

    def __init__(self, pieces: Sequence[bytes], *, whole: bool = True, leaves: bool = False) -> None:
        self.pieces = list(pieces)
        self.whole = whole
        self.leaves = leaves
        self.taken = 0

    async def __call__(self) -> Any:
        if self.pieces:
            self.taken += 1
            piece = self.pieces.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(self.pieces) or not self.whole}
        if self.leaves:
            return {"type": "http.disconnect"}
        await asyncio.Event().wait()


def exchange(**headers: str) -> Exchange:
    async def send(message: Any) -> None:
        raise AssertionError("nothing is sent while reading")

    encoded = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "headers": encoded}
    return Exchange.open(scope, send, fake_services())


async def test_pieces_are_joined_up_to_the_limit() -> None:
    assert await read_body(exchange(), ArrivingBody([b"ab", b"", b"cd"]), 4) == b"abcd"


async def test_a_body_that_never_ends_is_given_up() -> None:
    with pytest.raises(BodyTooSlow) as slow:
        await read_body(exchange(), ArrivingBody([b"ab"], whole=False), 10, timeout_s=0.01)
    assert slow.value.status == 408


async def test_a_client_who_leaves_in_mid_body_is_gone() -> None:
    with pytest.raises(ClientGone):
        await read_body(exchange(), ArrivingBody([b"ab"], whole=False, leaves=True), 10)


async def test_a_body_that_is_too_large_is_read_to_its_end_so_that_the_client_hears_of_it() -> None:
    body = ArrivingBody([b"x" * 10] * 3)
    with pytest.raises(BodyTooLarge):
        await read_body(exchange(content_length="30"), body, 10)
    assert body.pieces == []


async def test_a_body_that_is_too_large_is_read_only_up_to_a_bound() -> None:
    body = ArrivingBody([b"x" * 10] * 1_000)
    with pytest.raises(BodyTooLarge):
        await read_body(exchange(), body, 10)
    assert body.taken == DISCARD_FACTOR + 1


async def test_a_client_that_expects_100_continue_is_refused_before_it_sends_a_large_body() -> None:
    body = ArrivingBody([b"x" * 10])
    with pytest.raises(BodyTooLarge):
        await read_body(exchange(content_length="9" * 30, expect="100-continue"), body, 10)
    assert body.taken == 0


@pytest.mark.parametrize(
    "path",
    [
        "/v1/generate",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/embeddings",
        "/v1/rerank",
        "/v1/batches",
        "/v1/audio/transcriptions",
        "/tokenize",
        "/admin/keys",
        "/invocations",
    ],
)
async def test_a_compressed_body_is_refused_by_the_name_of_its_header(connect: Any, path: str) -> None:
    key = {"authorization": f"Bearer {ADMIN_KEY}"}
    async with connect(fake_services()) as client:
        sent = gzip.compress(b'{"model": "demo"}')
        refused = await client.post(path, content=sent, headers={**key, "content-encoding": "gzip"})
        plain = await client.post(path, content=b"{}", headers={**key, "content-encoding": "identity"})
    message = refused.json()["error"]["message"]
    assert (refused.status_code, message) == (
        415,
        "the header content-encoding is 'gzip'; allowed: identity, or no such header",
    )
    assert "content-encoding" not in plain.text
