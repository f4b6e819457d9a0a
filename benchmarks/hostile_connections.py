"""How hostile connections affect another caller: ``python -m benchmarks.hostile_connections``.

A gateway with the defaults runs in front of a fake worker. A caller requests short answers on a keep-alive
connection, and a prober requests ``/ping`` on a new one each time; first alone, then during each attack.
Printed are the caller's p99 alone and during the attack, the slowest ``/ping``, how many of both failed, and
the memory that the gateway used in addition. On a busy machine only the ratios count.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import resource
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.forwarding.gateways import KEY, python_module
from benchmarks.forwarding.processes import ask, free_port, started, wait_until_ready
from benchmarks.routing_propagation import ROUTE, worker, write_settings

HOST: Final = "127.0.0.1"
IDLE: Final = 4_000
UPGRADES: Final = 4_100
BODIES: Final = 60
BODY_BYTES: Final = 4_000_000
PIPELINED: Final = 40
SLOW_READERS: Final = 200
SLOW_WRITERS: Final = 500
FILES: Final = 16_384
GIVE_UP_S: Final = 10.0
BODY: Final = json.dumps({"route": ROUTE, "messages": [{"role": "user", "content": "hi"}]}).encode()
OTHER_TENANT: Final = "another"

Writers = list[asyncio.StreamWriter]
Attack = Callable[[int, str], Awaitable[Writers]]


def head(length: int, key: str, more: str = "") -> bytes:
    """The headers of a generation."""
    lines = f"POST /v1/generate HTTP/1.1\r\nhost: gw\r\nauthorization: Bearer {key}\r\n{more}"
    return f"{lines}content-length: {length}\r\n\r\n".encode()


async def opened(port: int, number: int, sent: bytes) -> Writers:
    """Open ``number`` connections and write ``sent`` to each; answers are not read."""
    writers: Writers = []
    for _ in range(number):
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(GIVE_UP_S):
                _, writer = await asyncio.open_connection(HOST, port, limit=1)
                writers.append(writer)
                writer.write(sent)
    return writers


async def nothing(port: int, key: str) -> Writers:
    """Open no connections: the baseline."""
    return []


async def idle(port: int, key: str) -> Writers:
    """Open connections that send nothing."""
    return await opened(port, IDLE, b"")


async def upgrades(port: int, key: str) -> Writers:
    """Send upgrade requests with a body."""
    line = b"GET /v1/generate/ws HTTP/1.1\r\nhost: gw\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    return await opened(port, UPGRADES, line + b"content-length: 1\r\n\r\na")


async def bodies(port: int, key: str) -> Writers:
    """Send large bodies without their last byte."""
    writers = await opened(port, BODIES, head(BODY_BYTES + 1, key))
    for writer in writers:
        writer.write(b" " * BODY_BYTES)
    return writers


async def slow_writers(port: int, key: str) -> Writers:
    """Send incomplete headers, which never end."""
    return await opened(port, SLOW_WRITERS, b"POST /v1/generate HTTP/1.1\r\nx: ")


async def slow_readers(port: int, key: str) -> Writers:
    """Request many large answers on each connection, and read none."""
    return await opened(port, SLOW_READERS, b"GET /openapi.json HTTP/1.1\r\nhost: gw\r\n\r\n" * 8)


async def pipelined(port: int, key: str) -> Writers:
    """Send thousands of requests in one packet on each connection."""
    return await opened(port, PIPELINED, b"GET /x HTTP/1.1\r\nhost: gw\r\n\r\n" * 8_000)


ATTACKS: Final[dict[str, Attack]] = {
    "nothing": nothing,
    "4,000 idle connections": idle,
    "4,100 upgrades with a body": upgrades,
    "60 unfinished bodies of 4 MB": bodies,
    "500 slow writers": slow_writers,
    "200 slow readers": slow_readers,
    "40 × 8,000 pipelined requests": pipelined,
}


@dataclass(slots=True)
class RequestTimes:
    """Times of one kind of request, in milliseconds, and how many requests failed."""

    times_ms: list[float] = field(default_factory=list)
    failed: int = 0

    def p99(self) -> float:
        """Return the p99 of the requests that were answered with 200."""
        ordered = sorted(self.times_ms)
        return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] if ordered else float("nan")


async def asked(noticed: RequestTimes, port: int, sent: bytes, *, keep: bool, until: float) -> None:
    """Send one request after the other until ``until``, on one connection or on a new one each time."""
    connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
    while time.monotonic() < until:
        begun = time.monotonic()
        try:
            async with asyncio.timeout(GIVE_UP_S):
                connection = connection or await asyncio.open_connection(HOST, port)
                reader, writer = connection
                writer.write(sent)
                answer = await reader.readuntil(b"\r\n\r\n")
                length = int(answer.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
                await reader.readexactly(length)
                if answer.startswith(b"HTTP/1.1 200"):
                    noticed.times_ms.append(1_000 * (time.monotonic() - begun))
                else:
                    noticed.failed += 1
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            noticed.failed += 1
            connection = None
        if connection is not None and not keep:
            connection[1].close()
            connection = None
        await asyncio.sleep(0.01)


def resident_mib(pid: int) -> float:
    """Return the resident memory of one process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


@dataclass(frozen=True, slots=True)
class Row:
    """The effect of one attack."""

    caller: RequestTimes
    ping: RequestTimes
    memory_mib: float


def attacking(attack: Attack, port: int, key: str, seconds: float) -> None:
    """Run the attack in a process of its own, so that its sending does not slow down the measurement."""

    async def attacked() -> None:
        writers = await attack(port, key)
        await asyncio.sleep(seconds)
        for writer in writers:
            writer.transport.abort()

    asyncio.run(attacked())


async def measured(port: int, pid: int, key: str, seconds: float) -> Row:
    """Measure the caller, the prober and the gateway's memory."""
    caller, ping = RequestTimes(), RequestTimes()
    before = resident_mib(pid)
    most = [before]

    async def watch(until: float) -> None:
        while time.monotonic() < until:
            most.append(resident_mib(pid))
            await asyncio.sleep(0.05)

    async with asyncio.TaskGroup() as group:
        until = time.monotonic() + seconds
        group.create_task(watch(until))
        generation = head(len(BODY), key) + BODY
        group.create_task(asked(caller, port, generation, keep=True, until=until))
        probe = b"GET /ping HTTP/1.1\r\nhost: gw\r\nconnection: close\r\n\r\n"
        group.create_task(asked(ping, port, probe, keep=False, until=until))
    return Row(caller, ping, max(most) - before)


def made_key(port: int) -> str:
    """A key of another tenant, for the attacker."""
    status, body = ask(port, "POST", "/admin/keys", {"tenant": OTHER_TENANT})
    if status >= 300:
        raise RuntimeError(f"POST /admin/keys: {status} {body!r}")
    key: str = json.loads(body)["key"]
    return key


def row_of(name: str, alone_ms: float) -> Callable[[Row], tuple[str, ...]]:
    """Return a function that formats the cells of a row."""

    def cells(row: Row) -> tuple[str, ...]:
        p99 = row.caller.p99()
        pings = row.ping.times_ms
        return (
            name,
            f"{p99:.1f}",
            f"{p99 / alone_ms:.1f} ×",
            f"{row.caller.failed} of {row.caller.failed + len(row.caller.times_ms)}",
            f"{max(pings):.0f}" if pings else "none answered",
            f"{row.ping.failed} of {row.ping.failed + len(pings)}",
            f"{row.memory_mib:.0f}",
        )

    return cells


def main(
    seconds: Annotated[float, typer.Option(help="Of each attack.", min=1)] = 8.0,
    only: Annotated[str, typer.Option(help="Attacks whose name contains this.")] = "",
) -> None:
    """Attack a gateway and print the effect on another caller."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(FILES, hard), hard))
    table = Table(
        "attack", "caller's p99 ms", "to alone", "failed", "slowest /ping ms", "failed", "memory MiB"
    )
    alone_ms = 0.0
    for name, attack in ATTACKS.items():
        if attack is not nothing and only not in name:
            continue
        # A gateway for each attack: connections of the previous attack may still have their timers.
        with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
            folder, port = Path(temporary), free_port()
            write_settings(folder, f"sqlite:///{folder}/state.db", stack.enter_context(worker(folder)))
            env = {
                "SLUICE_ADMIN_KEY": KEY,
                "SLUICE_SERVER__PORT": str(port),
                "SLUICE_LEDGER__URL": f"sqlite+aiosqlite:///{folder}/ledger.db",
            }
            command = python_module("ops.cli", "serve", "--config", folder / "sluice.yaml")
            log = folder / "gateway.log"
            process = stack.enter_context(started(command, log, env))
            wait_until_ready(process, port, "/ready", log)
            arguments = (attack, port, made_key(port), seconds)
            attacker = multiprocessing.get_context("fork").Process(target=attacking, args=arguments)
            attacker.start()
            row = asyncio.run(measured(port, process.pid, KEY, seconds))
            attacker.kill()
            attacker.join()
            if attack is nothing:
                alone_ms = row.caller.p99()
            table.add_row(*row_of(name, alone_ms)(row))
    Console(width=140).print(table)
    Console().print(f"{os.cpu_count()} cores; {seconds:g} s an attack")


if __name__ == "__main__":
    typer.run(main)
