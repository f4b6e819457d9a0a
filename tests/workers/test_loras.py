"""Adapters that the pool loads on its workers while they serve, by vLLM's endpoints."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from pydantic import ValidationError

from adapters.errors import AdapterError
from adapters.values import Adapter
from gateway.backends.workers.backend import WorkersBackend
from gateway.backends.workers.client import Whole
from gateway.backends.workers.inspection import read_models
from gateway.backends.workers.loras import loaded_name, path_at_worker
from gateway.backends.workers.pool_model import ModelReading
from gateway.config.backends import OpenAIBackend
from gateway.wiring.workers import make_workers
from resilience.failures import BackendFailure, FailureKind
from resilience.turns import Turns
from tests.conformance.harness import collect
from tests.workers.raw_worker import (
    QUICK,
    RawWorker,
    Request,
    answers,
    make,
    pool,
    state_of,
    token_bytes,
    until,
    work,
)

MANGA = Adapter("manga_v3", 1, "base", "/store/aaa")
STYLE = Adapter("style_v1", 2, "base", "/store/bbb")
ONCE_MORE = Adapter("manga_v3", 3, "base", "/store/ccc")
GOOD = answers("Hello")


class LoraServer(RawWorker):
    """Does what ``vllm serve`` does with ``VLLM_ALLOW_RUNTIME_LORA_UPDATING``."""

    def __init__(self, *listed: str, allowed: bool = True, load_s: float = 0.0) -> None:
        super().__init__([self.behave], models=self.list_models)
        self.listed = set(listed)
        self.ghosts: set[str] = set()  # listed, and yet not served
        self.loads: list[tuple[str, str]] = []
        self.unloads: list[str] = []
        self.asked: list[str] = []
        self.broken = b""
        self.allowed = allowed
        self.load_s = load_s
        self.may_load, self.may_unload, self.may_answer = (asyncio.Event() for _ in range(3))
        self.may_load.set()
        self.may_unload.set()
        self.may_answer.set()

    def list_models(self) -> bytes:
        return json.dumps({"data": [{"id": one} for one in ("base", *sorted(self.listed))]}).encode()

    async def behave(self, request: Request) -> None:
        if request.path.endswith("_lora_adapter"):
            status, body = await self.change(request)
            await request.whole(status, body)
            return
        name = request.body["model"]
        self.asked.append(name)
        if name != "base" and name not in self.listed - self.ghosts:
            await request.whole(404, b'{"error": {"type": "NotFoundError", "param": "model", "code": 404}}')
            return
        await self.may_answer.wait()
        await answers("Hello")(request)

    async def change(self, request: Request) -> tuple[int, bytes]:
        if not self.allowed:
            return 404, b'{"detail": "Not Found"}'
        name = request.body["lora_name"]
        if request.path == "/v1/unload_lora_adapter":
            self.unloads.append(name)
            await self.may_unload.wait()
            known = name in self.listed
            self.listed.discard(name)
            return (200, b"Success") if known else (404, b'{"error": {"code": 404}}')
        self.loads.append((name, request.body["lora_path"]))
        await asyncio.sleep(self.load_s)
        await self.may_load.wait()
        if self.broken:
            return int(self.broken[:3]), b'{"error": {"message": "no", "code": 1}}'
        if name in self.listed:
            return 400, b'{"error": {"message": "has already been loaded", "code": 400}}'
        self.listed.add(name)
        return 200, b"Success"


@asynccontextmanager
async def loading(*workers: LoraServer, **changes: Any) -> AsyncIterator[WorkersBackend]:
    async with pool(*workers, load_adapters=True, **changes) as backend:
        yield backend


async def ask(backend: WorkersBackend, adapter: Adapter | None = MANGA) -> str:
    return (await collect(backend, work(adapter=adapter))).text


async def refused(backend: WorkersBackend, adapter: Adapter = MANGA) -> BackendFailure:
    with pytest.raises(BackendFailure) as caught:
        await ask(backend, adapter)
    return caught.value


async def test_an_adapter_is_loaded_once_however_many_ask_for_it_at_once() -> None:
    worker = LoraServer(load_s=0.05)
    async with loading(worker) as backend:
        async with asyncio.TaskGroup() as group:
            answer = [group.create_task(ask(backend)) for _ in range(8)]
        assert {task.result() for task in answer} == {"Hello"}
    name = loaded_name(MANGA, None)
    assert worker.loads == [(name, "/store/aaa")]
    assert worker.asked == [name] * 8


async def test_an_adapter_with_a_fixed_name_is_never_loaded() -> None:
    worker = LoraServer("house-manga")
    async with loading(worker, adapters={"manga_v3": "house-manga"}) as backend:
        assert await ask(backend) == "Hello"
        assert await ask(backend, None) == "Hello"
    assert (worker.loads, worker.asked) == ([], ["house-manga", "base"])


async def test_nothing_is_loaded_unless_the_configuration_says_so() -> None:
    worker = LoraServer()
    async with pool(worker) as backend:
        failure = await refused(backend)
    assert (failure.kind, failure.param) == (FailureKind.MODEL_NOT_FOUND, "adapter_id")
    assert (worker.loads, worker.asked) == ([], ["manga_v3"])


async def test_new_weights_under_an_old_id_get_a_name_that_no_cache_knows() -> None:
    worker = LoraServer()
    async with loading(worker) as backend:
        for adapter in (MANGA, ONCE_MORE, MANGA):
            await ask(backend, adapter)
    old, new = loaded_name(MANGA, None), loaded_name(ONCE_MORE, None)
    assert old != new
    assert worker.asked == [old, new, old]
    assert worker.listed == {old}, "names that nothing leads to are taken back"


async def test_old_weights_whose_unloading_was_cancelled_are_unloaded_by_the_next_load() -> None:
    worker = LoraServer()
    async with loading(worker) as backend:
        await ask(backend)
        worker.may_unload.clear()
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(ask(backend, ONCE_MORE))
            await until(lambda: bool(worker.unloads))
            asked.cancel()
        worker.may_unload.set()
        await until(lambda: loaded_name(MANGA, None) not in worker.listed)
        worker.listed.add(loaded_name(MANGA, None))  # as if the request had not reached the worker
        assert await ask(backend, ONCE_MORE) == "Hello"
    assert worker.listed == {loaded_name(ONCE_MORE, None)}


async def test_an_adapter_that_a_worker_has_forgotten_is_loaded_again_for_the_same_request() -> None:
    worker = LoraServer()
    async with loading(worker, probe_interval_seconds=60) as backend:
        await ask(backend)
        worker.listed.clear()
        async with asyncio.TaskGroup() as group:
            answer = [group.create_task(ask(backend)) for _ in range(4)]
        assert {task.result() for task in answer} == {"Hello"}
    assert len(worker.loads) == 2


async def test_a_worker_that_never_knows_what_it_loads_is_asked_twice_and_no_more() -> None:
    worker = LoraServer()
    worker.ghosts.add(loaded_name(MANGA, None))
    async with loading(worker, probe_interval_seconds=60) as backend:
        failure = await refused(backend)
        assert (failure.kind, failure.param) == (FailureKind.MODEL_NOT_FOUND, "adapter_id")
        assert await ask(backend, None) == "Hello"
        assert state_of(backend)[0].ejections == 0
    assert len(worker.loads) == 2
    assert worker.asked == [loaded_name(MANGA, None)] * 2 + ["base"]


async def test_requests_go_where_their_adapter_is_and_load_it_nowhere_else() -> None:
    workers = [LoraServer() for _ in range(4)]
    name = loaded_name(MANGA, None)
    workers[2].listed.add(name)
    async with loading(*workers) as backend:
        await until(lambda: any(name in worker.adapters for worker in backend._workers.values()))
        for _ in range(6):
            await ask(backend)
    assert [len(worker.asked) for worker in workers] == [0, 0, 6, 0]
    assert not any(worker.loads for worker in workers)


async def test_a_worker_that_lists_an_adapter_no_longer_is_told_to_load_it_before_it_is_asked() -> None:
    worker = LoraServer()
    async with loading(worker) as backend:
        await ask(backend)
        worker.listed.clear()
        [inside] = backend._workers.values()
        await until(lambda: loaded_name(MANGA, None) not in inside.adapters)
        await ask(backend)
    assert len(worker.loads) == 2
    assert len(worker.asked) == 2, "no request was refused"


async def test_what_another_gateway_has_loaded_meanwhile_is_used() -> None:
    worker = LoraServer()
    async with loading(worker, probe_interval_seconds=60) as backend:
        worker.listed.add(loaded_name(MANGA, None))
        assert await ask(backend) == "Hello"
    assert len(worker.loads) == 1, "it was answered that it is there already"


async def test_an_idle_adapter_is_unloaded_to_make_room() -> None:
    worker = LoraServer()
    async with loading(worker, max_loaded_adapters=1) as backend:
        await ask(backend, MANGA)
        await ask(backend, STYLE)
    assert worker.unloads == [loaded_name(MANGA, None)]
    assert worker.listed == {loaded_name(STYLE, None)}


async def test_an_adapter_in_use_is_never_unloaded() -> None:
    worker = LoraServer()
    worker.may_answer.clear()
    async with loading(worker, max_loaded_adapters=1) as backend, asyncio.TaskGroup() as group:
        first = group.create_task(ask(backend, MANGA))
        await until(lambda: bool(worker.asked))
        failure = await refused(backend, STYLE)
        assert (failure.kind, failure.param) == (FailureKind.THROTTLED, "adapter_id")
        worker.may_answer.set()
        assert await first == "Hello"
    assert not worker.unloads


async def test_a_worker_that_may_not_load_says_what_to_start_it_with_and_serves_the_base_model() -> None:
    worker = LoraServer(allowed=False)
    async with loading(worker) as backend:
        failure = await refused(backend)
        assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in str(failure)
        assert (failure.kind, failure.param) == (FailureKind.MODEL_NOT_FOUND, "adapter_id")
        await refused(backend)
        assert len(worker.requests) == 1, "it is not asked again at once"
        assert await ask(backend, None) == "Hello"
        assert state_of(backend)[0].ejections == 0


@pytest.mark.parametrize("status", [404, 500])
async def test_an_adapter_that_the_worker_cannot_load_fails_alone(status: int) -> None:
    worker = LoraServer()
    async with loading(worker) as backend:
        worker.broken = str(status).encode()
        failure = await refused(backend)
        assert (failure.kind, failure.param) == (FailureKind.MODEL_NOT_FOUND, "adapter_id")
        assert "/store" not in str(failure)
        worker.broken = b""
        assert await ask(backend, STYLE) == "Hello"


async def test_a_worker_that_dies_while_it_loads_is_replaced_by_another() -> None:
    dying, living = LoraServer(), LoraServer()
    dying.may_load.clear()
    async with loading(dying, living, affinity=False) as backend, asyncio.TaskGroup() as group:
        answer = [group.create_task(ask(backend)) for _ in range(4)]
        await until(lambda: bool(dying.loads))
        await dying.die()
        dying.may_load.set()
        assert [await one for one in answer] == ["Hello"] * 4
    assert not dying.asked


async def test_after_a_workers_restart_its_adapters_are_loaded_again() -> None:
    worker = LoraServer()
    async with loading(worker) as backend:
        await ask(backend)
        await worker.die()
        await until(lambda: state_of(backend)[0].state == "ejected")
        worker.listed.clear()
        await worker.start()
        await until(lambda: state_of(backend)[0].state == "in_service")
        assert await ask(backend) == "Hello"
    assert len(worker.loads) == 2


async def test_the_files_of_an_adapter_are_fetched_before_the_worker_loads_it() -> None:
    worker, seen = LoraServer(), []

    async def bring(adapter: Adapter) -> None:
        seen.append((adapter.adapter_id, len(worker.loads)))
        if adapter is STYLE:
            raise AdapterError("its source is away")

    await worker.start()
    section = OpenAIBackend.model_validate(
        {"kind": "openai", "base_urls": [worker.url], "model": "base", "load_adapters": True, **QUICK}
    )
    clock = asyncio.get_running_loop().time
    serving = make_workers(
        "worker",
        section,
        reading=ModelReading(token_bytes),
        clock=clock,
        turns=Turns(),
        environ={},
        bring=bring,
    )
    [backend] = serving.serving
    async with asyncio.TaskGroup() as group:
        loops = group.create_task(serving.run())
        await until(lambda: state_of(backend)[0].state == "in_service")
        await ask(backend)
        failure = await refused(backend, STYLE)
        loops.cancel()
    await worker.die()
    assert seen == [("manga_v3", 0), ("style_v1", 1)]
    assert failure.param == "adapter_id" and "not on this machine" in str(failure)
    assert len(worker.loads) == 1


def test_a_worker_gets_the_path_of_an_adapter_as_it_is_mounted_there() -> None:
    assert path_at_worker(MANGA, None) == "/store/aaa"
    assert path_at_worker(MANGA, "/mnt/adapters/") == "/mnt/adapters/aaa"
    elsewhere = Adapter("manga_v3", 7, "base", "/home/other/aaa")
    assert loaded_name(MANGA, "/mnt/adapters") == loaded_name(elsewhere, "/mnt/adapters")


@pytest.mark.parametrize("body", [b"", b"<html>", b'{"data": 3}', b'{"data": [{"id": 4}]}', b"\xff"])
def test_an_invalid_list_of_models_is_ignored(body: bytes) -> None:
    assert Whole(200, body).read(read_models) is None


async def test_only_workers_of_vllms_dialect_can_be_told_to_load() -> None:
    with pytest.raises(ValidationError, match=r"load_adapters.*'sluice'.*allowed: 'vllm'"):
        make("http://127.0.0.1:1/v1", load_adapters=True, dialect="sluice")
