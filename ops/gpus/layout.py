"""Decides which GPUs each worker uses, and makes the configurations of the front gateway and its workers."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.config.errors import ConfigError
from gateway.config.settings import Settings
from gateway.routing.revision import default_routing
from gateway.state.url import parse_state_url

# Environment variable that selects a worker's GPUs.
DEVICE_VARIABLE = "CUDA_VISIBLE_DEVICES"
KEY_VARIABLE = "SLUICE_WORKER_KEY"
# Environment variable with the worker's number, which is in each of its log lines.
NUMBER_VARIABLE = "SLUICE_WORKER_NUMBER"
BACKEND = "local"
# A worker's routing: its own engine, without a fallback.
WORKER_ROUTING = default_routing([BACKEND])
NVIDIA_SMI_TIMEOUT_S = 20.0
# A Linux machine with a GPU has at least one of these: NVIDIA's driver, Tegra's, WSL's, AMD's.
GPU_DEVICES = ("/dev/nvidiactl", "/dev/nvhost-gpu", "/dev/dxg", "/dev/kfd")
MAX_WORKERS = 64
# Short, because the front gateway drains first: a worker only finishes requests that the front has abandoned.
WORKER_DRAIN_S = 5.0
WORKER_BODY_BYTES = 64 << 20  # prompts are sent as token ids in JSON, up to seven characters each


@dataclass(frozen=True, slots=True)
class WorkerPlacement:
    """A worker's number, port on loopback, and ``CUDA_VISIBLE_DEVICES`` (``None``: the environment's)."""

    devices: str | None
    port: int
    number: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def __str__(self) -> str:
        return f"worker {self.number}" + ("" if self.devices is None else f" (GPU {self.devices})")


def gpus_of(spec: str, *, each: int = 1, tool: str = "nvidia-smi") -> list[str]:
    """Each worker's ``CUDA_VISIBLE_DEVICES``.

    Args:
        spec: ``all``, or indices as in ``0,1,3``, which are compared with those that ``tool`` lists, if any.
        each: GPUs per worker: ``tensor_parallel_size`` × ``pipeline_parallel_size``.

    Raises:
        ConfigError: there are none, an index is invalid, repeated or of no GPU, or they are not a multiple
            of ``each``.
    """
    names = [] if spec.strip() == "all" else [part.strip() for part in spec.split(",")]
    if any(not name.isdigit() for name in names):
        raise ConfigError(f"--gpus: given {spec!r}; allowed: all, or indices as in 0,1,3")
    if len(set(names)) != len(names):
        raise ConfigError(f"--gpus: given {spec!r}, which names a GPU twice; name each once")
    there = _listed(tool)
    names = names or there
    if not names:
        raise ConfigError("--gpus all: nvidia-smi lists no GPU here; name them as in --gpus 0,1")
    # CUDA would hide an index that no GPU has, and the engine would run on the CPU.
    if missing := [name for name in names if there and name not in there]:
        raise ConfigError(
            f"--gpus: given {spec!r}, but there is no GPU {', '.join(missing)}; there are {', '.join(there)}"
        )
    if not there and sys.platform == "linux" and not any(Path(device).exists() for device in GPU_DEVICES):
        raise ConfigError(
            f"--gpus: given {spec!r}, but this machine has no GPU driver; --workers {len(names)} starts "
            "workers on the CPU"
        )
    if len(names) % each:
        raise ConfigError(
            f"--gpus: {len(names)} GPUs, but the engine takes {each} each; give a multiple of it"
        )
    groups = [",".join(names[at : at + each]) for at in range(0, len(names), each)]
    if len(groups) > MAX_WORKERS:
        raise ConfigError(f"--gpus: {len(groups)} workers; allowed: at most {MAX_WORKERS}")
    return groups


def _listed(tool: str) -> list[str]:
    """The indices of all GPUs; empty if ``tool`` is not here, fails or lists none."""
    command = [tool, "--query-gpu=index", "--format=csv,noheader"]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=True
        ).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return []


def front_of(settings: Settings, placements: Sequence[WorkerPlacement]) -> Settings:
    """The configuration of the gateway in front: each backend on the engine becomes a pool of the workers.

    Raises ConfigError: there is no engine to run, or no backend on it.
    """
    on_engine = [name for name, backend in settings.backends.items() if backend.kind == "engine"]
    if settings.engine.kind == "none" or not on_engine:
        raise ConfigError(
            "--gpus: needs an engine (engine.kind: embedded or vllm) and a backend of kind engine"
        )
    if settings.engines:
        raise ConfigError("--gpus: every worker runs `engine`; leave `engines` out, or serve without --gpus")
    data = settings.model_dump(mode="json")
    data["engine"]["kind"] = "none"
    for name in on_engine:
        pool: dict[str, Any] = {
            "kind": "openai",
            "base_urls": [placement.url for placement in placements],
            "model": settings.engine.model_id,
            "dialect": "sluice",
            "prompt": "token_ids",
            "api_key_env": KEY_VARIABLE,
            "send_priority": True,
            "share_prefix_across_tenants": settings.engine.share_prefix_across_tenants,
            "max_running": settings.engine.max_num_seqs,
            "total_timeout_seconds": max(600.0, settings.server.request_timeout_seconds),
            # Loading a model takes minutes; the ejection time must not grow meanwhile.
            "eject_max_seconds": 5.0,
        }
        own = data["backends"][name]
        data["backends"][name] = pool | {key: own[key] for key in ("price", "unknown_fields")}
    return Settings.model_validate(data)


def worker_of(settings: Settings, placement: WorkerPlacement, routing: Path) -> dict[str, Any]:
    """The configuration of one worker: only the engine, on loopback, with state in memory.

    The front gateway does accounting, limits and fallbacks, so the worker's ledger is in memory too.
    """
    whole = settings.model_dump(mode="json")
    return {
        "server": {
            "host": "127.0.0.1",
            "port": placement.port,
            "drain_seconds": WORKER_DRAIN_S,
            "max_body_bytes": WORKER_BODY_BYTES,
            "request_timeout_seconds": whole["server"]["request_timeout_seconds"],
            "log_json": whole["server"]["log_json"],
        },
        "engine": whole["engine"],
        "weights": whole["weights"],
        "prompts": whole["prompts"],
        "adapters": whole["adapters"] | _shared_registry(settings),
        "tracing": whole["tracing"],
        "backends": {BACKEND: {"kind": "engine"}},
        "state": {"url": "memory://", "namespace": whole["state"]["namespace"]},
        "ledger": {"url": "sqlite+aiosqlite:///:memory:", "durability": "memory"},
        "routing": {"file": str(routing)},
    }


def _shared_registry(settings: Settings) -> dict[str, Any]:
    """Settings with which the worker follows the front's adapter registry; none if that is in memory."""
    url = parse_state_url(settings.state.url)
    if url.kind == "memory":
        return {}
    shared = settings.state.url if url.path is None else f"sqlite:///{url.path.absolute()}"
    return {"state_url": shared, "file": None}
