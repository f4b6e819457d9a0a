"""The forwarding benchmark's load generator against its own worker, and against servers that cheat."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from itertools import islice

import pytest

from benchmarks.forwarding.client import read_answer
from benchmarks.forwarding.load import job_from, run
from benchmarks.forwarding.loops import Job, Shape
from benchmarks.forwarding.ticker import Ticker
from benchmarks.forwarding.worker import Engine, ServedConnection
from benchmarks.forwarding.workload import ANSWER_TOKENS, LEAST_PROMPT_BYTES, Regime, answer_text, bodies


@asynccontextmanager
async def served(make: Callable[[], asyncio.Protocol]) -> AsyncIterator[int]:
    """Run a server on a free port; yield the port."""
    server = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]
        server.close()


@asynccontextmanager
async def fake_worker(step_s: float = 0.0) -> AsyncIterator[tuple[int, Engine]]:
    engine = Engine(asyncio.get_running_loop())
    engine.step_s = step_s
    async with served(lambda: ServedConnection(engine)) as port:
        yield port, engine


def job(port: int, shape: Shape = Shape.CLOSED, amount: int = 4, **options: object) -> Job:
    return Job(port, shape, amount, seconds=0.8, key="key", seed="1", warm_up_s=0.05, **options)  # type: ignore[arg-type]


class LyingServer(asyncio.Protocol):
    """A server that gives every caller its first answer."""

    first_request: bytes | None = None

    def __init__(self, engine: Engine) -> None:
        self._honest = ServedConnection(engine)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._honest.connection_made(self)  # type: ignore[arg-type]

    def data_received(self, data: bytes) -> None:
        self._honest.data_received(data)

    def write(self, data: bytes) -> None:
        LyingServer.first_request = LyingServer.first_request or data
        self._transport.write(LyingServer.first_request)  # type: ignore[attr-defined]


class ClosingServer(asyncio.Protocol):
    """A server that closes a connection as soon as it gets data."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.close()


class SilentServer(asyncio.Protocol):
    """A server that never answers."""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("shape", list(Shape))
@pytest.mark.parametrize("regime", list(Regime))
async def test_every_answer_of_the_fake_worker_is_found_right(
    shape: Shape, stream: bool, regime: Regime
) -> None:
    async with fake_worker() as (port, engine):
        result = await run(job(port, shape, 20, stream=stream, regime=regime))
    assert result.whole > 0 and result.whole >= result.answers
    assert (result.failed, result.dropped, result.faults) == (0, 0, [])
    assert len(result.latencies_ms) == result.answers
    assert engine.trimmed == 0 and engine.running == 0


async def test_a_stream_counts_its_tokens_in_the_measured_time_and_the_time_to_its_first() -> None:
    async with fake_worker(step_s=0.001) as (port, _):
        result = await run(replace(job(port, amount=2, stream=True), seconds=3.0))
    assert result.whole_events == result.whole * ANSWER_TOKENS
    # At most two streams, each with a token every millisecond.
    assert 0 < result.tokens <= 2 * result.elapsed_s / 0.001 * 1.5
    assert statistics.median(result.first_ms) < statistics.median(result.latencies_ms)


async def test_an_answer_meant_for_another_is_a_failure() -> None:
    engine = Engine(asyncio.get_running_loop())
    async with served(lambda: LyingServer(engine)) as port:
        result = await run(job(port))
    assert result.whole == 1, "only the first one was meant for who got it"
    assert result.failed > 0 and result.faults[0].startswith("wrong text")


async def test_a_connection_closed_before_the_answer_is_a_failure() -> None:
    async with served(ClosingServer) as port:
        result = await run(job(port))
    assert result.answers == 0 and result.failed > 0
    assert result.faults[0] == "connection closed before the answer's end"


async def test_an_answer_that_never_comes_is_a_failure_once_patience_ends() -> None:
    async with served(SilentServer) as port:
        result = await run(job(port, amount=3), patience_s=0.05)
    assert (result.failed, result.faults) == (3, ["no answer in time"] * 3)


async def test_latency_of_an_open_loop_counts_from_when_a_request_was_due() -> None:
    def stalled() -> None:
        time.sleep(0.1)

    async with fake_worker() as (port, _), asyncio.timeout(60):
        # The load generator itself stalls: requests due meanwhile wait, and their latency includes the wait.
        asyncio.get_running_loop().call_later(0.15, stalled)
        result = await run(job(port, Shape.OPEN, 200))
    assert max(result.latencies_ms) > 80


def whole(text: str, tokens: int = ANSWER_TOKENS, status: str = "200 OK") -> bytes:
    body = json.dumps({"choices": [{"message": {"content": text}}], "usage": {"completion_tokens": tokens}})
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()


def streamed(*events: str) -> bytes:
    chunks = "".join(f"{len(event) + 8:x}\r\ndata: {event}\n\n\r\n" for event in events)
    return f"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{chunks}0\r\n\r\n".encode()


def test_a_whole_answer_is_read() -> None:
    assert read_answer(whole("yes"), False, 1.0, None).text == "yes"


@pytest.mark.parametrize(
    ("raw", "fault"),
    [
        (whole("yes", tokens=3), "completion_tokens is 3"),
        (whole("yes", status="503 Service Unavailable"), "status 503"),
        (b"HTTP/1.1 200 OK\r\n\r\nnot JSON", "JSONDecodeError"),
    ],
)
def test_a_whole_answer_that_is_not_the_one_asked_for_says_why(raw: bytes, fault: str) -> None:
    answer = read_answer(raw, False, 1.0, None)
    assert answer.text is None and answer.fault is not None and fault in answer.fault


def test_a_stream_joins_its_pieces_however_the_gateway_cut_them() -> None:
    usage = json.dumps({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": ANSWER_TOKENS}})
    raw = streamed('{"content":""}', '{"content":"a\\"b"}', '{"content": " c"}', usage, "[DONE]")
    answer = read_answer(raw, True, 1.0, 0.5)
    assert (answer.text, answer.events, answer.fault) == ('a"b c', 2, None)


def test_a_stream_that_breaks_off_is_a_failure() -> None:
    answer = read_answer(streamed('{"content":"a"}'), True, 1.0, 0.5)
    assert answer.fault is not None and "[DONE]" in answer.fault


def shared_messages(requests: Iterator[tuple[bytes, str]]) -> int:
    """Return how many messages of a conversation's second request were in its first."""
    first, *_, again = islice(requests, 129)
    seen = {message["content"] for message in json.loads(first[0])["messages"]}
    return sum(message["content"] in seen for message in json.loads(again[0])["messages"])


def test_a_conversation_comes_again_with_a_new_last_turn_and_unseen_text_never_does() -> None:
    assert shared_messages(bodies(Regime.CONVERSATION, stream=False, seed="1")) == 11
    assert shared_messages(bodies(Regime.AGENT, stream=False, seed="1")) == 11 + 2 * 20
    assert shared_messages(bodies(Regime.UNSEEN, stream=False, seed="1")) == 0


@pytest.mark.parametrize("regime", list(Regime))
def test_a_prompt_has_about_eight_kilobytes_or_an_agents_forty_five_and_ends_with_its_ticket(
    regime: Regime,
) -> None:
    for body, ticket in islice(bodies(regime, stream=True, seed="1"), 200):
        assert LEAST_PROMPT_BYTES < len(body) < (48_000 if regime is Regime.AGENT else 9_000)
        assert json.loads(body)["messages"][-1]["content"].endswith(f"ticket {ticket}")
        assert answer_text(ticket).startswith(ticket)


async def test_the_timer_fires_at_its_times_and_at_once_for_one_that_is_past() -> None:
    fired: list[float] = []
    done = asyncio.Event()
    times = [time.perf_counter() + 0.0123, 0.0]

    def due() -> None:
        fired.append(time.perf_counter())
        if times[1:]:
            times.pop(0)
            ticker.at(times[0])
        else:
            done.set()

    ticker = Ticker(asyncio.get_running_loop(), due)
    wanted = times[0]
    ticker.at(wanted)
    async with asyncio.timeout(30):
        await done.wait()
    ticker.close()
    assert fired[0] >= wanted and len(fired) == 2


def test_a_job_travels_as_json() -> None:
    sent = job(1, Shape.OPEN, regime=Regime.UNSEEN)
    assert job_from(json.loads(json.dumps(asdict(sent)))) == sent


async def test_the_fake_worker_streams_in_larger_pieces_when_it_is_asked_as_vllm_would_be() -> None:
    body, ticket = next(bodies(Regime.CONVERSATION, stream=True, seed="1"))
    asked = json.loads(body) | {"stream_interval": 16, "stream_options": {"include_usage": True}}
    asked["stream_options"]["continuous_usage_stats"] = True
    data = json.dumps(asked).encode()
    async with fake_worker() as (port, _), asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data)
        )
        raw = await reader.readuntil(b"0\r\n\r\n")
        writer.close()
    answer = read_answer(raw, True, 1.0, None)
    # The first token alone, then 139 in pieces of 16.
    assert (answer.text, answer.events) == (answer_text(ticket), 1 + 9)
    assert b'"completion_tokens":17,' in raw and b'"completion_tokens":140,' in raw
