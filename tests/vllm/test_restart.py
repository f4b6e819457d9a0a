"""A hung vLLM is killed by its supervisor and started again in the same process; no call is left waiting."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

from engine.errors import EngineDead
from gateway.backends.host import EngineHost
from gateway.backends.port import BackendState
from gateway.backends.supervised import SupervisedHost
from gateway.backends.vllm.host import VllmHost
from gateway.backends.vllm.processes import below
from gateway.config.engine import EngineSection
from gateway.contracts.events import Delta
from gateway.contracts.values import Sampling
from resilience.failures import BackendFailure, FailureKind
from resilience.supervisor import EngineLost, EngineRestarted, Loss, Supervisor, SupervisorEvent
from tests.conformance.harness import DEMO_MODEL, VLLM_OPTIONS, demo_tokenizer, on_gpu
from tests.vllm.conftest import needs_vllm
from tests.vllm.test_lifecycle import ignore, until, work

pytestmark = needs_vllm


def shared() -> set[str]:
    """Names of the shared memory segments on this machine."""
    return {path.name for path in Path("/dev/shm").glob("psm_*")}


def shared_segments(excluded: set[int]) -> set[str]:
    """Shared memory segments of the processes below this one, except ``excluded``; those of others may change."""
    processes = [process for process in below() if process.pid not in excluded]
    maps = [Path(f"/proc/{process.pid}/maps").read_text() for process in processes]
    return set(re.findall(r"/dev/shm/(psm_\w+)", "\n".join(maps)))


def make(
    *, on_step: Callable[[int], None], on_death: Callable[[EngineDead], None], kv_blocks: int | None = None
) -> EngineHost:
    section = EngineSection(
        kind="vllm",
        model=str(DEMO_MODEL),
        max_model_len=512,
        block_size=32,
        max_num_seqs=8,
        kv_cache_bytes=32 << 20,
        enforce_eager=True,
        **VLLM_OPTIONS,
    )
    return VllmHost(
        section,
        adapters_registered=False,
        defaults=Sampling(),
        token_bytes=demo_tokenizer().token_bytes,
        on_step=on_step,
        on_death=on_death,
        new_seed=lambda: 0,
    )


async def test_a_hung_core_is_replaced_in_the_same_process_and_a_dead_one_is_noticed_when_idle() -> None:
    events: list[tuple[float, SupervisorEvent]] = []
    host = SupervisedHost(
        make,
        supervisor=Supervisor(max_restarts_per_hour=5, hang_s=60.0, stopped_s=0.5),
        start_timeout_s=240.0,
        on_step=lambda preemptions: None,
        emit=lambda event: events.append((time.monotonic(), event)),
        clock=time.monotonic,
    )
    backend = host.backend("local")
    before = {process.pid for process in below()}
    began = asyncio.Event()

    async def note_start(delta: Delta) -> None:
        began.set()

    async def broken() -> FailureKind | None:
        try:
            await backend.generate(work(), note_start)
        except BackendFailure as failure:
            return failure.kind
        return None

    def lost_for() -> list[Loss]:
        return [event.reason for _, event in events if isinstance(event, EngineLost)]

    await host.start()
    async with asyncio.TaskGroup() as group:
        keeper = group.create_task(host.keep())
        call = group.create_task(broken())
        await began.wait()
        counted = host.figures()
        segments = shared_segments(before)
        assert segments or on_gpu()
        [core] = [each for each in below() if each.pid not in before and "EngineCore" in each.name()]
        os.kill(core.pid, signal.SIGSTOP)
        struck = time.monotonic()
        await until(lambda: events, 50)
        assert await call is FailureKind.ENGINE_DEAD
        lost_at, lost = events[0]
        assert isinstance(lost, EngineLost) and lost.reason is Loss.STOPPED
        assert lost_at - struck < 20, "0.75 s when idle; a hang takes 60"
        assert time.monotonic() - lost_at < 10, "the call waits for nothing"
        assert backend.state is BackendState.STARTING
        assert await backend.wait_ready(240.0)
        assert [event for _, event in events if isinstance(event, EngineRestarted)]
        assert (await backend.generate(work(8), ignore)).usage.output_tokens == 8
        now = host.figures()
        assert counted is not None and now is not None
        assert shared_segments(before) or on_gpu()
        assert not shared() & segments, "the shared memory of the killed one is freed"
        assert (now.prompt_tokens or 0) > (counted.prompt_tokens or 0), "counters go on"

        [core] = [each for each in below() if each.pid not in before and "EngineCore" in each.name()]
        os.kill(core.pid, signal.SIGKILL)
        await until(lambda: lost_for() == [Loss.STOPPED, Loss.EXITED], 60)
        assert backend.state is BackendState.STARTING, "a death is noticed with nothing under way"
        # One GPU's worker is in the core's process, which shares no memory with others.
        loads = "EngineCore" if on_gpu() else "Worker"
        await until(lambda: [one for one in below() if one.pid not in before and loads in one.name()])
        keeper.cancel()  # gives up the start while the model is loaded
    await host.stop(10.0)
    await until(lambda: {process.pid for process in below()} <= before, 60)
