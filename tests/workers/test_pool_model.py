"""A pool whose configuration names no model serves what its workers list."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence, Set
from contextlib import asynccontextmanager
from typing import Any

import pytest
import structlog

from gateway.backends.port import BackendState, PartialAnswer
from gateway.backends.workers.inspection import ServedModel, offers_of
from gateway.backends.workers.pool_model import ModelReading, PoolModel
from gateway.backends.workers.serving_pool import ServingPool
from gateway.backends.workers.tokenizer_check import SAMPLES, TokenizerCheck
from gateway.backends.workers.worker_tokens import Ask
from gateway.contracts.features import TOOL_FEATURES, Feature
from resilience.failures import BackendFailure, FailureKind
from tests.conformance.harness import collect
from tests.workers.raw_worker import (
    SAMPLES_OF_BYTES,
    RawWorker,
    Request,
    answers,
    follow,
    make_pool,
    pool,
    refuses,
    token_bytes,
    until,
    work,
)

BIG = ServedModel("big", 4096, "/models/big")
SMALL = ServedModel("small", 1024, "/models/small")
LORA = ServedModel("style", 4096, "/loras/style", parent="big")
HOSTED = ServedModel("gpt-x")
# The list of a Sluice: an alias comes first; adapters and names of backends are no models.
SLUICE = [
    ServedModel("auto", 4096, "demo", owned_by="sluice"),
    ServedModel("demo", 4096, "demo", owned_by="sluice"),
    ServedModel("local", 4096, "demo", parent="demo", owned_by="sluice"),
    ServedModel("other", None, "other", owned_by="sluice"),
]


@pytest.mark.parametrize(
    ("models", "configured", "offered"),
    [
        ([BIG, LORA], None, (BIG,)),
        (SLUICE, None, (SLUICE[1], SLUICE[3])),
        ([ServedModel("a", 9, "/m"), ServedModel("b", 9, "/m")], None, (ServedModel("a", 9, "/m"),)),
        ([BIG, SMALL], None, (BIG, SMALL)),
        ([ServedModel(f"m{n}") for n in range(257)], None, "lists 257 models; name one as model, 256 or fewer are served without"),
        ([LORA], None, "lists no model; load one first"),
        (None, None, "does not list its models; name one as model"),
        ([BIG, SMALL], "small", [SMALL]),
        ([BIG], "small", "serves big, and not small"),
        ([HOSTED], "small", None),
        (None, "small", None),
    ],
)  # fmt: skip
def test_what_a_pool_uses_of_a_workers_list(
    models: Sequence[ServedModel] | None, configured: str | None, offered: object
) -> None:
    assert offers_of(models, configured) == offered


class Reader:
    """Records each model that became known, with its length."""

    def __init__(self, checks: Mapping[str, TokenizerCheck] | None = None) -> None:
        self.found: list[tuple[str, int | None]] = []
        self.checks = checks or {}

    async def __call__(self, found: ServedModel, length: int | None, ask: Ask | None) -> ModelReading:
        self.found.append((found.id, length))
        return ModelReading(lambda token: bytes([token]), self.checks.get(found.id, TokenizerCheck()))


async def test_the_shortest_length_of_the_workers_holds() -> None:
    reader = Reader()
    model = PoolModel("pool", reader, ModelReading(bytes))
    await model.listed("a", BIG)
    await model.listed("b", ServedModel("big", 2048, "/models/big"))
    await model.listed("a", BIG)
    assert (model.id, reader.found) == ("big", [("big", 4096), ("big", 2048)])


def listing(*models: tuple[str, int]) -> bytes:
    return json.dumps({"data": [{"id": name, "max_model_len": length} for name, length in models]}).encode()


def names(pool: ServingPool) -> list[tuple[str, str, bool]]:
    """The names and models of a pool's backends, and whether a worker serves each."""
    return [(one.name, one.model, one.state is BackendState.READY) for one in pool.serving]


@asynccontextmanager
async def discovering(
    *workers: RawWorker, checks: Mapping[str, TokenizerCheck] | None = None, **changes: Any
) -> AsyncIterator[tuple[ServingPool, Reader, list[Set[str]]]]:
    """Run a pool that learns its models from the workers; yields it, its reader, and the removed models."""
    reader, gone = Reader(checks), list[Set[str]]()
    for worker in workers:
        await worker.start()
    serving = make_pool(
        *[one.url for one in workers],
        read=reader,
        changed=lambda pool, models: gone.append(models),
        **{"model": None, **changes},
    )
    async with asyncio.TaskGroup() as group:
        loops = group.create_task(serving.run())
        await until(lambda: all(one.state == "in_service" for one in serving.status()))
        yield serving, reader, gone
        loops.cancel()
    for worker in workers:
        await worker.die()


async def test_workers_of_several_models_serve_each_of_them() -> None:
    both = RawWorker([answers("a")] * 2, models=lambda: listing(("big", 4096), ("small", 1024)))
    one = RawWorker([answers("b")] * 4, models=lambda: listing(("small", 512)))
    async with discovering(both, one, affinity=False) as (serving, reader, _):
        assert names(serving) == [("worker/big", "big", True), ("worker/small", "small", True)]
        assert sorted(reader.found)[:2] == [("big", 4096), ("small", 512)]
        big, small = serving.serving
        assert (await collect(big, work())).text == "a" and (await collect(big, work())).text == "a"
        assert "b" in {(await collect(small, work())).text for _ in range(2)}
        assert {request.body["model"] for request in one.requests} == {"small"}
        assert [request.body["model"] for request in both.requests][:2] == ["big", "big"]


@pytest.mark.parametrize(
    ("paths", "reason"),
    [
        ({"/v1/models"}, "refuses the key; set api_key_env or api_key_file to where its key is"),
        (set(), "does not list its models (status 404); does base_urls end in /v1? If so, name one as model"),
    ],
)
async def test_without_a_list_of_models_the_reason_is_what_the_worker_answered(
    paths: set[str], reason: str
) -> None:
    worker = RawWorker([], keyed=frozenset(paths))
    await worker.start()
    serving = make_pool(worker.url, model=None)
    with structlog.testing.capture_logs() as logs:
        async with asyncio.TaskGroup() as group:
            loops = group.create_task(serving.run())
            await until(lambda: reason in str(serving.serving[0].absence))
            loops.cancel()
    assert [line["reason"] for line in logs if line["event"] == "worker not usable"] == [reason]
    [found] = await serving.serving[0].inspect(None, 1, generate=False)
    assert found.faults == (reason,)
    await worker.die()


@pytest.mark.parametrize("model", ["base", None])
async def test_a_base_url_without_v1_makes_its_worker_not_ready_and_the_reason_says_what_is_missing(
    model: str | None,
) -> None:
    worker = RawWorker([refuses(404)], models=lambda: listing(("base", 4096)))
    await worker.start()
    serving = make_pool(worker.url.removesuffix("/v1"), model=model)
    with structlog.testing.capture_logs() as logs:
        async with asyncio.TaskGroup() as group:
            loops = group.create_task(serving.run())
            await until(lambda: "append /v1" in serving.serving[0].absence.reason)
            assert serving.serving[0].state is not BackendState.READY
            loops.cancel()
    assert len([line for line in logs if line["event"] == "worker not usable"]) == 1
    await worker.die()


async def test_a_base_url_whose_paths_answer_without_a_list_of_models_stays_in_service() -> None:
    worker = RawWorker([refuses(400)], models=lambda: listing(("base", 4096)))
    await worker.start()
    serving = make_pool(worker.url.removesuffix("/v1"))
    async with asyncio.TaskGroup() as group:
        loops = group.create_task(serving.run())
        await until(lambda: serving.serving[0].state is BackendState.READY)
        loops.cancel()
    await worker.die()


async def test_a_line_says_that_workers_differ_in_length_and_the_shortest_holds() -> None:
    workers = [RawWorker([], models=lambda n=n: listing(("big", n))) for n in (4096, 2048)]  # type: ignore[misc]
    with structlog.testing.capture_logs() as logs:
        async with discovering(*workers) as (_, reader, _):
            assert reader.found[-1] == ("big", 2048)
    assert [one["lengths"] for one in logs if "workers differ in length" in one["event"]] == [[2048, 4096]]


async def test_a_model_that_appears_is_served_and_one_that_goes_ends() -> None:
    listed = [listing(("big", 4096))]
    worker = RawWorker([answers("Yes")] * 2, models=lambda: listed[0])
    async with discovering(worker) as (serving, _, gone):
        assert names(serving) == [("worker", "big", True)] and gone == [{"worker"}]
        listed[0] = listing(("big", 4096), ("small", 1024))
        await serving.follow()
        assert names(serving) == [("worker/big", "big", True), ("worker/small", "small", True)]
        big, small = serving.serving
        await collect(small, work())
        listed[0] = listing(("small", 1024))
        await serving.follow()
        assert serving.serving == (small,) and names(serving) == [("worker", "small", True)]
        assert big.state is BackendState.STOPPED and gone == [{"worker"}, set(), {"big"}]
        assert not await big.wait_ready(60)


async def test_another_model_than_before_has_a_backend_of_its_own_and_no_request_of_the_first() -> None:
    listed = [listing(("big", 4096))]
    worker = RawWorker([answers("Yes")], models=lambda: listed[0])

    def incapable(model: str) -> frozenset[Feature]:
        return TOOL_FEATURES if model == "small" else frozenset()

    async with discovering(worker, incapable=incapable) as (serving, reader, gone):
        [big] = serving.serving
        assert (big.model, reader.found) == ("big", [("big", 4096)])
        await collect(big, work())
        listed[0] = listing(("small", 1024))
        await serving.follow()
        [small] = serving.serving
        assert (small.name, small.model, reader.found[-1]) == ("worker", "small", ("small", 1024))
        assert small.features == big.features - TOOL_FEATURES and Feature.TOOLS in big.features
        await collect(small, work())
        assert big.state is BackendState.STOPPED and gone[-1] == {"big"}
        with pytest.raises(BackendFailure, match="no worker of worker is in service"):
            await collect(big, work())
    assert [request.body["model"] for request in worker.requests] == ["big", "small"]


async def test_a_model_whose_only_worker_dies_is_away_and_the_other_model_is_served() -> None:
    dying = RawWorker([], models=lambda: listing(("big", 4096)))
    living = RawWorker([answers("Yes")], models=lambda: listing(("small", 1024)))
    async with discovering(dying, living) as (serving, _, _):
        await dying.die()
        await until(lambda: names(serving)[0] == ("worker/big", "big", False))
        big, small = serving.serving
        with pytest.raises(BackendFailure, match="no worker of worker/big is in service"):
            await collect(big, work())
        await collect(small, work())


async def test_only_the_models_whose_tokenizer_the_worker_has_get_ids() -> None:
    def of_bytes(text: str) -> list[int]:
        return list(text.encode())

    checks = {"big": TokenizerCheck(SAMPLES_OF_BYTES), "small": TokenizerCheck([(SAMPLES[0], (1, 2))])}
    worker = RawWorker(
        [answers("Yes")], models=lambda: listing(("big", 4096), ("small", 1024)), tokenize=of_bytes
    )
    async with discovering(worker, checks=checks) as (serving, _, _):
        for backend in serving.serving:
            await collect(backend, work())
    assert worker.tokenized[:3] == ["big", "big", "small"]
    assert [request.path for request in worker.requests] == ["/v1/completions", "/v1/chat/completions"]


async def test_a_worker_that_lists_no_model_takes_nothing_and_says_why_until_it_has_one() -> None:
    listed = [listing()]
    worker = RawWorker([answers("Yes")], models=lambda: listed[0])
    async with following(worker, Reader(), ready=False) as backend:
        await until(lambda: "lists no model" in backend.absence.reason)
        assert backend.state is BackendState.STARTING and not backend.absence.loading
        listed[0] = listing(("small", 1024))
        await until(lambda: backend.state is BackendState.READY)
        assert backend.model == "small"


async def test_a_worker_that_was_restarted_with_another_model_takes_no_request_for_the_first() -> None:
    async def no_such_model(request: Request) -> None:
        error = {
            "error": {"message": "The model `base` does not exist.", "code": 404, "type": "NotFoundError"}
        }
        await request.whole(404, json.dumps(error).encode())

    listed = [listing(("base", 4096))]
    worker = RawWorker([no_such_model], models=lambda: listed[0])
    async with following(worker, Reader(), model="base") as backend:
        listed[0] = listing(("other", 4096))
        with pytest.raises(BackendFailure) as failed:
            await collect(backend, work())
        assert failed.value.kind is FailureKind.MODEL_NOT_FOUND
        await until(lambda: "serves other, and not base" in backend.absence.reason)
        assert backend.state is BackendState.STARTING and len(worker.requests) == 1


@pytest.mark.parametrize(("dialect", "serves"), [("openai", True), ("vllm", True), ("auto", False)])
async def test_a_worker_whose_list_fails_serves_if_its_dialect_and_model_are_configured(
    dialect: str, serves: bool
) -> None:
    worker = RawWorker([answers("Yes")], statuses={"/v1/models": 500})
    async with pool(worker, ready=serves, dialect=dialect) as backend:
        await until(lambda: worker.probes > 2)
        assert (backend.state is BackendState.READY) == serves


@pytest.mark.parametrize(
    ("keys", "serves"),
    [
        ({"dialect": "openai"}, True),
        ({"dialect": "openai", "probe_path": "/health"}, False),
        ({"dialect": "vllm"}, False),
    ],
)
async def test_a_hosted_service_without_a_path_for_probes_and_without_a_list_serves(
    keys: dict[str, str], serves: bool
) -> None:
    worker = RawWorker([answers("Yes")], statuses={"/health": 404, "/v1/models": 405})
    async with pool(worker, ready=serves, **keys) as backend:
        refused = "answers its probe with 405"
        await until(lambda: backend.state is BackendState.READY or refused in backend.absence.reason)
        assert (backend.state is BackendState.READY) == serves


async def test_a_worker_that_throttles_its_probes_stays_in_service_with_the_models_that_it_listed() -> None:
    worker = RawWorker([answers("Yes")], models=lambda: listing(("base", 4096)))
    async with following(worker, Reader()) as backend:
        worker.statuses = {"/health": 429, "/v1/models": 429}
        before = worker.probes
        await until(lambda: worker.probes > before + 3)
        await follow(backend)
        assert (backend.state, backend.model) == (BackendState.READY, "base")


def following(worker: RawWorker, reader: Reader, **changes: Any) -> Any:
    """A pool in front of this worker that learns its model, unless ``changes`` name one."""
    ready = changes.pop("ready", True)
    return pool(worker, ready=ready, read=reader, **{"model": None, **changes})


async def test_an_estimate_learns_nothing_from_the_rest_of_an_answer() -> None:
    learned: list[int] = []

    async def read(found: ServedModel, length: int | None, ask: Ask | None) -> ModelReading:
        return ModelReading(token_bytes, learn=lambda sent, reported: learned.append(reported))

    answering = [answers("It is", prompt=9), answers(" far.", prompt=12)]
    worker = RawWorker(answering, models=lambda: listing(("base", 4096)))
    async with pool(worker, read=read, model=None, dialect="vllm") as backend:
        await collect(backend, work(ids=[1, 2]))
        await collect(backend, work(ids=[1, 2], partial=PartialAnswer("It is")))
    assert learned == [9]
