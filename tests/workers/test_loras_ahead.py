"""Adapters that workers load before a request needs them: pinned ones, and those that operators preload."""

from __future__ import annotations

import pytest

from gateway.backends.workers.loras import loaded_name
from resilience.failures import BackendFailure, FailureKind
from tests.workers.raw_worker import loras_of, until
from tests.workers.test_loras import MANGA, STYLE, LoraServer, ask, loading

PINNED, OTHER = loaded_name(MANGA, None), loaded_name(STYLE, None)


async def test_a_pinned_adapter_is_loaded_and_makes_no_room_for_others() -> None:
    worker = LoraServer()
    async with loading(worker, max_loaded_adapters=1) as backend:
        [held] = loras_of(backend)
        await held.keep([MANGA, STYLE], ["manga_v3"], [])
        assert (worker.listed, held.places) == ({PINNED}, 1)
        with pytest.raises(BackendFailure, match=r"in use or pinned \(1 pinned\)") as full:
            await ask(backend, STYLE)
        assert (full.value.kind, full.value.counts) == (FailureKind.THROTTLED, False)
        await held.keep([MANGA, STYLE], [], [])
        assert await ask(backend, STYLE) == "Hello"
        assert worker.listed == {OTHER}


async def test_a_retired_adapter_goes_when_nobody_uses_it_and_a_fixed_one_is_never_loaded() -> None:
    worker = LoraServer("house-style")
    async with loading(worker, adapters={"style_v1": "house-style"}) as backend:
        [held] = loras_of(backend)
        assert await ask(backend) == "Hello"
        await held.preload(STYLE)
        await held.keep([STYLE], ["style_v1"], [])
        async with held.hold(MANGA):
            await held.keep([], [], ["manga_v3"])
            assert worker.listed == {PINNED, "house-style"}
        await held.keep([], [], ["manga_v3"])
        assert worker.listed == {"house-style"}
    assert [name for name, _ in worker.loads] == [PINNED]


async def test_a_worker_that_came_back_empty_gets_the_pinned_ones_again() -> None:
    worker = LoraServer()
    async with loading(worker) as backend:
        [held] = loras_of(backend)
        await held.keep([MANGA], ["manga_v3"], [])
        worker.listed.clear()
        held.forget()
        await held.keep([MANGA], ["manga_v3"], [])
        assert worker.listed == {PINNED}
        assert await ask(backend) == "Hello"
    assert [name for name, _ in worker.loads] == [PINNED, PINNED]


async def test_a_failed_preload_raises_and_a_pinned_adapter_waits_for_its_next_retry() -> None:
    worker = LoraServer()
    worker.broken = b"500"
    async with loading(worker) as backend:
        [held] = loras_of(backend)
        with pytest.raises(BackendFailure, match="the worker answered 500"):
            await held.preload(MANGA)
        for _ in range(3):
            await held.keep([MANGA], ["manga_v3"], [])
        assert len(worker.loads) == 1
        worker.broken = b""
        await held.preload(MANGA)  # an operator's preload does not wait for the next retry
        assert worker.listed == {PINNED}


async def test_only_workers_in_service_are_told_and_one_that_is_gone_is_a_failure() -> None:
    worker = LoraServer()
    async with loading(worker) as backend:
        [held] = loras_of(backend)
        await worker.die()
        with pytest.raises(BackendFailure):
            await held.preload(MANGA)
        await until(lambda: loras_of(backend) == [])
