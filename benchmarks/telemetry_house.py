"""Gateways for ``benchmarks.telemetry``: one with all telemetry, one without any; and a collector."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import uvloop

from accounting.account import Accounts
from accounting.values import UsageRow
from benchmarks.hot_path import KEY, NullBackend
from gateway import server
from gateway.backends.port import Backend, Fleet
from gateway.config.settings import load_settings
from gateway.journey import Journey
from gateway.wiring import foundation
from gateway.wiring.backends import Engines
from gateway.wiring.build import build
from gateway.wiring.running import Gateway
from observability.logs import configure_logging
from observability.subscribers import EventDispatcher


class SilentHub(EventDispatcher):
    """Drops every event."""

    def emit(self, event: object) -> None:
        """Drop the event: no metric and no log line."""


class NoLedger:
    """Drops every row."""

    accepts = True

    def append(self, row: UsageRow) -> bool:
        """Accept a row."""
        return True

    async def durable(self) -> bool:
        """Return at once."""
        return True


def gateway_of(pieces: int | None, folder: Path, collector: str | None, sample_ratio: float) -> Gateway:
    """Build ``sluice.yaml``'s gateway with a backend that answers at once; without ``pieces``, its engine.

    With a collector it traces, counts, logs and writes the ledger; without one it does none of these.
    """
    environment = {
        "SLUICE_STATE__URL": f"sqlite:///{folder}/s.db",
        "SLUICE_LEDGER__URL": f"sqlite+aiosqlite:///{folder}/l.db",
        "SLUICE_TRACING__SAMPLE_RATIO": str(sample_ratio),
    }
    if collector is not None:
        environment["SLUICE_TRACING__OTLP_ENDPOINT"] = collector
    else:
        vars(foundation)["EventDispatcher"] = SilentHub
    whole = build(load_settings(Path("sluice.yaml"), environment), admin_key=KEY)
    journey = whole.services.journey
    assert isinstance(journey, Journey)
    if collector is None:
        journey = replace(journey, accounts=Accounts(NoLedger()))
    if pieces is None:
        return replace(whole, services=replace(whole.services, journey=journey))
    backends: dict[str, Backend] = {"local": NullBackend(pieces)}
    fleet = Fleet(backends)
    journey = replace(journey, fleet=fleet)
    return replace(
        whole,
        core=replace(
            whole.core,
            backends=replace(whole.core.backends, engines=Engines((), {}, {}, {}), fleet=fleet),
        ),
        services=replace(whole.services, journey=journey),
    )


def serve(
    pieces: int | None, cores: set[int], collector: str | None, sample_ratio: float, port: Connection
) -> None:
    """Run a gateway's process; it ends on SIGTERM."""
    os.sched_setaffinity(0, cores)
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w") as lines:
        logs = configure_logging("critical" if collector is None else "info", json=True, stream=lines)
        gateway = gateway_of(pieces, Path(folder), collector, sample_ratio)
        listener = server.listen("127.0.0.1", 0)
        port.send(listener.getsockname()[1])
        server.run(gateway, listener)
        logs.close()


async def _collect(port: Connection) -> None:
    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                await reader.readexactly(length)
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    listener = await asyncio.start_server(one, "127.0.0.1", 0, limit=1 << 24)
    port.send(listener.sockets[0].getsockname()[1])
    await listener.serve_forever()


def collect(cores: set[int], port: Connection) -> None:
    """Run a collector's process, which discards all batches."""
    os.sched_setaffinity(0, cores)
    uvloop.run(_collect(port))


@contextmanager
def running(target: object, *args: object) -> Iterator[tuple[int, int]]:
    """Start a process that reports its port; yield the port and the process id."""
    context = get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=target, args=(*args, theirs), daemon=True)  # type: ignore[arg-type]
    process.start()
    try:
        port = mine.recv()
        assert process.pid is not None
        yield port, process.pid
    finally:
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, signal.SIGTERM)
            process.join(20)
            process.kill()
