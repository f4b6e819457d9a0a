"""A small Ray cluster on this machine that runs the application, and callers who check each answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from benchmarks.paced_engine import STEP_S, paced_engine
from benchmarks.sse import json_events
from gateway.config.settings import load_settings
from ops.ray.port import ClusterPlace
from ops.ray.replica import configured_engine

ROOT = Path(__file__).resolve().parents[1]
# Logical CPUs: Ray counts reservations, and the benchmark's deployments reserve hardly any.
CPUS = 16
OBJECT_STORE_BYTES = 80 << 20
START_TIMEOUT_S = 120.0
# No usage reports, no spare worker, less logging, and more time for a slow proxy.
RAY_ENV = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_DEDUP_LOGS": "0",
    # A proxy that is slow to start or to answer a check on busy cores is not replaced.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
}


@dataclass(frozen=True)
class Application:
    """The running application.

    Args:
        url: of Serve's proxy.
        config: the gateway's configuration file.
        folder: where its databases are.
    """

    url: str
    config: Path
    folder: Path

    def replicas(self, deployment: str) -> list[psutil.Process]:
        """The processes of a deployment's replicas, of this process's cluster alone."""
        title = f"ray::ServeReplica:sluice:{deployment}"
        return [one for one in psutil.Process().children(recursive=True) if _title(one).startswith(title)]

    def signal_replicas(self, deployment: str, sent: signal.Signals = signal.SIGKILL, count: int = 1) -> None:
        """Send a signal to ``count`` replicas, by default to kill one."""
        for victim in self.replicas(deployment)[:count]:
            victim.send_signal(sent)

    async def wait_for(self, deployment: str, replicas: int, timeout_s: float) -> None:
        """Wait until Serve runs exactly ``replicas`` replicas. Raises TimeoutError."""
        await until(
            # Serve still counts a replica just killed as running; its process is already gone.
            lambda: (
                self.states(deployment) == {"RUNNING": replicas}
                and len(self.replicas(deployment)) == replicas
            ),
            timeout_s,
        )

    def states(self, deployment: str) -> dict[str, int]:
        """Return the number of Serve's replicas by state."""
        from ray import serve

        states = serve.status().applications["sluice"].deployments[deployment].replica_states
        return {str(getattr(state, "value", state)): count for state, count in states.items()}


def _title(process: psutil.Process) -> str:
    try:
        return (process.cmdline() or [""])[0]
    except psutil.Error:
        return ""  # the process has just ended


@contextlib.contextmanager
def cluster(port: int) -> Iterator[str]:
    """Run Ray and Serve's proxy on this machine, owned by this process; yield the proxy's address."""
    before = {name: os.environ.get(name) for name in RAY_ENV}
    os.environ.update(RAY_ENV)
    # Ray puts sockets there, whose paths must be short.
    folder = tempfile.mkdtemp(prefix="slray", dir="/tmp")
    import ray
    from ray import serve

    try:
        ray.init(
            address="local",
            num_cpus=CPUS,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=folder,
            logging_level=logging.ERROR,
            log_to_driver=False,
        )
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def write_config(folder: Path, **sections: Mapping[str, Any]) -> Path:
    """Write the shipped configuration with its databases in ``folder`` and the keys of these sections."""
    config = yaml.safe_load((ROOT / "sluice.yaml").read_text()) or {}
    base: dict[str, dict[str, Any]] = {
        "auth": {"enabled": False},
        "state": {"url": f"sqlite:///{folder}/state.db"},
        "ledger": {"url": f"sqlite+aiosqlite:///{folder}/ledger.db"},
        "engine": {"device": "cpu", "num_threads": 1, "kv_cache_bytes": 64 << 20},
        "ray": {"gateway_cpus": 0.1, "engine_cpus": 0.1, "signals_seconds": 0.25},
    }
    for given in (base, sections):
        for name, keys in given.items():
            config.setdefault(name, {}).update(keys)
    path = folder / "ray.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def deploy(url: str, config: Path, *, paced: bool, step_s: float = STEP_S) -> Application:
    """Deploy the application with the paced or the configured engine, and wait until the gateway is ready."""
    from ray import serve

    from ops.ray.application import make_application

    place = ClusterPlace(str(config), str(ROOT), "sluice")
    make_engine = partial(paced_engine, step_s=step_s) if paced else configured_engine
    made = make_application(load_settings(config, {}), place, make_engine=make_engine)
    serve.run(made, name="sluice", route_prefix="/")
    wait_ready(url)
    return Application(url, config, config.parent)


def wait_ready(url: str) -> None:
    """Wait for `/ready`. Raises TimeoutError."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/ready").status_code == 200:
                return
        time.sleep(0.1)
    raise TimeoutError(f"the application at {url} is not ready")


@dataclass
class Tally:
    """The results of the callers.

    Args:
        whole: number of complete answers.
        tokens: tokens of them.
        faults: what was wrong with the others, as text.
        ttft_s: times to the first token.
    """

    whole: int = 0
    tokens: int = 0
    faults: list[str] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)


class Callers:
    """Callers in a loop that compare every answer with the first one to the same prompt.

    Args:
        url: of the gateway.
        count: how many ask at the same time.
        tokens: length of every answer.
        prompts: how many prompts there are.
    """

    def __init__(self, url: str, *, count: int, tokens: int, prompts: int = 8) -> None:
        self._url = url
        self._count = count
        self._tokens = tokens
        self._prompts = prompts
        self._answers: dict[str, str] = {}
        self._over = False
        self.tally = Tally()

    @contextlib.asynccontextmanager
    async def calling(self) -> AsyncIterator[Tally]:
        """Call while the block runs; the last answers are finished after it."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=120.0, limits=limits) as client, asyncio.TaskGroup() as callers:
            for number in range(self._count):
                callers.create_task(self._call(client, number), name=f"caller {number}")
            try:
                yield self.tally
            finally:
                self._over = True

    async def _call(self, client: httpx.AsyncClient, number: int) -> None:
        turn = number
        while not self._over:
            turn += self._count
            prompt = f"Question {turn % self._prompts}: what should I read next, and why?"
            try:
                text, ttft_s = await self._stream(client, prompt)
            except (httpx.HTTPError, ValueError, KeyError) as error:
                self.tally.faults.append(f"{type(error).__name__}: {error}"[:200])
                continue
            if text != self._answers.setdefault(prompt, text):
                self.tally.faults.append("another answer than before")
                continue
            self.tally.whole += 1
            self.tally.tokens += self._tokens
            self.tally.ttft_s.append(ttft_s)

    async def _stream(self, client: httpx.AsyncClient, prompt: str) -> tuple[str, float]:
        """Return one answer and its time to the first token. Raises ValueError when it is incomplete."""
        body = {
            "stream": True,
            "messages": [{"role": "user", "content": prompt}],
            "sampling": {"temperature": 0, "max_tokens": self._tokens},
        }
        pieces, ttft_s, began = [], 0.0, time.perf_counter()
        async with client.stream("POST", f"{self._url}/v1/generate", json=body) as answer:
            if answer.status_code != 200:
                raise ValueError(f"{answer.status_code} {(await answer.aread()).decode()}")
            async for event in json_events(answer.aiter_bytes()):
                if event["type"] == "token":
                    ttft_s = ttft_s or time.perf_counter() - began
                    pieces.append(event["delta"])
                elif event["type"] == "done":
                    cut = event["usage"]["output_tokens"] != self._tokens and event["finish_reason"] != "stop"
                    if event["fallback"] is not None or cut:
                        raise ValueError(f"not whole: {event['usage']} {event['fallback']}")
                    return "".join(pieces), ttft_s
                else:
                    raise ValueError(f"{event}")
        raise ValueError("the stream ended before the answer")


async def until(what: Callable[[], bool], timeout_s: float) -> None:
    """Wait until ``what`` is true. Raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while not what():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s:g} s")
        await asyncio.sleep(0.1)
