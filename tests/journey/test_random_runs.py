"""Random runs of the journey over real pools of workers, in virtual time, with connections that break anywhere."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import pytest

from accounting.keys import KeyLimits
from accounting.quotas import QuotaRequest, Quotas
from admission.values import AdmissionLimits
from gateway.backends.workers.pool_model import ModelReading
from gateway.backends.workers.serving_pool import ServingPool
from gateway.config.backends import OpenAIBackend
from gateway.contracts.events import Delta
from gateway.contracts.values import Caller, CallerRole, FinishReason, GenerateRequest
from gateway.keys.rate_limits import KeyLimiter
from gateway.wiring.workers import make_workers
from resilience.time_limits import TimeLimit, TimeLimits
from resilience.turns import Turns
from tests.journey.rig import JourneyRig, PieceTokenizer, RecordingSink
from tests.virtual_time import VirtualTimeLoop

Build = Callable[..., JourneyRig]
Ask = Callable[..., GenerateRequest]
LIMIT = 100_000
KEY = Caller("acme", CallerRole.CALLER, "key_1", limits=KeyLimits(tokens_per_day=LIMIT))
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
TYPE = "content-type: application/json"
BYTES = PieceTokenizer(())  # a token for each byte
PAUSES_S = (0.0, 0.0, 0.001, 0.05, 0.3)
ENDS = ("whole", "503", "closed at once", "hangs at once", "closed", "reset", "hangs", "error")


def text_of(number: int) -> str:
    return " ".join(f"w{number}x{place}" for place in range(1 + number % 7))


class Worker:
    """A vLLM that answers in pieces, and whose answers end as ``ENDS`` says, with these weights."""

    def __init__(self, random: Random, weights: list[int]) -> None:
        self.random, self.weights, self.up, self.generating = random, weights, True, 0
        self.connections: set[Wire] = set()

    def kill(self, loop: asyncio.AbstractEventLoop) -> None:
        self.up = False
        for connection in self.connections:
            connection.end(self.random.choice([None, ConnectionResetError(104, "reset")]))
        loop.call_later(self.random.choice([0.05, 0.4, 3.0]), setattr, self, "up", True)

    async def answer(self, wire: Wire, path: str, body: bytes) -> None:
        if not body:
            models = [{"id": "base", "owned_by": "vllm", "max_model_len": 4096}]
            return wire.whole(200, {"data": models} if path.endswith("/models") else {})
        self.generating += 1
        try:
            await self.generate(wire, json.loads(body)["messages"])
        finally:
            self.generating -= 1

    async def generate(self, wire: Wire, messages: list[dict[str, str]]) -> None:
        random, [how] = self.random, self.random.choices(ENDS, self.weights)
        begun = messages.pop()["content"] if messages[-1]["role"] == "assistant" else ""
        whole = text_of(int(messages[-1]["content"].split("#")[1]))
        assert whole.startswith(begun), "a worker is asked to resume what it has not said"
        rest = whole[len(begun) :]
        tokens, cut = len(rest), random.randrange(len(rest) + 1)
        await asyncio.sleep(random.choice(PAUSES_S))
        if how == "503":
            return wire.whole(503, {"error": {"message": "busy"}})
        if how == "closed at once":
            return wire.end(None)
        if how == "hangs at once":
            await asyncio.sleep(10_000)
        wire.feed(HEAD)
        while rest:
            if how != "whole" and len(rest) <= cut:
                if how == "hangs":
                    await asyncio.sleep(10_000)
                if how == "error":
                    return wire.chunk({"error": {"message": "broken", "code": 500}})
                return wire.end(None if how == "closed" else ConnectionResetError(104, "reset"))
            size = random.choice([1, 3, 9])
            piece, rest = rest[:size], rest[size:]
            choice = {"index": 0, "delta": {"content": piece}, "token_ids": [*piece.encode()]}
            wire.chunk({"choices": [choice]})
            await asyncio.sleep(random.choice(PAUSES_S))
        wire.chunk({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        wire.chunk({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": tokens}}, last=True)


class Wire(asyncio.Transport):
    """The gateway's side of a connection to a worker; what is on its way arrives before the end."""

    def __init__(self, loop: Network, protocol: Any, worker: Worker) -> None:
        super().__init__()
        self._loop, self._protocol, self._worker = loop, protocol, worker
        self._closed, self._sent = False, b""
        self._task: asyncio.Task[None] | None = None
        worker.connections.add(self)

    def is_closing(self) -> bool:
        return self._closed

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._sent += data
        head, found, body = self._sent.partition(b"\r\n\r\n")
        length = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
        if found and len(body) >= int(length or 0):
            path, self._sent = head.split(b" ")[1].decode(), b""
            self._task = self._loop.create_task(self._worker.answer(self, path, body))

    def feed(self, data: bytes) -> None:
        self._loop.call_soon(lambda: self._closed or self._protocol.data_received(data))

    def whole(self, status: int, body: object) -> None:
        data = json.dumps(body)
        self.feed(f"HTTP/1.1 {status} X\r\n{TYPE}\r\ncontent-length: {len(data)}\r\n\r\n{data}".encode())

    def chunk(self, event: object, *, last: bool = False) -> None:
        data = b"data: %b\n\n" % json.dumps(event).encode() + b"data: [DONE]\n\n" * last
        self.feed(b"%x\r\n%b\r\n" % (len(data), data) + b"0\r\n\r\n" * last)

    def end(self, error: Exception | None) -> None:
        self._loop.call_soon(self._close, error)

    def _close(self, error: Exception | None = None) -> None:
        if not self._closed:
            self._closed = True
            self._worker.connections.discard(self)
            if self._task is not None:
                self._task.cancel()
            self._loop.call_soon(self._protocol.connection_lost, error)

    close = abort = _close

    def pause_reading(self) -> None:
        """Answers are short: what comes after it is read too."""

    resume_reading = pause_reading


class Network(VirtualTimeLoop):
    """A loop whose connections lead to workers, by port."""

    def __init__(self) -> None:
        super().__init__()
        self.workers: dict[int, Worker] = {}
        self.errors: list[object] = []
        self.set_exception_handler(lambda loop, context: self.errors.append(context))

    async def create_connection(  # type: ignore[override]
        self, factory: Any, host: Any = None, port: Any = None, **_: Any
    ) -> Any:
        worker = self.workers[port]
        await asyncio.sleep(worker.random.choice(PAUSES_S))
        if not worker.up:
            raise ConnectionRefusedError(111, "refused")
        protocol = factory()
        wire = Wire(self, protocol, worker)
        protocol.connection_made(wire)
        return wire, protocol


class Reader(RecordingSink):
    pause_s: Callable[[], float]

    async def delta(self, delta: Delta) -> None:
        assert self.answer is None and self.error is None
        self.deltas.append(delta)
        await asyncio.sleep(self.pause_s())


def pool(name: str, ports: range, random: Random, loop: Network) -> ServingPool:
    urls = [f"http://127.0.0.1:{port}/v1" for port in ports]
    fields: dict[str, Any] = {"kind": "openai", "base_urls": urls, "model": "base", "dialect": "vllm"}
    fields |= {"first_token_timeout_seconds": 1, "idle_timeout_seconds": 0.5, "prompt": "messages"}
    fields |= {"max_connections": random.choice([2, 100]), "max_running": random.choice([0, 2])}
    fields |= {"hedge": {"enabled": random.random() < 0.5, "min_ms": 1, "quantile": 0.5, "max_share": 0.5}}
    section, reading = OpenAIBackend.model_validate(fields), ModelReading(BYTES.token_bytes)
    return make_workers(name, section, reading=reading, clock=loop.time, turns=Turns(), environ={})


def check_end(rig: JourneyRig, request: GenerateRequest, sink: Reader) -> None:
    """Checks what one caller got, and that it is what is billed."""
    rows = [row for row in rig.outbox.rows if row.generation_id == request.generation_id]
    whole, answer = text_of(int(request.messages[0].content.split("#")[1])), sink.answer
    assert len(rows) <= 1 and whole.startswith(sink.text)
    if answer is None:
        sent = sum(delta.tokens for delta in sink.deltas)
        assert not rows or rows[0].billable_output_tokens >= sent
        assert not rows or bool(sent) == bool(rows[0].billable_input_tokens)
        return
    cut = answer.finish_reason is FinishReason.DEADLINE
    assert answer.output_text == whole or (cut and whole.startswith(answer.output_text))
    if request.stream:
        assert answer.output_text.startswith(sink.text) and (cut or sink.text == whole)
    assert [row.billable_output_tokens for row in rows] == [answer.usage.output_tokens]
    assert answer.usage.output_tokens >= len(answer.output_text)


def check_idle(rig: JourneyRig, limiter: KeyLimiter, pools: list[ServingPool]) -> None:
    """Checks that nothing is held after the last request."""
    assert not [one for one in rig.in_use() if not one.startswith("task ")]
    for backend in [one.serving[0] for one in pools]:
        assert not rig.admission.gate(backend.name).queued and not backend._pool._in_flight
        for worker in backend._workers.values():
            assert not worker.load.in_flight and not worker.client._opening
            assert not any(one.busy for one in worker.client._open)
    rows = rig.outbox.rows
    ended = [one for one in rows if one.output_tokens or one.finish_reason not in ("error", "cancelled")]
    figures = limiter.quotas.take(KEY.key_id, KEY.limits, QuotaRequest()).figures[2]
    assert figures is not None
    assert LIMIT - figures.remaining == sum(one.input_tokens + one.output_tokens for one in ended)


async def run_at_random(build_rig: Build, ask: Ask, loop: Network, random: Random) -> None:
    for port, most in ((1000, 3), (1001, 3), (2000, 1)):
        loop.workers[port] = Worker(random, [6, *(random.choice([0, 0, 1, most]) for _ in ENDS[1:])])
    pools = [pool("main", range(1000, 1002), random, loop), pool("other", range(2000, 2001), random, loop)]
    resume = {"wait_ms": 500, "max_wait_ms": 5000, "commit_chunks": random.choice([0, 3])}
    most, queued = random.choice([1, 8]), random.choice([1, 100])
    rig = build_rig(
        backends=[one.serving[0] for one in pools],
        route={"fallback": random.choice([["other"], []]), "timeout_ms": 30_000, "resume": resume},
        limits=AdmissionLimits(max_input_tokens=4096, max_in_flight=most, max_queue=queued),
        clock=loop.time,
        spelling=BYTES,
    )
    limiter = KeyLimiter(Quotas(clock=loop.time))
    time_limit = partial(TimeLimit, TimeLimits(), random.choice([4.0, 300.0]))
    rig.journey = replace(rig.journey, limiter=limiter, time_limit=time_limit)
    serving = [loop.create_task(one.run()) for one in pools]
    asked, gone = list[tuple[GenerateRequest, Reader, asyncio.Task[None]]](), set[asyncio.Task[None]]()
    for number in range(random.randrange(2, 9)):
        now, name = loop.time(), f"g{number}"
        deadline = random.choice([None, None, now + 0.5, now + 2.0])
        changes = {"caller": KEY, "stream": random.random() < 0.8, "deadline": deadline, "arrived_at": now}
        request = ask(f"say #{number}", request_id=name, generation_id=name, **changes)
        reader = Reader()
        reader.pause_s = partial(random.choice, random.choice([(0.0,), (0.0, 0.1, 1.0)]))
        asked.append((request, reader, loop.create_task(rig.journey.run(request, reader))))
        await asyncio.sleep(random.choice(PAUSES_S))
        if random.random() < 0.2 and (leaving := random.choice(asked)[2]).cancel():
            gone.add(leaving)
        if random.random() < 0.2:
            random.choice([*loop.workers.values()]).kill(loop)
    if random.random() < 0.2:
        rig.in_flight.cut()
    await asyncio.wait([task for _, _, task in asked], timeout=400)
    await asyncio.sleep(6)
    for request, reader, task in asked:
        assert task in gone or (task.done() and task.exception() is None)
        assert task in gone or (reader.answer is None) != (reader.error is None)
        assert reader.error is None or reader.error.code != "internal"
        check_end(rig, request, reader)
    check_idle(rig, limiter, pools)
    for one in serving:
        one.cancel()
    await asyncio.gather(*serving, return_exceptions=True)
    assert not any(worker.generating for worker in loop.workers.values()) and loop.errors == []


@pytest.mark.parametrize("seed", range(25))
def test_whatever_breaks_a_caller_gets_one_end_and_pays_for_what_came_and_nothing_stays_held(
    build_rig: Build, ask: Ask, seed: int
) -> None:
    with asyncio.Runner(loop_factory=Network) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, Network)
        runner.run(run_at_random(build_rig, ask, loop, Random(seed)))
