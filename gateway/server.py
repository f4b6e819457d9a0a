"""The server process: runs a gateway on uvicorn, drains on SIGTERM, exits 0."""

import asyncio
import contextlib
import ctypes
import gc
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import structlog
import uvicorn
import uvloop
from starlette.types import ASGIApp

from gateway.app import create_app
from gateway.config.errors import ConfigError
from gateway.config.settings import Settings
from gateway.http.connections import RESERVE, ConnectionTable
from gateway.http.local_protocol import LocalProtocol, is_loopback, own_hosts
from gateway.http.protocol import GatewayProtocol
from gateway.http.socket_protocol import SocketProtocol
from gateway.http.surfaces import by_port, everything, for_callers, for_operators, without_admin
from gateway.requests.in_flight import InFlightRequests
from gateway.wiring.running import Gateway

FORCE_CLOSE_S = 1  # time until open connections are closed after the end of the drain
# Longer than the 60 s that load balancers keep idle connections, so that they close first.
KEEP_ALIVE_S = 75
BACKLOG = 2048
# Open files besides callers' connections: those to workers and stores, the ledger's files, the engine's.
OTHER_FILES = 2_048
# Time for requests that are cut at the end of the drain to send their error. Their usage rows are written
# first, for which the ledger waits at most a second (`accounting.journal.WAIT_S`).
CUT_TIMEOUT_S = 3.0
# Garbage is collected while no request is in flight: then nobody waits, and there are few young objects, some
# cache entries per request since the last collection. This is checked ten times a second; with fewer than
# GC_WORTH_OBJECTS new container objects, nothing is collected.
GC_WORTH_OBJECTS = 200
# Thresholds of Python's own collector, for a gateway that is never idle. The first one is above the number of
# objects of 64 requests in flight, about 180 each; else a useless collection would run every 15 requests.
# A collection blocks the event loop for 7 ms, about once in 3,000 requests. A full collection, of all objects
# made since the start, only runs if their number has grown by a quarter.
GC_ALLOCATIONS = 20_000
GC_YOUNG_PER_MIDDLE = 5
GC_MIDDLE_PER_FULL = 1_000
# How long a thread that computes keeps the event loop waiting, each time that both want to run. A request
# runs some ten times, so with Python's 5 ms it waits 50 ms while another thread writes a large answer.
SWITCH_INTERVAL_S = 0.0005
# Larger blocks of memory are returned to the system when they are freed. By default, glibc raises this bound,
# up to 32 MB, when it frees a large block, and from then on keeps twice as much.
MAPPED_BYTES = 1 << 20
_M_MMAP_THRESHOLD = -3
_MADV_COLLAPSE = 25
_HUGE_BYTES = 2 << 20

Around = Callable[[], contextlib.AbstractAsyncContextManager[None]]


class DrainingServer(uvicorn.Server):
    """Uvicorn, but the first signal only drains: the port stays open until the last answer is sent."""

    def __init__(self, config: uvicorn.Config, requests: InFlightRequests) -> None:
        super().__init__(config)
        self._requests = requests
        self._stop_asked = asyncio.Event()
        self._cut_asked = asyncio.Event()

    async def on_tick(self, counter: int) -> bool:
        """Do uvicorn's work of every tenth of a second, and collect garbage while it delays nobody."""
        collect_if_idle(self._requests)
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal; cut the requests in flight at the second one; stop at the third one."""
        if self._cut_asked.is_set():
            self.should_exit = True
            self.force_exit = sig == signal.SIGINT
        elif self._stop_asked.is_set():
            self._cut_asked.set()
        else:
            self._requests.drain()
            self._stop_asked.set()

    async def drain(self, seconds: float) -> None:
        """Wait for the first signal, give requests in flight ``seconds`` to end, cut the rest, and stop."""
        await self._stop_asked.wait()
        requests, log = self._requests, structlog.get_logger("gateway")
        log.info("draining", in_flight=requests.in_flight, at_most_s=seconds)
        async with asyncio.TaskGroup() as waits:
            ends = [waits.create_task(requests.drained()), waits.create_task(self._cut_asked.wait())]
            await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            for end in ends:
                end.cancel()
        if requests.in_flight:
            log.warning("cut at the end of the drain", in_flight=requests.in_flight)
            requests.cut()
            # A connection that closes first takes its request's error with it.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CUT_TIMEOUT_S):
                    await requests.drained()
        log.info("stopping", in_flight=requests.in_flight)
        self.should_exit = True


def _app(gateway: Gateway, admin: socket.socket | None) -> ASGIApp:
    """The application; with a separate operators' port, one application per port."""
    if admin is None:
        return create_app(gateway.services).entry
    public = gateway.settings.server.public_metrics
    return by_port(
        create_app(gateway.services, shown=without_admin if public else for_callers).entry,
        create_app(gateway.services, shown=for_operators, described=everything).entry,
        admin_port=admin.getsockname()[1],
    )


def protocol_of(
    settings: Settings,
    listener: socket.socket,
    admin: socket.socket | None,
    max_connections: int,
) -> type[GatewayProtocol]:
    """The protocol with its bounds; without keys, ports on loopback refuse the names of other machines.

    ``max_connections``: the setting, or fewer if the system does not allow so many.
    """
    server = settings.server
    own: dict[str, Any] = {
        "table": ConnectionTable(max_connections, server.max_connections_per_address, server.trusted_proxies),
        "admin_port": None if admin is None else admin.getsockname()[1],
        "cors_origins": frozenset(server.cors_origins),
    }
    addresses = [one.getsockname()[:2] for one in (listener, admin) if one is not None]
    local = frozenset(port for address, port in addresses if is_loopback(address))
    if settings.auth.enabled or not local or "*" in server.cors_origins:
        return type("Protocol", (GatewayProtocol,), own)
    own |= {"local_ports": local, "own_hosts": own_hosts(server.host, server.cors_origins)}
    return type("Protocol", (LocalProtocol,), own)


async def _serve(
    gateway: Gateway,
    listener: socket.socket,
    admin: socket.socket | None,
    around: Around,
    on_started: Callable[[], None],
    signals: Sequence[int],
) -> None:
    max_connections = _raise_file_limit(gateway.settings.server.max_connections)
    protocol = protocol_of(gateway.settings, listener, admin, max_connections)
    config = uvicorn.Config(
        _app(gateway, admin),
        interface="asgi3",
        loop="uvloop",
        http=protocol,
        ws=SocketProtocol,
        lifespan="off",
        # Connections are counted by the peer's address; headers in which a proxy names clients are ignored.
        proxy_headers=False,
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=FORCE_CLOSE_S,
        # Above the gateway's own bound, so that a frame that is too large gets an error, not a bare close.
        ws_max_size=2 * gateway.settings.server.max_body_bytes,
    )
    server = DrainingServer(config, gateway.serving.in_flight)
    if threading.current_thread() is threading.main_thread():
        # Also handles a SIGTERM before uvicorn installs its handlers, or after it removes them.
        signal.signal(signal.SIGTERM, server.handle_exit)
        # By default SIGHUP would end every stream at once; nohup ignores it, which stays so.
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, server.handle_exit)
        for number in signals:
            server.handle_exit(number, None)
    async with around(), gateway.running(), asyncio.TaskGroup() as tasks:
        draining = tasks.create_task(server.drain(gateway.settings.server.drain_seconds), name="drain")
        ending = tasks.create_task(end_connections(protocol, gateway.serving.in_flight), name="connections")
        _tune_garbage_collector()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        _give_large_blocks_back()
        use_huge_pages()
        on_started()
        await server.serve(sockets=[one for one in (listener, admin) if one is not None])
        draining.cancel()
        ending.cancel()


async def end_connections(protocol: type[GatewayProtocol], requests: InFlightRequests) -> None:
    """From the beginning of the drain on, answer with ``connection: close``.

    Callers who keep their connection would send each retry to this gateway, not to another one.
    """
    await requests.until_draining()
    protocol.table.ending = True


def collect_if_idle(requests: InFlightRequests) -> None:
    """Collect garbage if no request is in flight."""
    if not requests.in_flight and gc.get_count()[0] >= GC_WORTH_OBJECTS:
        gc.collect(1)


def _give_large_blocks_back() -> None:
    tune = getattr(ctypes.CDLL(None), "mallopt", None)  # only glibc has it
    if tune is not None:
        tune(_M_MMAP_THRESHOLD, MAPPED_BYTES)


def use_huge_pages(maps: Path = Path("/proc/self/maps")) -> None:
    """Move the memory allocated at the start into pages of 2 MiB, if the kernel can: Linux from 6.1 on.

    A request accesses so many small pages of it that their address translation took an eighth of its CPU time
    in a virtual machine (docs/performance.md). The move takes 0.1 s and no additional memory.
    """
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if advise is None or not maps.exists():
        return
    for line in maps.read_text().splitlines():
        span, access, _, _, inode, *name = line.split(maxsplit=5)
        if not access.startswith("rw") or inode != "0" or name not in ([], ["[heap]"]):
            continue  # code, files and stacks
        start, end = (int(number, 16) for number in span.split("-"))
        start, end = -(-start // _HUGE_BYTES) * _HUGE_BYTES, end // _HUGE_BYTES * _HUGE_BYTES
        if start < end:  # an error is ignored: memory that cannot be moved stays as it is
            advise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_COLLAPSE)


def _raise_file_limit(connections: int) -> int:
    """Raise the limit of open files to what the connections need; a shell's usual limit is 1,024.

    Returns how many callers' connections the limit allows.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + RESERVE + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return connections
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    bound = connections_within(allowed, connections)
    if allowed < needed:
        structlog.get_logger("gateway").warning(
            "fewer open files are allowed than server.max_connections needs",
            allowed=allowed,
            needed=needed,
            max_connections=bound,
        )
    return bound


def connections_within(files: int, connections: int) -> int:
    """How many of ``connections`` callers may have when so many ``files`` may be open.

    The others are left for workers and stores, at least half where there are few: callers that take all of
    them would make each request fail.
    """
    free = files - RESERVE
    return min(connections, max(1, free // 2, free - OTHER_FILES))


def _tune_garbage_collector() -> None:
    """Exclude the objects made at the start from garbage collection, and collect less often.

    A request creates hundreds of objects and hardly a cycle; Python by default collects after every 700.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_ALLOCATIONS, GC_YOUNG_PER_MIDDLE, GC_MIDDLE_PER_FULL)


def listen(host: str, port: int, *, keys: str = "server.host, server.port") -> socket.socket:
    """Bind the port before anything is loaded, so that a port in use is reported at once.

    Raises ConfigError: the address cannot be bound; ``keys`` are the settings that the message names.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"{keys}: {host}:{port}: {error.strerror or error}") from None
    listener.listen(BACKLOG)
    return listener


def run(
    gateway: Gateway,
    listener: socket.socket,
    admin: socket.socket | None = None,
    *,
    around: Around = contextlib.nullcontext,
    on_started: Callable[[], None] = lambda: None,
) -> None:
    """Serve until a signal, then drain.

    Args:
        admin: the socket of the operators' port, if that is separate.
        around: a context that is entered before the start and left after the drain.
        on_started: called when the configuration is in force, before the first request is answered.

    Raises BaseExceptionGroup: something that must not fail has failed; it contains an EngineStartError if the
    engine could not start.
    """
    signals: list[int] = []
    if threading.current_thread() is threading.main_thread():
        # The start's handler raises an exception, which would now be raised inside the beginning event loop.
        signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(gateway, listener, admin, around, on_started, signals))
