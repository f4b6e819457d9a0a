"""The backends under test, each set up as an operator would."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import yaml

from adapters.values import Adapter
from engine.values import EngineConfig
from gateway.backends.embedded import EmbeddedBackend
from gateway.backends.embedded_host import EmbeddedHost
from gateway.backends.embedded_vectors import ids_alone
from gateway.backends.port import BackendState, Continue
from gateway.backends.workers.load import read_figures
from gateway.backends.workers.pool_model import ModelReading
from gateway.backends.workers.tokenizer_check import TokenizerCheck
from gateway.config.backends import OpenAIBackend
from gateway.prompts.text import sampling_defaults
from gateway.wiring.workers import make_workers
from resilience.turns import Turns
from tests.conformance.harness import (
    ADAPTERS,
    BLOCK_SIZE,
    DEMO_MODEL,
    MAX_LORA_RANK,
    MAX_MODEL_LEN,
    VLLM_DTYPE,
    VLLM_OPTIONS,
    Specimen,
    demo_tokenizer,
    make_adapters,
    on_gpu,
)
from tests.fork_server import ForkedPopen
from tests.integration.live import ADMIN_KEY, gateway
from tests.scripted import Script, ScriptedBackend
from tests.workers.raw_worker import in_use

HAS_VLLM = importlib.util.find_spec("vllm") is not None
START_TIMEOUT_S = 400.0
MakeSpecimen = Callable[[Path], AbstractAsyncContextManager[Specimen]]


@asynccontextmanager
async def scripted(folder: Path) -> AsyncIterator[Specimen]:
    """Run the fake backend, whose answers are scripted."""
    backend = ScriptedBackend(scripts=[Script(delay_s=0.005)], features=ScriptedBackend().features)

    async def idle() -> bool:
        return backend.active == 0

    yield Specimen(backend, idle, computes=False, counts_cached=False, returns_ids=False)


@asynccontextmanager
async def embedded(folder: Path) -> AsyncIterator[Specimen]:
    """Run the embedded engine in its own process."""
    tokenizer = demo_tokenizer()
    host = EmbeddedHost(
        EngineConfig(
            str(DEMO_MODEL),
            max_model_len=MAX_MODEL_LEN,
            block_size=BLOCK_SIZE,
            num_blocks=512,
            num_threads=1,
            max_loras=2,
            seed=0,
        ),
        partial(
            EmbeddedBackend,
            model="demo",
            defaults=sampling_defaults(DEMO_MODEL),
            token_bytes=tokenizer.token_bytes,
            encode=ids_alone,
            calls_tools=True,
        ),
        on_step=lambda preemptions: None,
        on_death=lambda error: None,
    )
    await host.start()
    try:

        async def idle() -> bool:
            figures = host.figures()
            load = figures and figures.load
            return load is not None and not (load.running or load.waiting or load.kv_usage)

        yield Specimen(host.backend("local"), idle, make_adapters(folder), tokenizer)
    finally:
        await host.stop(5.0)


@asynccontextmanager
async def sluice_worker(folder: Path) -> AsyncIterator[Specimen]:
    """Run a pool of one worker, which is another Sluice with the embedded engine."""
    adapters = make_adapters(folder)
    listed = [{"id": a.adapter_id, "base_model": "demo", "path": a.path} for a in adapters.values()]
    (folder / "adapters.yaml").write_text(yaml.safe_dump({"adapters": listed}))
    env = {
        "SLUICE_ADAPTERS__FILE": str(folder / "adapters.yaml"),
        "SLUICE_ENGINE__MAX_MODEL_LEN": str(MAX_MODEL_LEN),
        "SLUICE_ENGINE__BLOCK_SIZE": str(BLOCK_SIZE),
        "SLUICE_ENGINE__MAX_LORAS": "2",
        "SLUICE_ADMISSION__MAX_WAIT_MS": "60000",
    }
    with contextlib.ExitStack() as stack:
        live = await asyncio.to_thread(stack.enter_context, gateway(folder, **env))
        async with remote(live.url, "sluice", adapters, model="demo") as specimen:
            yield replace(specimen, returns_ids=False)


@asynccontextmanager
async def vllm_worker(folder: Path, url: str, prompt: str) -> AsyncIterator[Specimen]:
    """Run a pool of one worker, which is a real ``vllm serve``."""
    async with remote(url, "vllm", make_adapters(folder), model="base", prompt=prompt) as specimen:
        if prompt == "auto":  # the check found that tokenizer and template are the gateway's
            assert Continue.TOKENS in specimen.backend.continues
        yield replace(specimen, exact_ids=prompt == "auto")


@asynccontextmanager
async def remote(
    url: str,
    dialect: str,
    adapters: Mapping[str, Adapter],
    *,
    model: str,
    options: Mapping[str, object] = MappingProxyType({}),
    **changes: Any,
) -> AsyncIterator[Specimen]:
    """Run a pool of one worker at ``url``."""
    tokenizer = demo_tokenizer()
    section = OpenAIBackend.model_validate(
        {
            "kind": "openai",
            "base_urls": [f"{url}/v1"],
            "model": model,
            "dialect": dialect,
            "api_key_env": "WORKER_KEY",
            "send_priority": True,
            "metrics_interval_seconds": 1.0,
            "probe_timeout_seconds": 60,
            **changes,
            **options,
        }
    )
    serving = make_workers(
        "worker",
        section,
        reading=ModelReading(tokenizer.token_bytes, TokenizerCheck.of(tokenizer)),
        clock=time.monotonic,
        turns=Turns(),
        environ={"WORKER_KEY": ADMIN_KEY},
    )
    [backend] = serving.serving
    async with asyncio.TaskGroup() as group, httpx.AsyncClient(timeout=60) as client:

        async def idle() -> bool:
            answer = await client.get(f"{url}/metrics")
            figures = read_figures(answer.text)
            assert figures is not None
            here = any(one.in_flight for one in serving.status()) or in_use(backend)
            load = figures.load
            return not (here or load.running or load.waiting or load.kv_usage)

        loops = group.create_task(serving.run())
        for _ in range(2400):
            if backend.state is BackendState.READY:
                break
            await asyncio.sleep(0.05)
        assert backend.state is BackendState.READY
        yield Specimen(backend, idle, adapters, tokenizer)
        loops.cancel()


@contextlib.contextmanager
def vllm_serve(folder: Path, **options: str) -> Iterator[str]:
    """Run a real ``vllm serve`` of the demo model on a free port; yield its URL without the path."""
    adapters = make_adapters(folder)
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    flags = {
        "--model": str(DEMO_MODEL),
        "--served-model-name": "base",
        "--host": "127.0.0.1",
        "--port": str(port),
        "--api-key": ADMIN_KEY,
        "--dtype": VLLM_DTYPE,
        "--max-model-len": str(MAX_MODEL_LEN),
        "--block-size": str(BLOCK_SIZE),
        "--max-num-seqs": "32",
        # vLLM fills this memory with zeros at its start: a gigabyte takes seconds.
        "--kv-cache-memory-bytes": str(64 << 20),
        "--max-lora-rank": str(MAX_LORA_RANK),
        "--scheduling-policy": "priority",
        # Otherwise the tiny model fills JSON with white space.
        "--structured-outputs-config": '{"backend": "xgrammar", "disable_any_whitespace": true}',
        "--tool-call-parser": "hermes",
        **({"--gpu-memory-utilization": str(VLLM_OPTIONS["gpu_memory_utilization"])} if on_gpu() else {}),
        **options,
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += [part for pair in flags.items() for part in pair]
    command += ["--enable-prompt-tokens-details", "--enforce-eager", "--enable-auto-tool-choice"]
    command += ["--enable-lora", "--lora-modules"]
    command += [f"{name}={adapters[name].path}" for name in ADAPTERS]
    env = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_ENFORCE_STRICT_TOOL_CALLING": "1",  # the default; a vLLM in this process sets another value
    }
    log = folder / f"vllm-{port}.log"
    with log.open("w") as out:
        process = ForkedPopen(command, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/health", timeout=60).status_code == 200:
                    break
            time.sleep(0.2)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the engine's process, if it is still alive
