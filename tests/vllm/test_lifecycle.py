"""vLLM's start and end, and its processes after a start or an end that fails."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.errors import EngineKilled, EngineStartError, InvalidConfig, ModelNotFound
from gateway.backends.port import BackendState, Work
from gateway.backends.vllm.compat.engine import VllmEngine
from gateway.backends.vllm.host import VllmHost
from gateway.backends.vllm.processes import below
from gateway.backends.vllm.start_errors import explain
from gateway.config.engine import EngineSection
from gateway.contracts.events import Delta
from gateway.contracts.values import Sampling
from resilience.failures import BackendFailure, FailureKind
from tests.conformance.harness import DEMO_MODEL, VLLM_OPTIONS, demo_tokenizer, on_gpu
from tests.conformance.vllm_in_process import RunningVllm
from tests.vllm.conftest import needs_vllm

pytestmark = needs_vllm


def make_host(**keys: Any) -> VllmHost:
    section = EngineSection.model_validate(
        {
            "kind": "vllm",
            "model": str(DEMO_MODEL),
            "max_model_len": 512,
            "block_size": 32,
            "max_num_seqs": 8,
            "kv_cache_bytes": 32 << 20,
            "enforce_eager": True,
            **VLLM_OPTIONS,
            **keys,
        }
    )
    return VllmHost(
        section,
        adapters_registered=False,
        defaults=Sampling(),
        token_bytes=demo_tokenizer().token_bytes,
        on_step=lambda preemptions: None,
        on_death=lambda error: None,
        new_seed=lambda: 0,
    )


async def until(met: Callable[[], object], timeout_s: float = 240.0) -> None:
    for _ in range(round(timeout_s / 0.02)):
        if met():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it did not come to pass")


async def ignore(delta: Delta) -> None:
    return


def work(max_tokens: int = 400) -> Work:
    sampling = Sampling(max_tokens=max_tokens, temperature=0.0, logit_bias={2: -100.0})
    return Work("gen_1", tuple(range(300, 340)), (), sampling)


@pytest.fixture(autouse=True)
async def nothing_stays() -> AsyncIterator[None]:
    """Fails if a process that the test started still runs two minutes after the test."""
    before = {process.pid for process in below()}
    yield
    await until(lambda: {process.pid for process in below()} <= before, 120)


@asynccontextmanager
async def started(host: VllmHost) -> AsyncIterator[VllmHost]:
    await host.start()
    try:
        yield host
    finally:
        await host.stop(10.0)


async def test_before_the_start_a_host_says_so_and_generates_nothing() -> None:
    host = make_host()
    backend = host.backend("local")
    assert backend.state is BackendState.STARTING
    assert (host.facts, host.figures(), backend.load) == (None, None, None)
    with pytest.raises(BackendFailure) as caught:
        await backend.generate(work(), ignore)
    assert caught.value.kind is FailureKind.ENGINE_DEAD
    await host.stop(1.0)
    assert backend.state is BackendState.STOPPED
    with pytest.raises(EngineStartError, match="stopped"):
        await host.start()


async def test_the_facts_are_vllms_real_values_and_a_stop_ends_running_requests() -> None:
    async with started(make_host(block_size=16)) as host:
        facts, figures = host.facts, host.figures()
        assert facts is not None and figures is not None
        size, device = (16, "cuda") if on_gpu() else (32, "cpu")  # 16 is not for vLLM's CPU attention
        assert facts.block_size == figures.load.block_size == size
        assert facts.max_model_len == 512
        assert facts.total_blocks == figures.load.total_blocks > 16
        assert facts.details["device"] == device
        assert figures.prompt_tokens == figures.generation_tokens == figures.prefix_queries == 0
        with pytest.raises(EngineStartError, match="once"):
            await host.start()

        backend = host.backend("local")
        async with asyncio.TaskGroup() as group:
            call = group.create_task(outcome(backend.generate(work(), ignore)))
            await until(lambda: (load := backend.load) is not None and load.running)
            await host.stop(10.0)
        assert call.result() is FailureKind.ENGINE_DEAD
    assert host.state is BackendState.STOPPED


def test_a_core_that_ends_while_vllm_looks_for_its_children_is_shut_down() -> None:
    done: list[str] = []

    class Core:
        def resources(self) -> None:
            done.append("sockets closed")

    class Ending:
        engine_core = Core()

        def shutdown(self, timeout: float) -> None:
            done.append("asked")
            if len(done) == 1:
                raise psutil.NoSuchProcess(1)

    engine = VllmEngine.__new__(VllmEngine)
    engine._llm = Ending()
    engine.shutdown(0.0)
    assert done == ["asked", "sockets closed", "asked"]


async def outcome(call: Any) -> FailureKind | None:
    try:
        await call
    except BackendFailure as failure:
        return failure.kind
    return None


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.skipif(on_gpu(), reason="one GPU's worker is in the core's process")
async def test_a_killed_worker_fails_running_requests_and_is_reported_once(running_vllm: RunningVllm) -> None:
    """It kills the shared engine, so it runs after the tests that use it. A killed core: test_restart.py."""
    host, deaths = running_vllm.host, running_vllm.deaths
    backend = running_vllm.specimen.backend
    async with asyncio.TaskGroup() as group:
        call = group.create_task(outcome(backend.generate(work(), ignore)))
        await until(lambda: (load := backend.load) is not None and load.running)
        [worker] = [
            one for one in below() if "Worker" in one.name() and one.parents()[1].pid == os.getpid()
        ]  # not the worker of a `vllm serve`
        os.kill(worker.pid, signal.SIGKILL)
    assert call.result() is FailureKind.ENGINE_DEAD
    await until(lambda: deaths, 60)
    assert backend.state is BackendState.DEAD
    assert len(deaths) == 1
    assert await outcome(backend.generate(work(), ignore)) is FailureKind.ENGINE_DEAD
    await host.stop(10.0)
    assert host.state is BackendState.DEAD


async def test_a_start_given_up_midway_leaves_nothing() -> None:
    """The core is being imported; test_restart.py gives up a start while the model is loaded."""
    before = {process.pid for process in below()}  # processes of a `vllm serve`
    host = make_host()
    async with asyncio.TaskGroup() as group:
        starting = group.create_task(host.start())
        await asyncio.sleep(0.5)
        starting.cancel()
        await host.stop(5.0)
    assert starting.cancelled()
    assert host.state is BackendState.STOPPED
    await until(lambda: {process.pid for process in below()} <= before, 60)


def broken(tmp_path: Path, **config: object) -> str:
    """A copy of the demo model with other values in its configuration."""
    folder = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return str(folder)


def cut(file: Path, length: int) -> None:
    file.write_bytes(file.read_bytes()[:length])


async def refusal(**keys: Any) -> EngineStartError:
    host = make_host(**keys)
    with pytest.raises(EngineStartError) as caught:
        await host.start()
    assert host.state is BackendState.STOPPED
    assert "\n" not in str(caught.value)
    return caught.value


async def test_a_folder_without_a_model_is_told_by_its_name(tmp_path: Path) -> None:
    error = await refusal(model=str(tmp_path / "gone"))
    assert isinstance(error, ModelNotFound)
    assert str(tmp_path / "gone") in str(error)


async def test_an_architecture_that_vllm_does_not_run_is_told(tmp_path: Path) -> None:
    error = await refusal(model=broken(tmp_path, architectures=["FancyForCausalLM"]))
    assert "FancyForCausalLM" in str(error)
    assert error.code == "unsupported_architecture"


async def test_a_length_beyond_the_models_is_told_with_the_one_allowed() -> None:
    error = await refusal(max_model_len=1_000_000)
    assert isinstance(error, InvalidConfig)
    assert "engine.max_model_len" in str(error)
    assert "1000000" in str(error)


async def test_a_pool_too_small_for_one_sequence_is_told_with_what_would_fit() -> None:
    error = await refusal(kv_cache_bytes=1 << 20, max_model_len=4096)
    assert "engine.max_model_len" in str(error) and "engine.kv_cache_bytes" in str(error)


def test_more_memory_than_there_is_is_told_with_what_there_is() -> None:
    """Calls the worker's own check directly: a worker needs half a minute to reach it."""
    from vllm.config import CacheConfig, CompilationConfig
    from vllm.v1.worker.cpu_worker import CPUWorker

    worker = object.__new__(CPUWorker)
    worker.cache_config = CacheConfig(kv_cache_memory_bytes=1 << 44)
    worker.compilation_config = CompilationConfig(mode=0)
    with pytest.raises(ValueError) as caught:
        worker.determine_available_memory()
    error = explain(caught.value, (), EngineSection(kind="vllm", model=str(DEMO_MODEL)))
    assert isinstance(error, InvalidConfig)
    assert "engine.kv_cache_bytes: 16384.0 GiB" in str(error)


async def test_truncated_weights_are_reported(tmp_path: Path) -> None:
    folder = broken(tmp_path)
    cut(Path(folder) / "model.safetensors", 4096)
    assert "fetch the model again" in str(await refusal(model=folder))


async def test_an_argument_that_vllm_does_not_have_is_told_with_a_close_one() -> None:
    error = await refusal(extra_args={"kv_cache_dtyp": "fp8"})
    assert "engine.extra_args.kv_cache_dtyp" in str(error)
    assert "kv_cache_dtype" in str(error)


async def test_a_core_that_is_killed_at_the_end_of_its_start_was_never_ready() -> None:
    host = make_host()
    noted = host._note_segments

    def killed() -> None:
        noted()
        for process in host.find_processes():
            process.kill()
        time.sleep(2)  # in a thread: the loop notices the end meanwhile

    host._note_segments = killed  # type: ignore[method-assign]
    with pytest.raises(EngineKilled):
        await host.start()
    assert host.state is BackendState.DEAD


async def test_more_threads_than_cores_are_told() -> None:
    assert "engine.num_threads" in str(await refusal(num_threads=1000))
