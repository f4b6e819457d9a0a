"""What a generation costs at the HTTP edge as a plain ASGI app, and as a FastAPI route.

    python -m benchmarks.raw_asgi

The same journey, which only emits pieces of text, is called through both in turn: ``/v1/generate`` as it is,
and a route as FastAPI users write it, with the key, the bounds and the models of the operators' routes; a
whole answer is a model, a stream is a ``StreamingResponse`` over a queue. There is no socket and no server.
The figures are the CPU time of this process per request: the median of the rounds, with the quartiles.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, MutableMapping
from typing import Annotated, Any

import orjson
import typer
from fastapi import APIRouter, Request
from rich.console import Console
from rich.table import Table
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp

from budgeting.values import Plan
from gateway.app import create_app
from gateway.contracts.answer import Answer
from gateway.contracts.events import Delta
from gateway.contracts.native import NativeRequest, to_request
from gateway.contracts.native_answer import AnswerBody, NativeFrames, answer_json
from gateway.errors import PublicError
from gateway.http.exchange import SCOPE_KEY, ClientDisconnect, Exchange
from gateway.http.generate import origin_of, run_journey
from gateway.http.routes import CallerRoute, Json, ServicesDep
from gateway.http.sinks import WholeSink
from gateway.ports import Services
from gateway.testing import CALLER_KEY, FakeJourney, fake_services

RAW, ROUTED = "/v1/generate", "/fastapi/generate"
BODY = {"messages": [{"role": "user", "content": "Who wrote Berserk, and what else is there of the author?"}]}

router = APIRouter(route_class=CallerRoute)


class QueueSink:
    """Passes the journey's events to a generator."""

    discarded = False

    def __init__(self) -> None:
        self.queue: asyncio.Queue[bytes | None] = asyncio.Queue(16)
        self.ended = False
        self._frames = NativeFrames()

    def planned(self, plan: Plan, model: str) -> None:
        """Send nothing."""

    async def delta(self, delta: Delta) -> None:
        """Queue one event."""
        await self.queue.put(self._frames.delta(delta))

    async def finish(self, answer: Answer) -> None:
        """Queue the last event."""
        self.ended = True
        await self.queue.put(self._frames.finish(answer))
        await self.queue.put(None)

    async def fail(self, error: PublicError) -> None:
        """Raise: no request fails in this benchmark."""
        raise AssertionError(error)


@router.post(ROUTED, response_model=AnswerBody)
async def generate(given: Json[NativeRequest], request: Request, services: ServicesDep) -> Any:
    """Serve a generation as a FastAPI route."""
    asked = to_request(given, origin_of(Exchange.of(request.scope)))
    if asked.stream:

        async def events() -> AsyncIterator[bytes]:
            sink = QueueSink()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(run_journey(services, asked, sink))
                while (event := await sink.queue.get()) is not None:
                    yield event

        return StreamingResponse(events(), media_type="text/event-stream")
    sink = WholeSink()
    await run_journey(services, asked, sink)
    assert isinstance(sink.end, Answer)
    return orjson.loads(answer_json(sink.end))


async def ask(app: ASGIApp, path: str, body: bytes) -> int:
    """Send one request; return how many bytes came back."""
    scope: dict[str, Any] = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": path,
        "raw_path": path.encode(), "query_string": b"", "root_path": "", "scheme": "http",
        "server": ("gateway", 80), "client": ("127.0.0.1", 1),
        "headers": [
            (b"authorization", f"Bearer {CALLER_KEY}".encode()), (b"content-type", b"application/json"),
        ],
        SCOPE_KEY: ClientDisconnect(),
    }  # fmt: skip
    waiting = [{"type": "http.request", "body": body, "more_body": False}]
    size, ended = 0, asyncio.Event()

    async def receive() -> MutableMapping[str, Any]:
        if waiting:
            return waiting.pop()
        await ended.wait()
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal size
        if message["type"] == "http.response.start":
            assert message["status"] == 200, message
        size += len(message.get("body", b""))

    await app(scope, receive, send)
    ended.set()
    return size


async def measure(services: Services, body: bytes, rounds: int, requests: int) -> dict[str, list[float]]:
    """Return the CPU microseconds per request of each round, by path."""
    app = create_app(services)
    app.router.routes.extend(router.routes)
    sizes = {path: await ask(app, path, body) for path in (RAW, ROUTED)}
    assert min(sizes.values()) > 200, sizes
    found: dict[str, list[float]] = {RAW: [], ROUTED: []}
    for number in range(rounds):
        for path in (RAW, ROUTED) if number % 2 else (ROUTED, RAW):
            begun = time.process_time()
            for _ in range(requests):
                await ask(app, path, body)
            found[path].append((time.process_time() - begun) / requests * 1e6)
    return found


def main(
    rounds: Annotated[int, typer.Option(help="Rounds of each kind.")] = 20,
    requests: Annotated[int, typer.Option(help="Requests of a round.")] = 200,
    pieces: Annotated[int, typer.Option(help="Pieces of a stream.")] = 64,
) -> None:
    """Measure and print."""
    table = Table("asked for", "plain ASGI µs", "FastAPI route µs", "times", title="CPU a request")
    for name, stream, count in (("a whole answer", False, 3), (f"a stream of {pieces} pieces", True, pieces)):
        services = fake_services(FakeJourney(pieces=("word ",) * count))
        body = orjson.dumps({**BODY, "stream": stream})
        found = asyncio.run(measure(services, body, rounds, requests))
        raw, routed = found[RAW], found[ROUTED]
        times = statistics.median(routed) / statistics.median(raw)
        table.add_row(name, _shown(raw), _shown(routed), f"{times:.2f}")
    Console().print(table)


def _shown(found: list[float]) -> str:
    low, middle, high = statistics.quantiles(found, n=4)
    return f"{middle:.0f} ({low:.0f} to {high:.0f})"


if __name__ == "__main__":
    typer.run(main)
