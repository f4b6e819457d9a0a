"""Callers who leave, over real sockets: the journey is cancelled and nothing is left."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from http.client import HTTPConnection
from typing import Any

import httpx
import pytest

from gateway.contracts.batches import BatchBody
from gateway.contracts.values import Caller, GenerateRequest
from gateway.errors import PublicError
from gateway.generation.sink import Sink
from gateway.http.disconnect_watch import until_gone
from gateway.http.exchange import ClientDisconnect, ClientGone, Exchange
from gateway.http.protocol import GatewayProtocol
from gateway.state.idempotency import StoredReply
from gateway.testing import (
    CALLER_KEY,
    FakeEmbeddings,
    FakeJourney,
    MemoryIdempotency,
    fake_services,
    serving,
)
from tests.http.fakes import eventually

NATIVE = {"messages": [{"role": "user", "content": "hi"}]}
CHAT = {"model": "demo", **NATIVE}


@contextmanager
def posted(url: str, path: str, body: Any, *, headers: str = "") -> Iterator[socket.socket]:
    host, port = url.removeprefix("http://").split(":")
    raw = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: gw\r\nauthorization: Bearer {CALLER_KEY}\r\n"
        f"content-length: {len(raw)}\r\n{headers}\r\n"
    )
    with socket.create_connection((host, int(port)), timeout=30) as sock:
        sock.sendall(head.encode() + raw)
        yield sock


class SlowStore(MemoryIdempotency):
    """Stores an answer only after ``go`` is set; sets ``begun`` before."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go = threading.Event(), threading.Event()

    async def put(self, tenant: str, key: str, fingerprint: str, reply: StoredReply) -> bool:
        self.begun.set()
        await asyncio.to_thread(self.go.wait)
        return await super().put(tenant, key, fingerprint, reply)


class SlowBatches:
    """Makes a batch only after ``go`` is set; sets ``begun`` before."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()

    async def create(self, caller: Caller, batch_id: str, asked: BatchBody) -> dict[str, str]:
        self.begun.set()
        await asyncio.to_thread(self.go.wait)
        return {"id": batch_id}


SERVERS = [
    GatewayProtocol,
    "httptools",
]  # the first reports a disconnect itself; with the second the gateway has to watch for it


@pytest.mark.parametrize("http", SERVERS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("path", "body"), [("/v1/generate", NATIVE), ("/v1/chat/completions", CHAT)])
def test_a_caller_who_leaves_cancels_the_journey(path: str, body: Any, stream: bool, http: Any) -> None:
    journey = FakeJourney(holds=True)
    with serving(fake_services(journey), http=http) as url:
        with posted(url, path, {**body, "stream": stream}) as sock:
            eventually(lambda: journey.running == 1)
            if stream:
                assert b"200 OK" in sock.recv(4096)
        eventually(lambda: journey.cancelled == 1)
        assert journey.running == 0


def test_a_caller_who_leaves_before_the_first_token_cancels_the_journey() -> None:
    journey = FakeJourney(pieces=(), holds=True)
    with serving(fake_services(journey)) as url:
        with posted(url, "/v1/generate", {**NATIVE, "stream": True}):
            eventually(lambda: journey.running == 1)
        eventually(lambda: journey.cancelled == 1)


@pytest.mark.parametrize("http", SERVERS)
def test_two_hundred_callers_who_leave_leave_nothing(http: Any) -> None:
    journey = FakeJourney(holds=True)
    with serving(fake_services(journey), http=http) as url:
        for number in range(200):
            before = len(journey.requests)
            with posted(url, "/v1/generate", {**NATIVE, "stream": number % 2 == 0}):
                if number % 3:  # the others disconnect while their request still arrives
                    eventually(partial(journey.arrived, before + 1))
        eventually(lambda: journey.running == 0)
        assert journey.cancelled == len(journey.requests) > 130
        assert journey.finished == 0


def test_waiting_behind_an_idempotency_key_ends_when_the_caller_leaves() -> None:
    journey = FakeJourney(holds=True)
    key = "idempotency-key: k\r\n"
    with serving(fake_services(journey)) as url:
        with posted(url, "/v1/generate", NATIVE, headers=key):
            eventually(lambda: journey.running == 1)
            with posted(url, "/v1/generate", NATIVE, headers=key):
                time.sleep(0.05)
            assert journey.running == 1
        eventually(lambda: journey.running == 0)
        assert len(journey.requests) == 1


def test_a_caller_who_leaves_hands_the_key_to_the_next_one() -> None:
    journey = FakeJourney(holds=True)
    key = "idempotency-key: k\r\n"
    with serving(fake_services(journey)) as url:
        with posted(url, "/v1/generate", NATIVE, headers=key) as first:
            eventually(lambda: journey.running == 1)
            with posted(url, "/v1/generate", NATIVE, headers=key):
                time.sleep(0.05)
                first.close()
                eventually(lambda: len(journey.requests) == 2 and journey.running == 1)
        eventually(lambda: journey.running == 0)


@pytest.mark.parametrize("http", SERVERS)
def test_vectors_that_were_paid_for_are_stored_though_the_caller_left(http: Any) -> None:
    store, workers = SlowStore(), FakeEmbeddings()
    with serving(fake_services(idempotency=store, embeddings=workers), http=http) as url:
        body = {"model": "m", "input": "a"}
        with posted(url, "/v1/embeddings", body, headers="idempotency-key: k\r\n"):
            assert store.begun.wait(30)
        time.sleep(0.05)
        store.go.set()
        eventually(lambda: len(store.kept) == 1)
    assert len(workers.asked) == 1


@pytest.mark.parametrize("http", SERVERS)
def test_a_batch_that_was_begun_is_made_and_its_answer_stored_though_the_caller_left(http: Any) -> None:
    store, batches = MemoryIdempotency(), SlowBatches()
    with serving(fake_services(idempotency=store, batches=batches), http=http) as url:
        body = {"input_file_id": "file-a", "endpoint": "/v1/completions", "completion_window": "24h"}
        with posted(url, "/v1/batches", body, headers="idempotency-key: k\r\n"):
            assert batches.begun.wait(30)
        time.sleep(0.05)
        batches.go.set()
        eventually(lambda: len(store.kept) == 1)


class SlowRecord(FakeJourney):
    """Goes on after its answer, as a journey that records it, until ``go`` is set."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.go = threading.Event()

    async def run(self, request: GenerateRequest, sink: Sink, accept: Any = None) -> None:
        await super().run(request, sink)
        await asyncio.to_thread(self.go.wait, 60)


@pytest.mark.parametrize("error", [None, PublicError(503, "backend_unavailable", "gone")])
@pytest.mark.parametrize("http", SERVERS)
def test_a_whole_answer_is_sent_before_its_request_is_recorded(http: Any, error: PublicError | None) -> None:
    journey = SlowRecord(error=error)
    with serving(fake_services(journey), http=http) as url:
        answer = httpx.post(
            f"{url}/v1/generate", json=NATIVE, headers={"authorization": f"Bearer {CALLER_KEY}"}, timeout=30
        )
        assert (answer.status_code, journey.go.is_set()) == (200 if error is None else 503, False)
        journey.go.set()


def test_a_half_sent_body_is_no_request() -> None:
    journey = FakeJourney()
    with serving(fake_services(journey)) as url:
        with posted(url, "/v1/generate", NATIVE, headers="") as sock:
            eventually(lambda: journey.finished == 1)
            sock.sendall(b"POST /v1/generate HTTP/1.1\r\nhost: gw\r\ncontent-length: 100\r\n")
            sock.sendall(b"authorization: Bearer " + CALLER_KEY.encode() + b'\r\n\r\n{"mess')
        time.sleep(0.05)
        assert len(journey.requests) == 1


def test_the_connection_is_kept_for_the_next_request() -> None:
    journey = FakeJourney(error=PublicError(503, "queue_full", "no"))
    headers = {"authorization": f"Bearer {CALLER_KEY}"}
    with serving(fake_services(journey)) as url:
        connection = HTTPConnection(url.removeprefix("http://"), timeout=60)
        with closing(connection):
            sockets = []
            for _ in range(2):
                connection.request("POST", "/v1/generate", json.dumps(NATIVE), headers)
                sockets.append(connection.sock)
                answer = connection.getresponse()
                assert answer.status == 503 and answer.read()
        assert sockets[0] is sockets[1]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def exchange_over(send: Any, clock: Callable[[], float]) -> Exchange:
    scope = {"type": "http", "headers": []}
    return Exchange.open(scope, send, fake_services(clock=clock))


async def never() -> Any:
    await asyncio.Event().wait()


async def test_a_reader_who_takes_no_bytes_is_as_good_as_gone() -> None:
    clock = Clock()

    async def stuck(message: Any) -> None:
        clock.now += 61.0
        await asyncio.Event().wait()

    exchange = exchange_over(stuck, clock)
    with pytest.raises(ClientGone):
        async with until_gone(exchange, never, stall_s=0.04):
            await exchange.body(b"x", more=True)


async def test_a_slow_generation_is_not_a_slow_reader() -> None:
    clock = Clock()

    async def quick(message: Any) -> None:
        await asyncio.sleep(0)

    exchange = exchange_over(quick, clock)
    async with until_gone(exchange, never, stall_s=0.02):
        await exchange.body(b"x", more=True)
        clock.now += 1_000.0
        await asyncio.sleep(0.05)


async def test_an_error_of_the_work_comes_out_as_itself() -> None:
    exchange = exchange_over(never, time.monotonic)
    with pytest.raises(KeyError):
        async with until_gone(exchange, never):
            raise KeyError("x")


async def test_cancelling_from_outside_is_not_a_caller_who_left() -> None:
    exchange = exchange_over(never, time.monotonic)

    async def work() -> None:
        async with until_gone(exchange, never):
            await asyncio.Event().wait()

    async with asyncio.TaskGroup() as group:
        task = group.create_task(work())
        await asyncio.sleep(0)
        task.cancel()
    assert task.cancelled()


async def test_after_release_a_caller_who_leaves_no_longer_cancels() -> None:
    exchange = exchange_over(never, time.monotonic)
    gone = asyncio.Event()

    async def receive() -> Any:
        await gone.wait()
        return {"type": "http.disconnect"}

    async with until_gone(exchange, receive) as release:
        release()
        gone.set()
        await asyncio.sleep(0.01)

    with pytest.raises(ClientGone):
        async with until_gone(exchange, receive):
            await asyncio.sleep(1)


async def test_a_send_that_the_server_refuses_silences_the_exchange() -> None:
    sent = []

    async def closed(message: Any) -> None:
        sent.append(message)
        raise ConnectionResetError

    exchange = exchange_over(closed, time.monotonic)
    await exchange.body(b"x", more=True)
    await exchange.body(b"y", more=False)
    assert len(sent) == 1


@pytest.mark.parametrize("http", SERVERS)
def test_an_endless_stream_to_a_reader_who_stops_waits_for_it(http: Any) -> None:
    journey = FakeJourney(endless=True)
    with serving(fake_services(journey), http=http) as url:
        with posted(url, "/v1/generate", {**NATIVE, "stream": True}) as sock:
            sock.recv(1024)
            time.sleep(0.1)
            assert journey.running == 1
        eventually(lambda: journey.cancelled == 1)


def test_a_caller_who_leaves_after_a_body_larger_than_the_servers_buffer_cancels_the_journey() -> None:
    journey = FakeJourney(holds=True)
    body = {"messages": [{"role": "user", "content": "x" * 300_000}]}
    with serving(fake_services(journey)) as url:
        with posted(url, "/v1/generate", body):
            eventually(lambda: journey.running == 1)
        eventually(lambda: journey.cancelled == 1)


def exchange_and_disconnect() -> tuple[Exchange, ClientDisconnect]:
    disconnect = ClientDisconnect()
    exchange = exchange_over(never, time.monotonic)
    exchange.disconnect = disconnect
    return exchange, disconnect


async def test_a_disconnect_that_the_server_reports_cancels_the_work() -> None:
    exchange, disconnect = exchange_and_disconnect()
    with pytest.raises(ClientGone):
        async with until_gone(exchange, never):
            disconnect.set()
            await asyncio.sleep(1)
    assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]
    await asyncio.sleep(0)


async def test_a_caller_who_has_left_already_gets_no_work_done() -> None:
    exchange, disconnect = exchange_and_disconnect()
    disconnect.set()
    with pytest.raises(ClientGone):
        async with until_gone(exchange, never):
            raise AssertionError("the block ran")


async def test_a_disconnect_reported_after_release_cancels_nothing() -> None:
    exchange, disconnect = exchange_and_disconnect()
    async with until_gone(exchange, never) as release:
        release()
        disconnect.set()
        await asyncio.sleep(0)


async def test_a_disconnect_reported_after_the_work_cancels_nothing() -> None:
    exchange, disconnect = exchange_and_disconnect()
    async with until_gone(exchange, never):
        await asyncio.sleep(0)
    disconnect.set()
    await asyncio.sleep(0)


async def test_cancelling_from_outside_stays_a_cancellation_though_the_caller_leaves_too() -> None:
    exchange, disconnect = exchange_and_disconnect()

    async def work() -> None:
        async with until_gone(exchange, never):
            await asyncio.Event().wait()

    async with asyncio.TaskGroup() as group:
        task = group.create_task(work())
        await asyncio.sleep(0)
        task.cancel()
        disconnect.set()
    assert task.cancelled()


async def test_an_error_of_the_work_is_raised_rather_than_the_disconnect() -> None:
    exchange, disconnect = exchange_and_disconnect()
    with pytest.raises(KeyError):
        async with until_gone(exchange, never):
            try:
                disconnect.set()
                await asyncio.sleep(1)
            except asyncio.CancelledError:
                raise KeyError("x") from None


class ShortStall(GatewayProtocol):
    stall_s = 0.1


class LongStall(GatewayProtocol):
    stall_s = 2.0


def test_the_server_gives_up_a_reader_who_takes_no_bytes() -> None:
    journey = FakeJourney(endless=True)
    with serving(fake_services(journey), http=ShortStall) as url:
        with posted(url, "/v1/generate", {**NATIVE, "stream": True}) as sock:
            sock.recv(1024)
            eventually(lambda: journey.cancelled == 1)
        assert journey.running == 0


def test_the_server_keeps_a_reader_who_takes_bytes_slowly() -> None:
    journey = FakeJourney(endless=True)
    with serving(fake_services(journey), http=LongStall) as url:
        with posted(url, "/v1/generate", {**NATIVE, "stream": True}) as sock:
            end = time.monotonic() + 3.0
            while time.monotonic() < end:
                sock.recv(1 << 20)
                time.sleep(0.02)
            assert journey.cancelled == 0
        eventually(lambda: journey.cancelled == 1)
