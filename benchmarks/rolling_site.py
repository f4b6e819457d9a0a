"""The processes of ``benchmarks.rolling_restart``: a stand-in worker, gateways, HAProxy in front of them."""

from __future__ import annotations

import contextlib
import csv
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from benchmarks.forwarding.gateways import REPOSITORY, python_module
from benchmarks.forwarding.processes import free_port, started, wait_until_ready
from benchmarks.forwarding.workload import MODEL

KEY = "sk-rolling-benchmark-0123456789abcdef"
HAPROXY_CFG = REPOSITORY / "deploy" / "haproxy" / "haproxy.cfg"
SLOTS = 4  # number of `server` lines in the file
DRAIN_S = 60.0


class Broken(Exception):
    """A process of the run failed; the message says which."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The settings of a run. Times are in seconds; ``rate`` is requests per second; ``step_ms`` per token."""

    gateways: int = 4
    rate: float = 10.0
    step_ms: float = 25.0
    lame_duck_s: float = 5.0
    steady_s: float = 10.0


DEFAULT = Plan()


@dataclass
class Site:
    """All processes of a run except the load; ``folder`` has their files."""

    folder: Path
    plan: Plan
    worker_port: int
    ports: Sequence[int]
    front_port: int
    running: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    front: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Return the address that callers use."""
        return f"http://127.0.0.1:{self.front_port}"

    @property
    def ledger(self) -> Path:
        """The ledger's file."""
        return self.folder / "ledger.db"

    def start(self, place: int) -> None:
        """Start the gateway of that index."""
        with (self.folder / f"gateway-{place + 1}.log").open("ab") as log:
            self.running[place] = subprocess.Popen(
                python_module("ops.cli", "serve", "--config", self.folder / "sluice.yaml"),
                cwd=REPOSITORY,
                env={
                    **os.environ,
                    "SLUICE_ADMIN_KEY": KEY,
                    "SLUICE_SERVER__PORT": str(self.ports[place]),
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def up(self, place: int) -> bool:
        """Return whether HAProxy sends requests to the gateway of that index.

        Raises:
            Broken: HAProxy has ended.
        """
        try:
            return self.status()[f"gateway-{place + 1}"]["status"].startswith("UP")
        except OSError:
            if self.front is None or self.front.poll() is not None:
                raise Broken(f"HAProxy has ended: {(self.folder / 'haproxy.log').read_text()}") from None
            return False  # HAProxy has not started yet

    def status(self) -> Mapping[str, Mapping[str, str]]:
        """HAProxy's figures of each gateway, by its name in the file."""
        with contextlib.closing(_connected(self.folder / "haproxy.sock")) as control:
            control.sendall(b"show stat\n")
            text = b"".join(iter(lambda: control.recv(65_536), b"")).decode()
        rows = csv.DictReader(text.removeprefix("# ").splitlines())
        return {row["svname"]: row for row in rows if row["pxname"] == "gateways"}


def _connected(path: Path) -> socket.socket:
    one = socket.socket(socket.AF_UNIX)
    one.settimeout(5)
    one.connect(str(path))
    return one


@contextlib.contextmanager
def site(plan: Plan) -> Iterator[Site]:
    """Start the worker, the gateways and HAProxy.

    Raises:
        Broken: HAProxy is not installed.
    """
    haproxy = shutil.which("haproxy", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if haproxy is None:
        raise Broken("HAProxy is not installed: apt-get install haproxy")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sluice-")))
        ports = [free_port() for _ in range(SLOTS + 2)]
        here = Site(folder, plan, ports[0], ports[2:], ports[1])
        worker = python_module("benchmarks.forwarding.worker", here.worker_port)
        process = stack.enter_context(started(worker, folder / "worker.log"))
        wait_until_ready(process, here.worker_port, "/health", folder / "worker.log")
        (folder / "routing.yaml").write_text(
            yaml.safe_dump(
                {
                    "routes": {
                        "self_hosted_generation": {
                            "backends": [{"name": "worker", "weight": 100}],
                            "fallback": [],
                        }
                    }
                }
            )
        )
        (folder / "sluice.yaml").write_text(yaml.safe_dump(_config(here)))
        stack.callback(_end, here)
        for place in range(plan.gateways):
            here.start(place)
        for place, gateway in here.running.items():  # HAProxy takes each for up until its first check
            log = folder / f"gateway-{place + 1}.log"
            wait_until_ready(gateway, here.ports[place], "/ready", log)
        environ = {f"SLUICE_GATEWAY_{n + 1}": f"127.0.0.1:{port}" for n, port in enumerate(here.ports)}
        environ |= {
            "SLUICE_BIND": f"127.0.0.1:{here.front_port}",
            "SLUICE_HAPROXY_SOCKET": str(folder / "haproxy.sock"),
        }
        command = [haproxy, "-db", "-f", str(HAPROXY_CFG)]
        here.front = stack.enter_context(started(command, folder / "haproxy.log", environ))
        yield here


def _config(here: Site) -> Mapping[str, object]:
    return {
        "server": {
            "host": "127.0.0.1",
            "drain_seconds": DRAIN_S,
            "lame_duck_seconds": here.plan.lame_duck_s,
        },
        "engine": {"kind": "none", "model": "models/demo", "tokenizer": "models/demo"},
        "backends": {
            "worker": {
                "kind": "openai",
                "base_urls": [f"http://127.0.0.1:{here.worker_port}/v1"],
                "model": MODEL,
            }
        },
        "state": {"url": f"sqlite:///{here.folder}/state.db"},
        "ledger": {"url": f"sqlite+aiosqlite:///{here.ledger}"},
        "routing": {"file": str(here.folder / "routing.yaml")},
    }


def _end(here: Site) -> None:
    for process in here.running.values():
        if process.poll() is None:
            process.kill()
        process.wait()
