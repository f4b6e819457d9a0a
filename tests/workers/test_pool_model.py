"""A pool whose configuration names no model serves what its workers list."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from gateway.backends.port import BackendState
from gateway.backends.workers.in_service import WorkersInService
from gateway.backends.workers.inspection import ServedModel, offer_of
from gateway.backends.workers.pool_model import ModelReading, PoolModel
from gateway.backends.workers.tokenizer_check import TokenizerCheck
from gateway.backends.workers.worker_tokens import Ask
from gateway.contracts.features import TOOL_FEATURES, Feature
from resilience.failures import BackendFailure, FailureKind
from tests.conformance.harness import hear
from tests.workers.raw_worker import RawWorker, Request, answers, pool, until, work

BIG = ServedModel("big", 4096, "/models/big")
SMALL = ServedModel("small", 1024, "/models/small")
LORA = ServedModel("style", 4096, "/loras/style", parent="big")
HOSTED = ServedModel("gpt-x")
SLUICE = [ServedModel("demo", 4096, "demo", owned_by="sluice"), ServedModel("other", None, owned_by="sluice")]


@pytest.mark.parametrize(
    ("models", "configured", "offered"),
    [
        ([BIG, LORA], None, BIG),
        (SLUICE, None, SLUICE[0]),
        ([ServedModel("a", 9, "/m"), ServedModel("b", 9, "/m")], None, ServedModel("a", 9, "/m")),
        ([BIG, SMALL], None, "serves several models (big, small); name one as model, and write a backend for each"),
        ([LORA], None, "lists no model; load one first"),
        (None, None, "does not list its models; name one as model"),
        ([BIG, SMALL], "small", SMALL),
        ([BIG], "small", "serves big, and not small"),
        ([HOSTED], "small", None),
        (None, "small", None),
    ],
)  # fmt: skip
def test_what_a_pool_uses_of_a_workers_list(
    models: Sequence[ServedModel] | None, configured: str | None, offered: object
) -> None:
    assert offer_of(models, configured) == offered


class Reader:
    """Keeps what became known."""

    def __init__(self) -> None:
        self.found: list[tuple[str, int | None]] = []

    async def __call__(self, found: ServedModel, length: int | None, ask: Ask | None) -> ModelReading:
        self.found.append((found.id, length))
        return ModelReading(lambda token: bytes([token]), TokenizerCheck())


def in_service(*urls: str) -> WorkersInService:
    presence = WorkersInService(lambda: 0.0)
    for url in urls:
        presence.came(url)
    return presence


async def test_the_shortest_length_of_the_workers_holds() -> None:
    reader = Reader()
    model = PoolModel("pool", None, reader, in_service("a", "b"))
    assert model.id == "pool"
    assert await model.listed("a", [BIG]) is None
    assert await model.listed("b", [ServedModel("big", 2048, "/models/big")]) is None
    assert await model.listed("a", [BIG]) is None
    assert (model.id, reader.found) == ("big", [("big", 4096), ("big", 2048)])


async def test_a_worker_with_another_model_is_refused_while_one_with_the_first_serves() -> None:
    presence = in_service("a", "b")
    model = PoolModel("pool", None, Reader(), presence)
    await model.listed("a", [BIG])
    refused = await model.listed("b", [SMALL])
    assert refused is not None and "serves small, and the pool's other workers big" in refused
    presence.left("a")
    assert await model.listed("b", [SMALL]) is None
    assert model.id == "small"


def listing(*models: tuple[str, int]) -> bytes:
    return json.dumps({"data": [{"id": name, "max_model_len": length} for name, length in models]}).encode()


async def test_requests_name_what_the_worker_lists_and_follow_a_change() -> None:
    listed = [listing(("big", 4096))]
    reader = Reader()
    worker = RawWorker([answers("Yes")] * 2, models=lambda: listed[0])
    async with following(worker, reader) as backend:
        assert (backend.model, reader.found) == ("big", [("big", 4096)])
        await hear(backend, work())
        listed[0] = listing(("small", 1024))
        await backend.follow()
        assert (backend.model, reader.found[-1]) == ("small", ("small", 1024))
        await hear(backend, work())
    assert [request.body["model"] for request in worker.requests] == ["big", "small"]


async def test_a_pool_that_follows_its_workers_can_what_their_model_can() -> None:
    listed = [listing(("big", 4096))]
    worker = RawWorker([answers("Yes")], models=lambda: listed[0])

    def incapable(model: str) -> frozenset[Feature]:
        return TOOL_FEATURES if model == "small" else frozenset()

    async with following(worker, Reader(), incapable=incapable) as backend:
        before = backend.features
        listed[0] = listing(("small", 1024))
        await backend.follow()
        assert Feature.TOOLS in before and backend.features == before - TOOL_FEATURES


async def test_a_worker_of_several_models_takes_nothing_and_says_why_until_it_has_one() -> None:
    listed = [listing(("big", 4096), ("small", 1024))]
    worker = RawWorker([answers("Yes")], models=lambda: listed[0])
    async with following(worker, Reader(), ready=False) as backend:
        await until(lambda: "several models" in backend.absence.reason)
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
            await hear(backend, work())
        assert failed.value.kind is FailureKind.MODEL_NOT_FOUND
        await until(lambda: "serves other, and not base" in backend.absence.reason)
        assert backend.state is BackendState.STARTING and len(worker.requests) == 1


def following(worker: RawWorker, reader: Reader, **changes: Any) -> Any:
    """The pool in front of this worker."""
    ready = changes.pop("ready", True)
    return pool(worker, ready=ready, read=reader, **{"model": None, **changes})
