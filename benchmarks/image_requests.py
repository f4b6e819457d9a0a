"""What requests with a large image cost the gateway: memory, and how long other requests get no answer.

    python -m benchmarks.image_requests
    python -m benchmarks.image_requests --bytes 3000000 --requests 40

One gateway without an engine has one fake worker. ``/ping`` is requested every 20 ms, first alone, then while
chats with an image of ``--bytes`` bytes are sent one after the other, with the image in the body (``data:``)
and as an address that the gateway fetches.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from base64 import b64encode
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import psutil
import typer
import uvloop
from aiohttp import web
from rich.console import Console
from rich.table import Table

from benchmarks.routing_propagation import KEY, ROUTE, one_gateway, ready, write_settings
from benchmarks.tokenize_flood import TIMEOUT_S, Phase, probe

SAMPLE_EVERY_S = 0.002
ALONE_S = 3.0
MIB = 1 << 20


def image(size: int) -> bytes:
    """Return a PNG of ``size`` bytes whose header says 1,000 by 1,000 pixels."""
    header = bytes.fromhex("89504e470d0a1a0a0000000d49484452000003e8000003e80802000000c2c1435a")
    return header + b"\0\0\0\0IDAT" + os.urandom(size - len(header) - 8)


ANSWER = (
    {"choices": [{"index": 0, "delta": {"content": "A cat."}, "finish_reason": None}]},
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
    {"choices": [], "usage": {"prompt_tokens": 1_300, "completion_tokens": 3}},
)


async def answered(request: web.Request) -> web.StreamResponse:
    """Return the worker's answer, once it has read the whole body."""
    async for _ in request.content.iter_any():
        pass
    events = [*map(json.dumps, ANSWER), "[DONE]"]
    text = "".join([f"data: {one}\n\n" for one in events])
    return web.Response(text=text, content_type="text/event-stream")


async def sample(pid: int, phase: Phase) -> None:
    """Record the gateway's memory, until cancelled."""
    process = psutil.Process(pid)
    while True:
        phase.memory.append(process.memory_info().rss)
        await asyncio.sleep(SAMPLE_EVERY_S)


async def watched(client: aiohttp.ClientSession, url: str, pid: int, image_url: str, requests: int) -> Phase:
    """Run one phase; without requests the gateway is idle."""
    phase = Phase()
    body = {
        "model": "a",
        "sluice": {"route": ROUTE},
        "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": image_url}}]}],
    }
    data = json.dumps(body).encode()
    async with asyncio.TaskGroup() as group:
        watching = [group.create_task(probe(client, url, phase)), group.create_task(sample(pid, phase))]
        if not requests:
            await asyncio.sleep(ALONE_S)
        for _ in range(requests):
            headers = {"content-type": "application/json"}
            async with client.post(f"{url}/v1/chat/completions", data=data, headers=headers) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()
        for task in watching:
            task.cancel()
    return phase


def always(**answer: Any) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Return a handler whose answers are all the same."""

    async def handle(request: web.Request) -> web.Response:
        return web.Response(**answer)

    return handle


async def measure(folder: Path, size: int, requests: int) -> list[tuple[str, Phase]]:
    """Return the phases with their names."""
    given = image(size)
    app = web.Application()
    app.router.add_get("/a.png", always(body=given, content_type="image/png"))
    app.router.add_get("/health", always())
    app.router.add_get("/v1/models", always(text='{"data": [{"id": "a"}]}', content_type="application/json"))
    app.router.add_post("/v1/chat/completions", answered)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    address = f"http://127.0.0.1:{port}/a.png"
    write_settings(folder, f"sqlite:///{folder}/state.db", port)
    settings = json.loads((folder / "sluice.yaml").read_text())
    settings["models"] = {"a": {"images": {}}}
    settings["server"] = {"max_body_bytes": 2 * size + MIB}
    settings["images"] = {"max_bytes": size, "fetch_networks": ["127.0.0.1/32"]}
    (folder / "sluice.yaml").write_text(json.dumps(settings))
    phases = []
    headers = {"authorization": f"Bearer {KEY}"}
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    with one_gateway(folder, 0) as url:
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as client:
            await ready(client, url)
            children = psutil.Process().children(recursive=True)
            [pid] = [one.pid for one in children if "ops.cli" in " ".join(one.cmdline())]
            inside = f"data:image/png;base64,{b64encode(given).decode()}"
            for name, image_url, count in [
                ("alone", "", 0),
                ("in the body", inside, requests),
                ("fetched", address, requests),
            ]:
                phases.append((name, await watched(client, url, pid, image_url, count)))
    await runner.cleanup()
    return phases


def main(
    bytes: Annotated[int, typer.Option(min=1_000, help="Bytes of an image.")] = 20_000_000,
    requests: Annotated[int, typer.Option(min=1, help="Of each kind.")] = 10,
) -> None:
    """Measure, and print the figures."""
    with (
        tempfile.TemporaryDirectory() as temporary,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        phases = runner.run(measure(Path(temporary), bytes, requests))
    before = phases[0][1].memory[-1]
    table = Table(title=f"{requests} images of {bytes:,} bytes")
    for column in ("images", "memory above alone, MiB", "times the image", "longest /ping, ms"):
        table.add_column(column, justify="right")
    for name, phase in phases:
        more = max(phase.memory) - before
        table.add_row(name, f"{more / MIB:,.0f}", f"{more / bytes:.1f}", f"{max(phase.probed_s) * 1e3:,.0f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
