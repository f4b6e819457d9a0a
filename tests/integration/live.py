"""A real gateway process on a free port, as an operator would start it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

ROOT = Path(__file__).parents[2]
ADMIN_KEY = "test-admin-key-0123456789"
START_TIMEOUT_S = 90.0


@dataclass(frozen=True)
class LiveGateway:
    """A running `sluice serve`."""

    url: str
    process: subprocess.Popen[str]
    folder: Path
    log: Path

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {ADMIN_KEY}"}

    def engine_pid(self) -> int:
        """The engine's own process."""
        [child] = [
            p
            for p in psutil.Process(self.process.pid).children()
            if "engine.process" in " ".join(p.cmdline())
        ]
        return int(child.pid)

    def metric(self, name: str) -> float:
        """A metric's sum over its labels."""
        text = httpx.get(f"{self.url}/metrics").text
        found = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? ([0-9.e+-]+)$", text, re.MULTILINE)
        return sum(map(float, found))

    def wait_until_idle(self, timeout_s: float = 15.0) -> None:
        """Wait until nothing is in flight, neither here nor in the engine."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            names = ("sluice_requests_in_flight", "vllm:num_requests_running", "vllm:num_requests_waiting")
            if not any(self.metric(name) for name in names) and not self.metric("vllm:kv_cache_usage_perc"):
                return
            time.sleep(0.05)
        raise AssertionError("the gateway did not come to rest:\n" + httpx.get(f"{self.url}/metrics").text)


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This environment without settings of a gateway, plus ours."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("SLUICE_")}
    return {
        **clean,
        "SLUICE_ADMIN_KEY": ADMIN_KEY,
        "SLUICE_SERVER__PORT": "0",
        "SLUICE_ENGINE__NUM_THREADS": "1",
        "SLUICE_ENGINE__KV_CACHE_BYTES": str(64 << 20),
        **extra,
    }


@contextlib.contextmanager
def gateway(
    folder: Path, *, ready: bool = True, config: str | Path = "sluice.yaml", **env: str
) -> Iterator[LiveGateway]:
    """Start a gateway with its databases in ``folder``; stop it by force at the end if it still runs."""
    log = folder / "gateway.log"
    settings = {
        "SLUICE_STATE__URL": f"sqlite:///{folder}/state.db",
        "SLUICE_LEDGER__URL": f"sqlite+aiosqlite:///{folder}/ledger.db",
        **env,
    }
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "gateway.cli", "serve", "--config", str(config)],
            cwd=ROOT,
            env=environment(settings),
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    try:
        assert process.stdout is not None
        banner = process.stdout.readline()
        found = re.search(r"http://\S+", banner)
        assert found, f"no banner: {banner!r} {log.read_text()}"
        live = LiveGateway(found[0], process, folder, log)
        if ready:
            wait_ready(live)
        yield live
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        process.stdout and process.stdout.close()


def wait_ready(live: LiveGateway) -> None:
    """Wait for `/ready`."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert live.process.poll() is None, live.log.read_text()
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{live.url}/ready").status_code == 200:
                return
        time.sleep(0.05)
    raise AssertionError(f"not ready: {live.log.read_text()}")
