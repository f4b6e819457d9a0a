"""``dialect: auto``: what a worker is, found out before its first request."""

from __future__ import annotations

import json

import pytest

from gateway.backends.port import Continue
from tests.conformance.harness import hear
from tests.workers.raw_worker import RawWorker, answers, pool, until, work

GOOD = answers("Hello", " there")


def models(owner: str) -> bytes:
    return json.dumps({"object": "list", "data": [{"id": "base", "owned_by": owner}]}).encode()


def worker_of(owner: str | None) -> RawWorker:
    return RawWorker([GOOD], models=None if owner is None else lambda: models(owner))


async def test_a_worker_that_says_it_is_a_sluice_gets_nothing_of_vllms_in_its_first_request() -> None:
    worker = worker_of("sluice")
    async with pool(worker) as backend:
        assert (await hear(backend, work(cache_salt="acme"))).text == "Hello there"
        assert backend.continues == frozenset()
    (request,) = worker.requests
    assert not {"cache_salt", "return_token_ids", "stream_interval"} & set(request.body)
    assert request.body["stream_options"] == {"include_usage": True}
    assert request.headers["prefer"] == "sluice-no-fallback"


@pytest.mark.parametrize("owner", ["vllm", None])
async def test_any_other_worker_gets_vllms_extensions(owner: str | None) -> None:
    worker = worker_of(owner)
    async with pool(worker) as backend:
        await hear(backend, work(cache_salt="acme"))
        assert backend.continues == {Continue.TEXT}
    assert {"cache_salt", "return_token_ids"} <= set(worker.requests[0].body)


async def test_a_sluice_is_probed_where_it_says_whether_it_can_answer() -> None:
    worker = worker_of("sluice")
    async with pool(worker) as backend:
        seen = worker.probes
        assert seen >= 1
        worker.healthy = False
        await until(lambda: backend.status()[0].state == "ejected")
        worker.healthy = True
        await until(lambda: backend.status()[0].state == "in_service")
        assert worker.probes == seen


async def test_a_named_dialect_is_not_put_in_question() -> None:
    worker = worker_of("sluice")
    async with pool(worker, dialect="vllm") as backend:
        await hear(backend, work(cache_salt="acme"))
    assert "cache_salt" in worker.requests[0].body
    assert "prefer" not in worker.requests[0].headers
