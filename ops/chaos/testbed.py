"""The testbed of a scenario: a gateway, its engine, its workers and a stand-in for Bedrock."""

import asyncio
import contextlib
import os
import re
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals
from typing import Any

import psutil
import yaml

from engine.own_modules import with_own_modules
from gateway.config.engine import BUNDLED
from ops.chaos.errors import ChaosError
from ops.chaos.processes import Process, engine_pids
from ops.chaos.scenario import BedrockFault, ScenarioStart
from ops.cli.startup import need_modules
from ops.client import AdminClient, AdminError, reach_loopback
from ops.free_ports import free_ports

KEY = "chaos-admin-key-0123456789abcdef0123456789abcdef"
ROUTE = "self_hosted_generation"
BEDROCK_MODEL = "anthropic.claude-3-haiku-20240307-v1:0"
BEDROCK_MODULE = "benchmarks.bedrock"
DEMO_MODEL, PROMPTS = str(BUNDLED / "demo"), str(BUNDLED / "prompts")
# Credentials for the stand-in; AWS credentials of this machine are not used.
CREDENTIALS: Mapping[str, str] = {
    "AWS_ACCESS_KEY_ID": "AKIDEXAMPLE",
    "AWS_SECRET_ACCESS_KEY": "not-a-secret",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}
# Pause per chunk of the stand-in: its answer takes about a second, so that it can be interrupted.
BEDROCK_DELAY_S = 0.05
EMBEDDED: Mapping[str, Any] = {
    "kind": "embedded",
    "model": DEMO_MODEL,
    "num_threads": 1,
    "kv_cache_bytes": 64 << 20,
}
VLLM: Mapping[str, Any] = {
    "kind": "vllm", "model": DEMO_MODEL, "block_size": 32, "max_model_len": 1024, "max_num_seqs": 64,
    "enforce_eager": True,
}  # fmt: skip
ENVIRONMENT: Mapping[str, str] = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
POLL_S = 0.1
CALL_TIMEOUT_S = 10.0
# The stand-in for Bedrock is not part of the wheel; in a clone it is next to this package.
CLONE = Path(__file__).resolve().parents[2]
STAND_IN_IS_HERE = (CLONE / "benchmarks").is_dir()


@dataclass(slots=True)
class Testbed:
    """A running gateway and its processes. All methods raise ChaosError.

    Args:
        gateway_pid: the gateway's process id, if it is on this machine.
        ledger: the SQLite file of its ledger, if it can be read.
        log: its log as JSON lines, if it can be read.
        processes: the processes started here, by role.
        bedrock_control: where the faults of the stand-in are set.
    """

    url: str
    key: str | None
    gateway_pid: int | None = None
    ledger: Path | None = None
    log: Path | None = None
    processes: dict[str, Process] = field(default_factory=dict)
    bedrock_control: AdminClient | None = None
    bedrock_text: str | None = None

    @property
    def client(self) -> AdminClient:
        return AdminClient(self.url, self.key, CALL_TIMEOUT_S)

    def pids(self, role: str) -> list[int]:
        if role in ("gateway", "engine"):
            if self.gateway_pid is None:
                raise ChaosError(f"{role}: the gateway's process is not known; give --pid, or --start")
            return [self.gateway_pid] if role == "gateway" else engine_pids(self.gateway_pid)
        if role not in self.processes:
            known = ", ".join(sorted({*self.processes, "gateway", "engine"}))
            raise ChaosError(f"{role}: there is no such process; there are {known}")
        return [self.processes[role].pid]

    def signal(self, role: str, number: Signals) -> None:
        for pid in self.pids(role):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    async def restart(self, role: str, within_s: float) -> None:
        if role not in self.processes:
            raise ChaosError(f"{role}: not started here, so it cannot be restarted")
        await self.processes[role].kill()
        await self.processes[role].start(within_s)

    async def bedrock(self, fault: BedrockFault) -> None:
        """Set the fault of the stand-in. Raises AdminError too."""
        if self.bedrock_control is None:
            raise ChaosError("bedrock: there is no stand-in; set start.bedrock: true")
        body = fault.model_dump(exclude_defaults=True)
        await asyncio.to_thread(self.bedrock_control.post, body=body)


@asynccontextmanager
async def started(start: ScenarioStart, folder: Path) -> AsyncIterator[Testbed]:
    """Start the scenario's processes; all are stopped at the end of the block.

    Raises ChaosError: a process does not start; the message has the end of its log.
    """
    reach_loopback()
    async with AsyncExitStack() as running:
        testbed = Testbed("", KEY, ledger=folder / "ledger.db")
        starter = _Starter(testbed, running, start, folder)
        backends: dict[str, Any] = {}
        if start.bedrock:
            backends["bedrock"] = await starter.bedrock()
        if start.workers:
            urls = [await starter.worker(number) for number in range(1, start.workers + 1)]
            backends["workers"] = {
                "kind": "openai", "base_urls": [f"{url}/v1" for url in urls], "model": "demo",
                "dialect": "sluice", "prompt": "token_ids", "api_key_env": "SLUICE_ADMIN_KEY",
                "probe_interval_seconds": 0.5,
            }  # fmt: skip
        if start.engine != "none":
            backends = {"local": {"kind": "engine"}, **backends}
        if not backends:
            raise ChaosError("start: engine none, no workers and no bedrock: no backend could answer")
        engine = {"embedded": EMBEDDED, "vllm": VLLM}.get(
            start.engine, {"kind": "none", "tokenizer": DEMO_MODEL, "served_model_name": "demo"}
        )
        first, *legs = backends
        route = {"backends": [{"name": first, "weight": 100}], "fallback": [*legs, "degraded"]}
        base = {"engine": dict(engine), "backends": backends, "chaos": {"enabled": True}}
        testbed.url = await starter.gateway(
            "gateway",
            merged(base, start.settings),
            {**route, "prompt_version": "chat-manga-2.1", **start.route},
        )
        gateway = testbed.processes["gateway"]
        testbed.gateway_pid, testbed.log = gateway.pid, gateway.log
        yield testbed


@dataclass(frozen=True, slots=True)
class _Starter:
    """Starts the processes of a testbed, with their files in ``folder``; ``running`` ends them."""

    testbed: Testbed
    running: AsyncExitStack
    start: ScenarioStart
    folder: Path

    async def bedrock(self) -> dict[str, Any]:
        """Start the stand-in; returns the section of its backend."""
        if not STAND_IN_IS_HERE:
            raise ChaosError(
                "start.bedrock: the stand-in for Bedrock is not installed; "
                "run it in a clone of the repository"
            )
        need_modules("boto3", extra="bedrock")
        port, control = free_ports(2)
        words = ("--port", str(port), "--control-port", str(control), "--delay-s", str(BEDROCK_DELAY_S))
        path = os.pathsep.join(filter(None, (str(CLONE), os.environ.get("PYTHONPATH"))))
        await self._run("bedrock", (BEDROCK_MODULE, *words), {**os.environ, "PYTHONPATH": path})
        client = self.testbed.bedrock_control = AdminClient(f"http://127.0.0.1:{control}")
        self.testbed.bedrock_text = (await asyncio.to_thread(client.get))["text"]
        url = f"http://127.0.0.1:{port}"
        return {"kind": "bedrock", "model_id": BEDROCK_MODEL, "region": "us-east-1", "endpoint_url": url}

    async def worker(self, number: int) -> str:
        """Start a worker; returns its URL."""
        server = {"port": free_ports(1)[0]}
        settings = {"server": server, "engine": dict(EMBEDDED), "backends": {"local": {"kind": "engine"}}}
        route = {"backends": [{"name": "local", "weight": 100}], "fallback": []}
        return await self.gateway(f"worker:{number}", settings, route)

    async def gateway(self, role: str, settings: Mapping[str, Any], route: Mapping[str, Any]) -> str:
        """Start a gateway and wait until it is ready; returns its URL."""
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLUICE_", "AWS_"))},
            **ENVIRONMENT, **CREDENTIALS, "SLUICE_ADMIN_KEY": KEY,
        }  # fmt: skip
        words = ("ops.cli", "serve", "--config", str(self._config(role, settings, route)))
        banner = await self._run(role, words, environment)
        process, within_s = self.testbed.processes[role], self.start.ready_within_s
        found = re.search(r"http://[^\s]+", banner)
        if found is None:
            raise ChaosError(f"{role} did not start:\n{process.tail()}")
        end = time.monotonic() + within_s
        while not await asyncio.to_thread(_is_ready, found[0]):
            if time.monotonic() > end or not psutil.pid_exists(process.pid):
                raise ChaosError(f"{role} was not ready within {within_s:g} s:\n{process.tail()}")
            await asyncio.sleep(POLL_S)
        return found[0]

    async def _run(self, role: str, module: Sequence[str], environment: Mapping[str, str]) -> str:
        """Start a Python module with its arguments; returns its first line of output."""
        process = Process(role, (sys.executable, "-m", *module), self.folder, with_own_modules(environment))
        self.running.push_async_callback(process.end)
        self.testbed.processes[role] = process
        return await process.start(self.start.ready_within_s)

    def _config(self, role: str, settings: Mapping[str, Any], route: Mapping[str, Any]) -> Path:
        folder, name = self.folder, role.replace(":", "-")
        routing, path = folder / f"{name}-routing.yaml", folder / f"{name}.yaml"
        routing.write_text(yaml.safe_dump({"routes": {ROUTE: dict(route)}}))
        ledger = self.testbed.ledger if role == "gateway" else folder / f"{name}-ledger.db"
        base = {
            "server": {"port": 0, "drain_seconds": 5, "log_json": True},
            "state": {"url": f"sqlite:///{folder}/{name}-state.db"},
            "ledger": {"url": f"sqlite+aiosqlite:///{ledger}"},
            "routing": {"file": str(routing)},
            "prompts": {"folder": PROMPTS},
        }
        path.write_text(yaml.safe_dump(merged(base, settings)))
        return path


def merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """``one`` with the values of ``other``, which override it section by section."""
    found = dict(one)
    for key, value in other.items():
        before = found.get(key)
        both = isinstance(before, Mapping) and isinstance(value, Mapping)
        found[key] = merged(before, value) if both else value  # type: ignore[arg-type]  # checked above
    return found


def _is_ready(url: str) -> bool:
    with contextlib.suppress(AdminError):
        AdminClient(url, timeout_s=CALL_TIMEOUT_S).get("ready")
        return True
    return False
