"""One connection, fed byte by byte through a transport that records what is done to it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.backends.workers.client import whole_body
from gateway.backends.workers.connection import GATHERED_PIECES, HIGH_WATER_BYTES, Connection
from gateway.backends.workers.errors import BadHttp, ConnectionLost, TimedOut, TransportError


class Transport(asyncio.Transport):
    """A transport that records all that is written, and closes at once."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self.connection = connection
        self.written = b""
        self.aborted = False
        self.reading = True

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def abort(self) -> None:
        if not self.aborted:
            self.aborted = True
            asyncio.get_running_loop().call_soon(self.connection.connection_lost, None)

    def is_closing(self) -> bool:
        return self.aborted

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


def connected() -> tuple[Connection, Transport, list[str]]:
    calls: list[str] = []
    connection = Connection(
        asyncio.get_running_loop(),
        made=lambda _: calls.append("made"),
        free=lambda _: calls.append("free"),
        gone=lambda _: calls.append("gone"),
    )
    transport = Transport(connection)
    connection.connection_made(transport)
    return connection, transport, calls


def send(connection: Connection, first_s: float = 5, idle_s: float = 5, total_s: float = 5) -> None:
    connection.send((b"POST",), (first_s, idle_s, total_s))


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
BODIES = {
    "chunked": HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n6;x=y\r\n there\r\n0\r\n\r\n",
    "of a length": HEAD + b"content-length: 11\r\n\r\nhello there",
    "behind an interim answer": b"HTTP/1.1 100 Continue\r\n\r\n"
    + HEAD
    + b"content-length: 11\r\n\r\nhello there",
}


@settings(deadline=None, max_examples=25)
@given(st.sampled_from(sorted(BODIES)), st.lists(st.integers(0, 120), max_size=12))
def test_an_answer_reads_the_same_however_it_is_cut(kind: str, cuts: list[int]) -> None:
    async def scenario() -> None:
        raw, (connection, _, calls) = BODIES[kind], connected()
        for _ in range(2):
            send(connection)
            bounds = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
            for start, end in itertools.pairwise(bounds):
                if end > start:
                    connection.data_received(raw[start:end])
            assert connection.status == 200
            assert connection.content_type == "text/event-stream"
            assert await whole_body(connection) == b"hello there"
            connection.release()
        assert calls == ["made", "free", "free"]

    asyncio.run(scenario())


class PieceReader:
    """Takes pieces until it has ``most`` of them."""

    def __init__(self, most: int = 1_000) -> None:
        self.pieces: list[bytes] = []
        self.most = most

    def take(self, data: bytes) -> bool:
        self.pieces.append(data)
        return len(self.pieces) < self.most


@settings(deadline=None, max_examples=25)
@given(st.sampled_from(sorted(BODIES)), st.lists(st.integers(0, 120), max_size=12), st.integers(1, 4))
def test_an_answer_is_passed_on_the_same_however_it_is_cut(kind: str, cuts: list[int], most: int) -> None:
    async def scenario() -> None:
        raw, (connection, _, calls) = BODIES[kind], connected()
        send(connection)
        taken: list[bytes] = []

        async def read() -> None:
            more = True
            while more:
                reader = PieceReader(most)
                more = await connection.pass_on(reader.take)
                taken.extend(reader.pieces)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(read())
            bounds = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
            for start, end in itertools.pairwise(bounds):
                if end > start:
                    connection.data_received(raw[start:end])
                if end % 2:
                    await asyncio.sleep(0)
        assert b"".join(taken) == b"hello there"
        connection.release()
        assert calls == ["made", "free"]

    asyncio.run(scenario())


async def test_pieces_are_taken_as_they_come_and_the_reader_is_woken_for_the_end_alone() -> None:
    connection, _, _ = connected()
    send(connection)
    connection.data_received(HEAD + b"content-length: 11\r\n\r\n")
    reader = PieceReader()
    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(connection.pass_on(reader.take))
        await asyncio.sleep(0)
        for piece in (b"hello", b" the"):
            connection.data_received(piece)
            assert reader.pieces[-1] == piece  # before the loop had a turn
        await asyncio.sleep(0)
        assert not reading.done()
        connection.data_received(b"re")
    assert not reading.result() and b"".join(reader.pieces) == b"hello there"


async def test_what_is_not_taken_at_once_waits_for_the_reader() -> None:
    connection, _, _ = connected()
    send(connection)
    connection.data_received(HEAD + b"content-length: 11\r\n\r\nhel")
    first, second = PieceReader(2), PieceReader()
    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(connection.pass_on(first.take))
        await asyncio.sleep(0)
        connection.data_received(b"lo")
        connection.data_received(b" there")
    assert reading.result() and first.pieces == [b"hel", b"lo"]
    assert not await connection.pass_on(second.take) and second.pieces == [b" there"]


async def test_a_reader_that_leaves_takes_nothing_more_and_a_broken_connection_is_an_error() -> None:
    connection, _, _ = connected()
    send(connection)
    connection.data_received(HEAD + b"content-length: 11\r\n\r\n")
    reader = PieceReader()
    reading = asyncio.get_running_loop().create_task(connection.pass_on(reader.take))
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    connection.data_received(b"hello")
    assert not reader.pieces
    async with asyncio.TaskGroup() as tasks:
        again = tasks.create_task(_raises(connection.pass_on(reader.take)))
        await asyncio.sleep(0)
        connection.connection_lost(None)
    assert reader.pieces == [b"hello"] and isinstance(again.result(), ConnectionLost)


def chunk(piece: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(piece), piece)


class Gathering:
    """A reader to whom the pieces after the first token come together."""

    def __init__(self, idle_s: float = 5) -> None:
        self.connection = connected()[0]
        self.reader = PieceReader()
        send(self.connection, idle_s=idle_s)
        self.connection.data_received(HEAD + b"transfer-encoding: chunked\r\n\r\n")

    async def first_token(self) -> asyncio.Task[bool]:
        passing = self.connection.pass_on(self.reader.take)
        reading = asyncio.get_running_loop().create_task(passing)
        await asyncio.sleep(0)
        for piece in (b"role", b"first"):
            self.connection.data_received(chunk(piece))
            assert self.reader.pieces[-1] == piece  # no token came yet, so nothing waits
        self.connection.first_token_received()
        self.connection.gather()
        return reading


async def test_pieces_that_nobody_waits_for_are_taken_together() -> None:
    gathering = Gathering()
    reading = await gathering.first_token()
    for _ in range(2 * GATHERED_PIECES):
        gathering.connection.data_received(chunk(b"x"))
    gathering.connection.data_received(chunk(b"y"))
    gathering.connection.data_received(chunk(b"data: [DONE]"))
    expected = [b"role", b"first", b"x" * GATHERED_PIECES, b"x" * GATHERED_PIECES, b"ydata: [DONE]"]
    assert gathering.reader.pieces == expected
    gathering.connection.data_received(chunk(b"z") + b"0\r\n\r\n")
    assert not await reading and gathering.reader.pieces == [*expected, b"z"]


@pytest.mark.parametrize("how", ["the worker dies", "the request is cancelled", "nothing more comes"])
async def test_gathered_pieces_are_taken_however_the_answer_breaks_off(how: str) -> None:
    gathering = Gathering(idle_s=0.05)
    reading = await gathering.first_token()
    gathering.connection.data_received(chunk(b"more"))
    if how == "the worker dies":
        gathering.connection.connection_lost(None)
        expected: type[BaseException] = ConnectionLost
    elif how == "the request is cancelled":
        reading.cancel()
        expected = asyncio.CancelledError
    else:
        expected = TimedOut
    with pytest.raises(expected):
        await reading
    assert gathering.reader.pieces == [b"role", b"first", b"more"]


async def _raises(work: Awaitable[object]) -> BaseException | None:
    try:
        await work
    except TransportError as error:
        return error
    return None


@settings(deadline=None, max_examples=80)
@given(st.lists(st.binary(min_size=1), max_size=6))
def test_no_bytes_leave_a_request_without_an_end(pieces: list[bytes]) -> None:
    async def scenario() -> None:
        connection, _, calls = connected()
        send(connection)
        for piece in pieces:
            connection.data_received(piece)
        connection.connection_lost(None)
        try:
            await whole_body(connection)
        except TransportError as error:
            assert str(error)
        connection.release()
        assert not connection.busy and calls[-1] == "gone"
        with pytest.raises(ConnectionLost, match="idle"):
            send(connection)

    asyncio.run(scenario())


async def test_bytes_that_nobody_asked_for_close_an_idle_connection() -> None:
    connection, transport, _ = connected()
    connection.data_received(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
    assert transport.aborted
    with pytest.raises(ConnectionLost, match="idle"):
        send(connection)


@pytest.mark.parametrize("pieces", [(b"", b"more"), (b"HTTP/1.1 503 ", b""), (BODIES["chunked"], b"")])
async def test_bytes_after_the_end_of_an_answer_close_the_connection(pieces: tuple[bytes, bytes]) -> None:
    connection, transport, calls = connected()
    send(connection)
    connection.data_received(BODIES["of a length"] + pieces[0])
    if pieces[1]:
        connection.data_received(pieces[1])
    assert (connection.status, await connection.read()) == (200, b"hello there")
    connection.release()
    assert transport.aborted and "free" not in calls


async def test_a_worker_that_says_close_is_not_asked_again() -> None:
    connection, transport, calls = connected()
    send(connection)
    connection.data_received(HEAD + b"connection: close\r\ncontent-length: 0\r\n\r\n")
    connection.release()
    assert transport.aborted and "free" not in calls


async def test_releasing_a_connection_before_the_answers_end_closes_it_at_once() -> None:
    connection, transport, _ = connected()
    send(connection)
    connection.data_received(HEAD)
    connection.release()
    assert transport.aborted and not connection.busy


async def test_a_lingering_connection_is_free_when_the_end_comes() -> None:
    connection, transport, calls = connected()
    send(connection)
    connection.data_received(HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n")
    assert await connection.read() == b"hello"
    connection.linger()
    connection.release()
    assert connection.busy and not transport.aborted
    connection.data_received(b"0\r\n\r\n")
    assert calls[-1] == "free" and not connection.busy


async def test_unread_bytes_hold_the_worker_back_until_they_are_read() -> None:
    connection, transport, _ = connected()
    send(connection)
    connection.data_received(HEAD + b"content-length: 9999999\r\n\r\n")
    while transport.reading:
        connection.data_received(b"x" * 65_536)
    assert len(await connection.read()) <= HIGH_WATER_BYTES + 65_536
    assert transport.reading
    connection.release()


@pytest.mark.parametrize(
    ("limits", "first_token_received", "what"),
    [
        ({"first_s": 0.05}, False, "no token came"),
        ({"idle_s": 0.05}, True, "nothing more came"),
        ({"total_s": 0.05}, False, "the answer did not end"),
        ({"total_s": 0.05}, True, "the answer did not end"),
    ],
)
async def test_each_timeout_says_which_limit_was_reached(
    limits: dict[str, float], first_token_received: bool, what: str
) -> None:
    connection, transport, _ = connected()
    send(connection, **limits)
    connection.data_received(HEAD + b"content-length: 9\r\n\r\nx")
    assert await connection.read() == b"x"
    if first_token_received:
        connection.first_token_received()
    with pytest.raises(TimedOut) as caught:
        await connection.read()
    assert str(caught.value) == f"{what} within 0.05 s" and transport.aborted
    connection.release()


async def test_the_idle_timeout_holds_after_a_first_token_that_came_late() -> None:
    connection, _, _ = connected()
    send(connection, first_s=60, idle_s=0.05, total_s=60)
    await asyncio.sleep(0.15)  # longer than the idle timeout
    connection.data_received(HEAD + b"content-length: 9\r\n\r\nx")
    assert await connection.read() == b"x"
    connection.first_token_received()
    async with asyncio.timeout(30):
        with pytest.raises(TimedOut, match="nothing more came"):
            await connection.read()
    connection.release()


async def test_headers_are_found_in_any_case_and_trailers_are_not_stored() -> None:
    connection, _, calls = connected()
    send(connection)
    connection.data_received(b"HTTP/1.1 429 No\r\nContent-Type: Text/Plain\r\nRETRY-AFTER: 7\r\n")
    connection.data_received(b"Transfer-Encoding: chunked\r\n\r\n2\r\nno\r\n0\r\nRetry-After: 8\r\nx: y\r\n")
    assert (connection.content_type, connection.header(b"retry-after")) == ("text/plain", "7")
    assert not connection._headers
    connection.data_received(b"\r\n")
    assert await whole_body(connection) == b"no"
    connection.release()
    assert calls == ["made", "free"]


async def test_a_slow_reader_is_no_silent_worker() -> None:
    connection, transport, _ = connected()
    send(connection, first_s=5, idle_s=0.05)
    connection.first_token_received()
    connection.data_received(HEAD + b"content-length: 9\r\n\r\nhello")
    await asyncio.sleep(0.2)
    assert not transport.aborted
    assert await connection.read() == b"hello"
    connection.release()


async def test_a_whole_answer_is_read_without_its_byte_order_mark() -> None:
    connection, _, _ = connected()
    send(connection)
    connection.data_received(HEAD + b"content-length: 5\r\n\r\n\xef\xbb\xbf{}")
    assert await whole_body(connection) == b"{}"


async def test_an_answer_longer_than_allowed_is_not_read_whole() -> None:
    connection, _, _ = connected()
    send(connection)
    connection.data_received(HEAD + b"content-length: 100\r\n\r\n" + b"x" * 100)
    with pytest.raises(BadHttp, match="longer than 10 bytes"):
        await whole_body(connection, 10)
    connection.release()
