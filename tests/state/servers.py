"""A real Redis on a free port, which a test can kill and start again."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

START_TIMEOUT_S = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class RedisServer:
    """One server; its data is in ``folder`` and survives the process when ``durable``."""

    def __init__(self, folder: Path, *, durable: bool = True, password: str | None = None) -> None:
        self.folder = folder
        self.port = free_port()
        self.durable = durable
        self.password = password
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        login = f":{self.password}@" if self.password else ""
        return f"redis://{login}127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start the server and return when it answers."""
        self.folder.mkdir(exist_ok=True)
        options = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "dir": str(self.folder),
            "save": "",
            "appendonly": "yes" if self.durable else "no",
            "appendfsync": "always",
            **({"requirepass": self.password} if self.password else {}),
        }
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        with (self.folder / "redis.log").open("ab") as log:
            self.process = subprocess.Popen(["redis-server", *words], stdout=log, stderr=log)
        deadline = time.monotonic() + START_TIMEOUT_S
        with redis.Redis.from_url(self.url) as client:
            while time.monotonic() < deadline:
                with contextlib.suppress(redis.RedisError):
                    if client.ping():
                        return
                time.sleep(0.02)
        raise AssertionError((self.folder / "redis.log").read_text())

    def kill(self) -> None:
        """Send SIGKILL to the server and wait for its end."""
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None

    def flush(self) -> None:
        """Delete all data, as a lost disk would."""
        with redis.Redis.from_url(self.url) as client:
            client.flushall()


@contextlib.contextmanager
def redis_server(folder: Path, *, durable: bool = True, password: str | None = None) -> Iterator[RedisServer]:
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed: scripts/test-env installs it by apt-get")
    server = RedisServer(folder, durable=durable, password=password)
    try:
        server.start()
        yield server
    finally:
        server.kill()
