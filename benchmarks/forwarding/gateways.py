"""The measured gateways: how each is configured and started, all in front of the same worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from shutil import which
from typing import Final

from accounting.options import Durability
from benchmarks.forwarding.workload import MODEL, Regime

REPOSITORY: Final = Path(__file__).resolve().parents[2]
# Not a secret: every gateway here listens on loopback. Long enough for LiteLLM's master key.
KEY: Final = "sk-forwarding-benchmark-0123456789abcdef"
LITELLM: Final = "litellm[proxy]==1.106.0"
TENSORZERO: Final = "tensorzero==2026.6.0"
VLLM_ROUTER: Final = "vllm-router==0.1.17"
# More than any benchmark opens.
NGINX_CONNECTIONS: Final = 4096


class Name(StrEnum):
    """The gateways, in the order of the table."""

    DIRECT = "direct"
    NGINX = "nginx"
    FASTAPI = "fastapi"
    LITELLM = "litellm"
    TENSORZERO = "tensorzero"
    VLLM_ROUTER = "vllm-router"
    SLUICE = "sluice"
    SLUICE_RELAXED = "sluice-relaxed"
    SLUICE_POOL = "sluice-pool"
    SLUICE_UNSEEN = "sluice-unseen"


TITLES: Final[Mapping[Name, str]] = {
    Name.DIRECT: "no gateway",
    Name.NGINX: "nginx",
    Name.FASTAPI: "bare FastAPI + aiohttp",
    Name.LITELLM: "LiteLLM",
    Name.TENSORZERO: "TensorZero",
    Name.VLLM_ROUTER: "vllm-router, round robin",
    Name.SLUICE: "Sluice",
    Name.SLUICE_RELAXED: "Sluice, usage on disk later",
    Name.SLUICE_POOL: "Sluice, two workers",
    Name.SLUICE_UNSEEN: "Sluice, text never seen",
}


class NotAvailable(Exception):
    """A gateway cannot be measured here; the message says what to install."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to start one gateway in a folder of its own.

    Attributes:
        ready_path: answers 200 once requests are accepted; ``None``: as soon as the gateway has a port.
        path: where chats are sent; ``model`` is the model that they name.
        port_file: the file in which a gateway that chooses its own port writes it.
    """

    command: tuple[str, ...]
    ready_path: str | None
    environment: Mapping[str, str] = field(default_factory=dict)
    path: str = "/v1/chat/completions"
    model: str = MODEL
    port_file: Path | None = None


def python_module(module: str, *arguments: object) -> tuple[str, ...]:
    """The command that runs a module with this Python."""
    return (sys.executable, "-m", module, *map(str, arguments))


def regime_of(name: Name, *, agents: bool) -> Regime:
    """Return the gateway's regime: only Sluice reads the text, so only it also gets unseen text."""
    if name is Name.SLUICE_UNSEEN:
        return Regime.UNSEEN
    return Regime.AGENT if agents else Regime.CONVERSATION


def recipe(name: Name, *, folder: Path, port: int, worker_port: int, model: str = MODEL) -> Recipe:
    """Write the gateway's configuration into ``folder``; return its recipe. ``model`` is Sluice's worker's.

    Raises:
        NotAvailable: the gateway is not installed and cannot be.
    """
    match name:
        case Name.NGINX:
            return _nginx(folder, port, worker_port)
        case Name.FASTAPI:
            return Recipe(python_module("benchmarks.forwarding.proxy", port, worker_port), "/v1/models")
        case Name.LITELLM:
            return _litellm(folder, port, worker_port)
        case Name.TENSORZERO:
            return _tensorzero(folder, worker_port)
        case Name.VLLM_ROUTER:
            return _vllm_router(port, worker_port)
        case Name.SLUICE | Name.SLUICE_UNSEEN:
            return _sluice(folder, port, worker_port, model)
        case Name.SLUICE_POOL:  # two names of one worker
            return _sluice(folder, port, worker_port, model, hosts=("127.0.0.1", "localhost"))
        case Name.SLUICE_RELAXED:
            made = _sluice(folder, port, worker_port, model)
            return replace(
                made, environment={**made.environment, "SLUICE_LEDGER__DURABILITY": Durability.RELAXED}
            )
        case Name.DIRECT:
            raise ValueError("nothing is started for direct")


def _nginx(folder: Path, port: int, worker_port: int) -> Recipe:
    program = which("nginx") or which("nginx", path="/usr/sbin")
    if program is None:
        raise NotAvailable("nginx is not installed: apt-get install nginx (or leave it out with --only)")
    (folder / "nginx.conf").write_text(
        f"""
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log stderr warn;
events {{ worker_connections {NGINX_CONNECTIONS}; }}
http {{
    access_log off;
    tcp_nodelay on;
    keepalive_requests 1000000000;
    client_body_buffer_size 64k;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    upstream worker {{
        server 127.0.0.1:{worker_port};
        keepalive 256;
        keepalive_requests 1000000000;
    }}
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass http://worker;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
        }}
    }}
}}
"""
    )
    return Recipe((program, "-p", str(folder), "-c", str(folder / "nginx.conf")), "/v1/models")


def _litellm(folder: Path, port: int, worker_port: int) -> Recipe:
    python = _environment_of(LITELLM)
    (folder / "litellm.yaml").write_text(
        f"""
model_list:
  - model_name: {MODEL}
    litellm_params: {{model: openai/{MODEL}, api_base: "http://127.0.0.1:{worker_port}/v1", api_key: none}}
litellm_settings: {{telemetry: false, num_retries: 0}}
"""
    )
    return Recipe(
        (
            str(python.parent / "litellm"), "--config", str(folder / "litellm.yaml"), "--host", "127.0.0.1",
            "--port", str(port), "--num_workers", "1",
        ),
        "/health/liveliness",
        # The settings of its production guide; and the bundled price list, else it downloads one.
        {
            "LITELLM_MASTER_KEY": KEY, "LITELLM_MODE": "PRODUCTION", "LITELLM_LOG": "ERROR",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
    )  # fmt: skip


def _tensorzero(folder: Path, worker_port: int) -> Recipe:
    """Return the recipe of the gateway in its Python client, without a database: nothing is recorded."""
    config, port_file = folder / "tensorzero.toml", folder / "port"
    config.write_text(
        f"""
[gateway]
observability.enabled = false
[models.{MODEL}]
routing = ["worker"]
[models.{MODEL}.providers.worker]
type = "openai"
model_name = "{MODEL}"
api_base = "http://127.0.0.1:{worker_port}/v1/"
api_key_location = "none"
"""
    )
    program = Path(__file__).with_name("tensorzero_gateway.py")
    return Recipe(
        (str(_environment_of(TENSORZERO)), str(program), str(config), str(port_file)),
        None,
        path="/openai/v1/chat/completions",
        model=f"tensorzero::model_name::{MODEL}",
        port_file=port_file,
    )


def _vllm_router(port: int, worker_port: int) -> Recipe:
    """Return the recipe of round robin over one worker: the router forwards and inspects nothing."""
    return Recipe(
        (
            str(_environment_of(VLLM_ROUTER).parent / "vllm-router"),
            "--host", "127.0.0.1", "--port", str(port),
            "--worker-urls", f"http://127.0.0.1:{worker_port}", "--policy", "round_robin",
            "--log-level", "warning",
        ),
        "/health",
    )  # fmt: skip


def _environment_of(wanted: str) -> Path:
    """Return the Python of a separate environment, created when missing: its pins differ from Sluice's."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sluice-benchmarks"
    home = cache / wanted.replace("[proxy]", "").replace("==", "-")
    python, made = home / "bin" / "python", home / "made"
    if not made.exists():
        try:
            subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(home)], check=True)
            pip = [sys.executable, "-m", "pip", "--python", str(python)]
            subprocess.run([*pip, "install", "--quiet", wanted], check=True)
        except subprocess.CalledProcessError as error:
            raise NotAvailable(
                f"{wanted} could not be installed into {home} (exit code {error.returncode}); "
                "check pip's access to a package index, or leave it out with --only"
            ) from None
        made.touch()
    return python


def _sluice(
    folder: Path, port: int, worker_port: int, model: str, hosts: Sequence[str] = ("127.0.0.1",)
) -> Recipe:
    """Return Sluice's recipe, all stages: keys, a prompt version, budgets, admission, fallback, ledger, log.

    Admission lets requests wait for minutes: with 64 in flight the core is saturated on purpose, and
    throughput is measured, not how early Sluice would shed load.
    """
    urls = json.dumps([f"http://{host}:{worker_port}/v1" for host in hosts])
    (folder / "sluice.yaml").write_text(
        f"""
server: {{host: 127.0.0.1, port: {port}}}
auth: {{enabled: true}}
engine: {{kind: none, model: models/demo, tokenizer: models/demo}}
backends:
  worker: {{kind: openai, base_urls: {urls}, model: {model}}}
state: {{url: "sqlite:///{folder}/sluice.db"}}
ledger: {{url: "sqlite+aiosqlite:///{folder}/sluice.db"}}
admission: {{max_wait_ms: 600000}}
routing: {{file: {folder}/routing.yaml}}
prompts: {{folder: prompts}}
"""
    )
    (folder / "routing.yaml").write_text(
        """
routes:
  self_hosted_generation:
    backends: [{name: worker, weight: 100}]
    fallback: [response_cache, degraded]
    slo: {ttft_ms: 200, total_ms: 1400}
    prompt_version: chat-manga-2.1
"""
    )
    return Recipe(
        python_module("ops.cli", "serve", "--config", folder / "sluice.yaml"),
        "/ready",
        {"SLUICE_ADMIN_KEY": KEY},
    )
