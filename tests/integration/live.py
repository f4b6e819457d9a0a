"""A real gateway process on a free port, as an operator would start it."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
from sqlalchemy import create_engine

from accounting.store_schema import _upgrade
from observability.metrics_text import total_of
from tests.fork_server import ForkedPopen

ROOT = Path(__file__).parents[2]
ADMIN_KEY = "test-admin-key-0123456789abcdef0123456789abcdef"
START_TIMEOUT_S = 180.0  # an idle machine takes a few seconds


@dataclass(frozen=True)
class LiveGateway:
    """A running `sluice serve`; its standard output and error are files in ``folder``."""

    url: str
    process: subprocess.Popen[bytes]
    folder: Path
    log: Path
    output: Path

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {ADMIN_KEY}"}

    def engine_pid(self) -> int:
        """The process id of the engine."""
        [child] = [
            p
            for p in psutil.Process(self.process.pid).children()
            if "engine.process" in " ".join(p.cmdline())
        ]
        return int(child.pid)

    def metric(self, name: str) -> float:
        """A metric's sum over its labels."""
        return total_of(httpx.get(f"{self.url}/metrics", timeout=60).text, name)

    def wait_until_idle(self, timeout_s: float = 60.0) -> None:
        """Wait until no request is in flight in the gateway or the engine, and the KV cache is free."""
        names = ("sluice_requests_in_flight", "vllm:num_requests_running", "vllm:num_requests_waiting")
        deadline, page = time.monotonic() + timeout_s, ""
        while (left_s := deadline - time.monotonic()) > 0:
            page = httpx.get(f"{self.url}/metrics", timeout=left_s).text
            if not any(total_of(page, name) for name in (*names, "vllm:kv_cache_usage_perc")):
                return
            time.sleep(0.05)
        raise AssertionError("the gateway did not come to rest:\n" + page)


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of this process without ``SLUICE_*``, plus the settings of a test gateway."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("SLUICE_")}
    return {
        **clean,
        "SLUICE_ADMIN_KEY": ADMIN_KEY,
        "SLUICE_SERVER__PORT": "0",
        "SLUICE_ENGINE__NUM_THREADS": "1",
        "SLUICE_ENGINE__KV_CACHE_BYTES": str(64 << 20),
        **extra,
    }


@functools.cache
def _empty_ledger() -> bytes:
    """A ledger with empty tables: to create them takes a fifth of a start; tests/accounting tests that."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "ledger.db"
        engine = create_engine(f"sqlite:///{file}")
        with engine.begin() as connection:
            _upgrade(connection)
        engine.dispose()
        return file.read_bytes()


@contextlib.contextmanager
def gateway(
    folder: Path,
    *,
    ready: bool = True,
    config: str | Path = "sluice.yaml",
    words: Sequence[str] = (),
    start: type[subprocess.Popen[bytes]] = ForkedPopen,
    **env: str,
) -> Iterator[LiveGateway]:
    """Start a gateway with its databases in ``folder``; stop it by force at the end if it still runs.

    Without ``config`` it starts in ``folder``. ``words`` are further arguments of the command. ``start`` is
    ``ImportingPopen`` for a process that imports everything itself.
    """
    log, output = folder / "gateway.log", folder / "gateway.out"
    if not (ledger := folder / "ledger.db").exists():
        ledger.write_bytes(_empty_ledger())
    settings = {
        "SLUICE_STATE__URL": f"sqlite:///{folder}/state.db",
        "SLUICE_LEDGER__URL": f"sqlite+aiosqlite:///{folder}/ledger.db",
        "SLUICE_BATCHES__FOLDER": f"{folder}/files",
        **env,
    }
    with log.open("w") as stderr, output.open("w") as stdout:
        process = start(
            [
                sys.executable,
                "-m",
                "ops.cli",
                "serve",
                *(["--config", str(config)] if config else ()),
                *words,
            ],
            cwd=ROOT if config else folder,
            env=environment(settings),
            stdout=stdout,
            stderr=stderr,
        )
    try:
        live = LiveGateway(_url(process, output, log), process, folder, log, output)
        if ready:
            wait_ready(live)
        yield live
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _url(process: subprocess.Popen[bytes], output: Path, log: Path) -> str:
    """The gateway's URL, from the first line of its output."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        ended = process.poll() is not None
        found = re.match(r"Sluice on (http://\S+) .*\n", output.read_text())
        if found:
            return found[1]
        assert not ended, f"ended with {process.poll()} and no banner: {log.read_text()}"
        time.sleep(0.02)
    raise AssertionError(f"no banner: {output.read_text()!r} {log.read_text()}")


def wait_ready(live: LiveGateway) -> None:
    """Wait for `/ready`."""
    deadline = time.monotonic() + START_TIMEOUT_S
    with httpx.Client(base_url=live.url, timeout=60) as client:
        while time.monotonic() < deadline:
            assert live.process.poll() is None, live.log.read_text()
            with contextlib.suppress(httpx.TransportError):
                if client.get("/ready").status_code == 200:
                    return
            time.sleep(0.05)
    raise AssertionError(f"not ready: {live.log.read_text()}")
