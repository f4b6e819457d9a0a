"""A TCP forwarder that counts, slows down and cuts: the network between a fetcher and its server."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

CHUNK = 64 << 10


@dataclass
class Proxy:
    """Forwards ``url`` to the server; the attributes may be changed while it runs."""

    target: tuple[str, int]
    rate: float | None = None  # bytes a second downstream, all connections together
    cut_every: int | None = None  # cuts a connection after this many bytes downstream
    hold_at: int | None = None  # forwards nothing after this many bytes downstream
    dead: bool = False  # accepts connections and closes them
    corrupt: bool = False  # flips a bit in large answers
    received: int = 0
    ranges: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._pairs: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        self._closed.set()
        # Closing a listener does not wake its accept() on every system; a connection does.
        with contextlib.suppress(OSError):
            socket.create_connection(self._listener.getsockname(), timeout=30).close()
        self._listener.close()
        for one in self._pairs:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            client, _ = self._listener.accept()
            if self.dead or self._closed.is_set():
                client.close()
                continue
            server = socket.create_connection(self.target)
            self._pairs += [client, server]
            threading.Thread(target=self._up, args=(client, server), daemon=True).start()
            threading.Thread(target=self._down, args=(client, server), daemon=True).start()

    def _up(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(CHUNK):
                for start, end in re.findall(rb"[Rr]ange: bytes=(\d+)-(\d+)", data):
                    with self._lock:
                        self.ranges.append((int(start), int(end) + 1))
                server.sendall(data)
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)

    def _down(self, client: socket.socket, server: socket.socket) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := server.recv(CHUNK):
                with self._lock:
                    self.received += len(data)
                    if self.rate:
                        time.sleep(len(data) / self.rate)
                while self.hold_at and self.received >= self.hold_at and not self._closed.is_set():
                    time.sleep(0.01)
                passed += len(data)
                if self.corrupt and passed > 2 * CHUNK:
                    data = data[:-1] + bytes([data[-1] ^ 1])
                client.sendall(data)
                if self.dead or (self.cut_every and passed >= self.cut_every):
                    break
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def proxy(url: str) -> Iterator[Proxy]:
    """Run a forwarder to the server at ``url``."""
    host, port = url.removeprefix("http://").split(":")
    forwarder = Proxy((host, int(port)))
    try:
        yield forwarder
    finally:
        forwarder.close()
