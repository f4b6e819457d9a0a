"""CPU cost of a worker's streamed answer with three HTTP clients, including parsing its chunks.

    python -m benchmarks.worker_client
    python -m benchmarks.worker_client --requests 500 --json

A worker process answers every request with the same 140 tokens: one chunk each, all at once ("burst"); one
chunk and one write each ("steps", as engines do); or, after the first, one chunk for 16 of them ("larger",
which vLLM is asked for when the caller does not stream). The figures are CPU time of the client's process, so
a busy machine affects them less than wall time; rounds alternate and the best one counts.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Annotated

import typer
import uvloop
from rich.console import Console
from rich.table import Table

from budgeting.values import Message, Role
from gateway.backends.port import Work
from gateway.backends.workers.answer import CompletionReader
from gateway.backends.workers.client import WorkerClient
from gateway.backends.workers.dialect import CompletionWriter, Dialect
from gateway.config.backends import OpenAIBackend
from gateway.contracts.values import Sampling

TOKENS = 140
STREAMS = 64
STEP_S = 0.005
INTERVAL = 16
ROUNDS = 3
PROMPT = "volume chapter shipping dragon " * 260
Ask = Callable[[Work, bytes], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class Cost:
    """The figures of one client: CPU microseconds per answer and per token, tokens per second of a core."""

    client: str
    worker: str
    us_per_answer: float
    us_per_token: float
    tokens_per_core_s: float


def serve(port: multiprocessing.queues.Queue[int]) -> None:
    """Run the worker's process."""
    uvloop.run(_serve(port))


async def _serve(port: multiprocessing.queues.Queue[int]) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    base = {"id": "chatcmpl-0", "object": "chat.completion.chunk", "created": 1, "model": "base"}

    def event(body: object) -> bytes:
        data = b"data: " + (body if isinstance(body, bytes) else json.dumps(body).encode()) + b"\n\n"
        return b"%x\r\n%b\r\n" % (len(data), data)

    def text(words: range) -> bytes:
        content = "".join(f" word{number}" for number in words)
        return event(
            {**base, "choices": [{"index": 0, "delta": {"content": content}, "finish_reason": None}]}
        )

    tokens = [text(range(number, number + 1)) for number in range(TOKENS)]
    larger = [tokens[0], *[text(range(n, min(n + INTERVAL, TOKENS))) for n in range(1, TOKENS, INTERVAL)]]
    end = event({**base, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    end += event({**base, "choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": TOKENS}})
    end += event(b"[DONE]") + b"0\r\n\r\n"
    burst = head + b"".join(tokens) + end

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                first = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(first.split(b"content-length:")[1].split(b"\r\n")[0])
                await reader.readexactly(length)
                if b"/burst/" in first:
                    writer.write(burst)
                    continue
                writer.write(head)
                for piece in larger if b"/larger/" in first else tokens:
                    await asyncio.sleep(STEP_S)
                    writer.write(piece)
                writer.write(end)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port.put(server.sockets[0].getsockname()[1])
    await server.serve_forever()


async def ours(base: str, stack: AsyncExitStack) -> Ask:
    """Return a request function of Sluice's own client."""
    section = OpenAIBackend(kind="openai", base_urls=[base])
    client = WorkerClient(base, section, max_connections=STREAMS, connect_s=2)
    stack.callback(client.close)

    async def ask(work: Work, body: bytes) -> str:
        reader, text = CompletionReader(work, lambda token: b""), []
        connection = await client.post("/chat/completions", body)
        try:
            while data := await connection.read():
                text += [delta.text for delta in reader.feed(data)]
                if reader.done:
                    connection.linger()
                    break
        finally:
            connection.release()
        return "".join(text)

    return ask


async def with_aiohttp(base: str, stack: AsyncExitStack) -> Ask:
    """Return a request function of aiohttp with its fastest way to read: whatever has arrived."""
    import aiohttp

    connector = aiohttp.TCPConnector(limit=STREAMS)
    session = await stack.enter_async_context(
        aiohttp.ClientSession(connector=connector, headers={"content-type": "application/json"})
    )

    async def ask(work: Work, body: bytes) -> str:
        reader, text = CompletionReader(work, lambda token: b""), []
        async with session.post(f"{base}/chat/completions", data=body) as response:
            async for data in response.content.iter_any():
                text += [delta.text for delta in reader.feed(data)]
        return "".join(text)

    return ask


async def with_httpx(base: str, stack: AsyncExitStack) -> Ask:
    """Return a request function of httpx."""
    import httpx

    limits = httpx.Limits(max_connections=STREAMS)
    client = await stack.enter_async_context(
        httpx.AsyncClient(limits=limits, headers={"content-type": "application/json"}, timeout=60)
    )

    async def ask(work: Work, body: bytes) -> str:
        reader, text = CompletionReader(work, lambda token: b""), []
        async with client.stream("POST", f"{base}/chat/completions", content=body) as response:
            async for data in response.aiter_raw():
                text += [delta.text for delta in reader.feed(data)]
        return "".join(text)

    return ask


CLIENTS = {"ours": ours, "aiohttp": with_aiohttp, "httpx": with_httpx}


async def measure(client: str, base: str, requests: int) -> float:
    """CPU seconds of one answer."""
    work = Work("gen", (1, 2, 3), (Message(Role.USER, PROMPT),), Sampling(max_tokens=TOKENS))
    expected = "".join(f" word{number}" for number in range(TOKENS))
    section = OpenAIBackend(kind="openai", base_urls=[base])
    body = CompletionWriter("base", section, Dialect.VLLM, token_ids=False).write(work).body
    assert isinstance(body, bytes)
    left = requests

    async with AsyncExitStack() as stack:
        ask = await CLIENTS[client](base, stack)

        async def caller() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                if await ask(work, body) != expected:
                    raise RuntimeError(f"{client} lost a part of an answer")

        await ask(work, body)
        began = time.process_time()
        async with asyncio.TaskGroup() as group:
            for _ in range(STREAMS):
                group.create_task(caller())
        return (time.process_time() - began) / requests


def main(
    requests: Annotated[int, typer.Option(help="answers of each client and round")] = 400,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Measure every client with every kind of worker."""
    ports: multiprocessing.queues.Queue[int] = multiprocessing.get_context("spawn").Queue()
    worker = multiprocessing.get_context("spawn").Process(target=serve, args=(ports,), daemon=True)
    worker.start()
    try:
        root = f"http://127.0.0.1:{ports.get(timeout=60)}"
        best: dict[tuple[str, str], float] = {}
        for _ in range(ROUNDS):
            for kind in ("burst", "steps", "larger"):
                for client in CLIENTS:
                    cost = uvloop.run(measure(client, f"{root}/{kind}/v1", requests))
                    best[kind, client] = min(cost, best.get((kind, client), cost))
    finally:
        worker.terminate()
        worker.join()
    costs = [
        Cost(client, kind, 1e6 * cost, 1e6 * cost / TOKENS, TOKENS / cost)
        for (kind, client), cost in best.items()
    ]
    if as_json:
        print(json.dumps([{name: getattr(one, name) for name in Cost.__slots__} for one in costs]))
        return
    table = Table(title=f"{requests} answers of {TOKENS} tokens, {STREAMS} at a time, best of {ROUNDS}")
    for heading in ("worker", "client", "CPU µs an answer", "a token", "tokens a core-second"):
        table.add_column(heading, justify="left" if heading in ("worker", "client") else "right")
    for one in costs:
        table.add_row(
            one.worker,
            one.client,
            f"{one.us_per_answer:,.0f}",
            f"{one.us_per_token:.1f}",
            f"{one.tokens_per_core_s:,.0f}",
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    typer.run(main)
