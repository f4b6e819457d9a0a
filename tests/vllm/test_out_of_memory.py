"""A real vLLM whose worker hangs, runs out of memory, or is killed for memory by the kernel."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from engine.errors import EngineDead
from gateway.backends.host import EngineHost
from gateway.backends.supervised import SupervisedHost
from gateway.backends.vllm.host import VllmHost
from gateway.config.engine import EngineSection
from gateway.contracts.values import Sampling
from resilience.failures import BackendFailure, FailureKind
from resilience.supervisor import EngineLost, EngineRestarting, Loss, Supervisor, SupervisorEvent
from tests.conformance.harness import DEMO_MODEL, VLLM_OPTIONS, demo_tokenizer
from tests.vllm.conftest import needs_vllm
from tests.vllm.test_lifecycle import ignore, until, work

pytestmark = needs_vllm

GROUPS = Path("/sys/fs/cgroup/memory")
BLOCKS = 200


@dataclass
class Rig:
    host: SupervisedHost
    events: list[tuple[float, SupervisorEvent]]

    async def inject(self, fault: str, *values: object) -> float:
        """Arms a fault and runs a step with it; returns the seconds until the loss was found."""
        vllm: Any = self.host._run.host
        await vllm._engine._llm.collective_rpc(fault, args=values)
        self.events.clear()
        began = time.monotonic()
        with pytest.raises(BackendFailure) as caught:
            await self.host.backend("local").generate(work(8), ignore)
        assert caught.value.kind is FailureKind.ENGINE_DEAD
        return next(at for at, event in self.events if isinstance(event, EngineLost)) - began

    async def wait_restarted(self) -> Loss:
        """Waits until the next engine answers; returns the reason of the previous engine's loss."""
        assert await self.host.wait_ready(240.0)
        await self.host.backend("local").generate(work(8), ignore)
        [reason] = [event.reason for _, event in self.events if isinstance(event, EngineRestarting)]
        return reason

    @property
    def blocks(self) -> int:
        facts = self.host.facts
        assert facts is not None
        return facts.total_blocks


@asynccontextmanager
async def supervised() -> AsyncIterator[Rig]:
    def make(
        *,
        on_step: Callable[[int], None],
        on_death: Callable[[EngineDead], None],
        kv_blocks: int | None = None,
    ) -> EngineHost:
        section = EngineSection(
            kind="vllm",
            model=str(DEMO_MODEL),
            max_model_len=512,
            block_size=32,
            max_num_seqs=8,
            num_blocks=kv_blocks or BLOCKS,
            enforce_eager=True,
            **VLLM_OPTIONS,
            extra_args={"worker_extension_cls": "tests.vllm.worker_faults.Faults"},
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

    events: list[tuple[float, SupervisorEvent]] = []
    host = SupervisedHost(
        make,
        supervisor=Supervisor(max_restarts_per_hour=5, hang_s=30.0, stopped_s=0.5),
        start_timeout_s=240.0,
        on_step=lambda preemptions: None,
        emit=lambda event: events.append((time.monotonic(), event)),
        clock=time.monotonic,
        sleep=lambda seconds: asyncio.sleep(0),
    )
    await host.start()
    async with asyncio.TaskGroup() as group:
        keeper = group.create_task(host.keep())
        await until(lambda: host._run.processes)
        yield Rig(host, events)
        keeper.cancel()
    await host.stop(10.0)


async def test_a_worker_without_memory_restarts_with_a_smaller_pool_and_a_hung_one_is_found_soon() -> None:
    async with supervised() as rig:
        assert rig.blocks == BLOCKS
        await rig.inject("run_out_of_memory_in_the_next_step")
        assert await rig.wait_restarted() is Loss.OUT_OF_MEMORY
        assert rig.blocks == int(BLOCKS * 0.7)

        long = replace(work(400), token_ids=tuple(range(300, 380)))
        await rig.host.backend("local").generate(long, ignore)  # the supervisor learns the step times
        found_s = await rig.inject("hang_in_the_next_step")
        assert found_s < 25, "1.3 s on an idle machine; the configured limit is 30"
        assert await rig.wait_restarted() is Loss.NO_PROGRESS
        assert rig.blocks == int(BLOCKS * 0.7), "a hang says nothing about memory"


@contextmanager
def control_group(size_bytes: int) -> Iterator[Path]:
    group = GROUPS / "sluice-test"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(size_bytes))
    except OSError:
        pytest.skip("control groups of memory cannot be made here")
    try:
        yield group
    finally:
        group.rmdir()


async def test_a_worker_that_the_kernel_kills_for_memory_is_told_from_one_killed_otherwise() -> None:
    with control_group(64 << 20) as group:
        async with supervised() as rig:
            await rig.inject("be_killed_for_memory_in_the_next_step", str(group))
            assert await rig.wait_restarted() is Loss.OUT_OF_MEMORY
            assert rig.blocks == int(BLOCKS * 0.7)

            for process in rig.host._run.processes:
                process.kill()
            await until(lambda: [one for _, one in rig.events if isinstance(one, EngineLost)][1:])
            await until(lambda: [one for _, one in rig.events if isinstance(one, EngineRestarting)][1:])
            last = [event.reason for _, event in rig.events if isinstance(event, EngineRestarting)][-1]
            assert last is Loss.EXITED
            assert await rig.host.wait_ready(240.0)
            assert rig.blocks == int(BLOCKS * 0.7)
