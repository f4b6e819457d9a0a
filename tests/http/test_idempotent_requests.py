from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gateway.config.settings import ServerConfig
from gateway.contracts.answer import Fallback
from gateway.contracts.values import Caller, CallerRole
from gateway.errors import BackendUnavailable, DuplicateRequest, IdempotencyConflict, PublicError
from gateway.http.exchange import Reply
from gateway.http.idempotency import MAX_WAITING, Idempotency, fingerprint_of
from gateway.state.errors import StateUnavailable
from gateway.state.idempotency import Claim, StoredReply
from gateway.state.idempotency_sqlite import SqliteIdempotencyStore
from gateway.testing import OTHER_KEY, FakeJourney, MemoryIdempotency, fake_services
from tests.http.fakes import exchange_of

BODY = {"messages": [{"role": "user", "content": "hi"}]}
CHAT = {"model": "demo", **BODY}
KEY = {"idempotency-key": "k1"}


@pytest.mark.parametrize(("path", "body"), [("/v1/generate", BODY), ("/v1/chat/completions", CHAT)])
async def test_the_same_key_and_body_give_the_stored_answer(connect: Any, path: str, body: Any) -> None:
    journey = FakeJourney()
    async with connect(fake_services(journey)) as client:
        first = await client.post(path, json=body, headers=KEY)
        second = await client.post(path, json=body, headers=KEY)
    assert len(journey.requests) == 1
    assert second.status_code == 200
    assert second.content == first.content
    assert second.headers["content-type"] == "application/json"
    assert second.headers["x-idempotent-replay"] == "true"
    assert "x-idempotent-replay" not in first.headers


async def test_a_stored_answer_is_not_given_to_a_key_that_may_no_longer_use_what_the_request_names(
    connect: Any,
) -> None:
    journey, usable = FakeJourney(), [True]
    async with connect(fake_services(journey, may_use=lambda request: usable[0])) as client:
        await client.post("/v1/chat/completions", json=CHAT, headers=KEY)
        usable[0], journey.error = False, PublicError(403, "forbidden", "the key may not use the route")
        refused = await client.post("/v1/chat/completions", json=CHAT, headers=KEY)
        usable[0], journey.error = True, None
        again = await client.post("/v1/chat/completions", json=CHAT, headers=KEY)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
    assert "x-idempotent-replay" not in refused.headers
    assert again.headers["x-idempotent-replay"] == "true" and len(journey.requests) == 2


async def test_another_body_or_path_under_the_same_key_is_a_conflict(connect: Any) -> None:
    async with connect(fake_services()) as client:
        await client.post("/v1/generate", json=BODY, headers=KEY)
        body = await client.post("/v1/generate", json={**BODY, "priority": -1}, headers=KEY)
        path = await client.post("/invocations", json=BODY, headers=KEY)
    for response in (body, path):
        assert response.status_code == 409
        assert response.json()["error"]["code"] == "idempotency_conflict"


def test_an_answer_is_not_given_to_an_api_key_with_other_models_or_other_names_of_them() -> None:
    def key(models: tuple[str, ...] | None = None, aliases: tuple[tuple[str, str], ...] = ()) -> str:
        caller = Caller("acme", CallerRole.CALLER, "key_1", models=models, aliases=aliases)
        return fingerprint_of("/v1/chat/completions", b"{}", caller)

    assert key(("b", "a")) == key(("a", "b"))
    assert (
        len({key(), key(("a",)), key(()), key(aliases=(("fast", "a"),)), key(aliases=(("fast", "b"),))}) == 5
    )


async def test_keys_of_different_tenants_do_not_meet(connect: Any) -> None:
    journey = FakeJourney()
    async with connect(fake_services(journey)) as client:
        await client.post("/v1/generate", json=BODY, headers=KEY)
        other = {**KEY, "authorization": f"Bearer {OTHER_KEY}"}
        assert (await client.post("/v1/generate", json={**BODY, "priority": -1}, headers=other)).is_success
    assert len(journey.requests) == 2


@pytest.mark.parametrize(
    "journey",
    [
        FakeJourney(pieces=(), error=PublicError(503, "queue_full", "busy")),
        FakeJourney(changes={"backend": "degraded", "fallback": Fallback("degraded_response", "queue_full")}),
        FakeJourney(changes={"backend": "response_cache", "fallback": Fallback("response_cache", "timeout")}),
    ],
    ids=["an error", "a degraded answer", "a cached answer"],
)
async def test_what_no_model_generated_is_not_kept(connect: Any, journey: FakeJourney) -> None:
    async with connect(fake_services(journey)) as client:
        for _ in range(2):
            response = await client.post("/v1/generate", json=BODY, headers=KEY)
            assert "x-idempotent-replay" not in response.headers
    assert len(journey.requests) == 2


async def test_a_fallback_that_a_model_generated_is_kept(connect: Any) -> None:
    journey = FakeJourney(changes={"backend": "bedrock", "fallback": Fallback("bedrock", "queue_full")})
    async with connect(fake_services(journey)) as client:
        for _ in range(2):
            await client.post("/v1/generate", json=BODY, headers=KEY)
    assert len(journey.requests) == 1


async def test_a_repeated_request_waits_for_the_one_in_flight(connect: Any) -> None:
    journey = FakeJourney(holds=True)
    async with connect(fake_services(journey)) as client, asyncio.TaskGroup() as group:
        calls = [group.create_task(client.post("/v1/generate", json=BODY, headers=KEY)) for _ in range(5)]
        await journey.started.wait()
        conflict = await client.post("/v1/generate", json={**BODY, "priority": -1}, headers=KEY)
        journey.resume()
    assert conflict.status_code == 409
    assert len(journey.requests) == 1
    assert len({call.result().content for call in calls}) == 1
    assert sum("x-idempotent-replay" in call.result().headers for call in calls) == 4


async def test_a_waiting_request_runs_when_the_first_one_fails(connect: Any) -> None:
    journey = FakeJourney(pieces=(), holds=True, error=PublicError(503, "queue_full", "busy"))
    async with connect(fake_services(journey)) as client, asyncio.TaskGroup() as group:
        calls = [group.create_task(client.post("/v1/generate", json=BODY, headers=KEY)) for _ in range(3)]
        await journey.started.wait()
        assert len(journey.requests) == 1
        journey.resume()
    assert len(journey.requests) == 3
    assert {call.result().status_code for call in calls} == {503}


async def test_waiting_for_an_equal_request_is_bounded_in_time(connect: Any) -> None:
    journey = FakeJourney(holds=True)
    replies = Idempotency(MemoryIdempotency(), wait_s=0.02)
    release = asyncio.Event()

    async def slow() -> Reply:
        await release.wait()
        return Reply(200, b"{}")

    async with asyncio.TaskGroup() as group:
        first = group.create_task(replies.answer(exchange_of("t"), "k", "f", slow, lambda: True))
        await asyncio.sleep(0)
        with pytest.raises(DuplicateRequest):
            await replies.answer(exchange_of("t"), "k", "f", slow, lambda: True)
        release.set()
    assert first.result().body == b"{}"
    assert not replies._turns
    assert journey.running == 0


async def test_the_number_of_requests_that_wait_for_one_key_is_bounded() -> None:
    replies = Idempotency(MemoryIdempotency(), wait_s=5)
    release = asyncio.Event()

    async def slow() -> Reply:
        await release.wait()
        return Reply(200, b"{}")

    async with asyncio.TaskGroup() as group:
        for _ in range(MAX_WAITING + 1):
            group.create_task(replies.answer(exchange_of("t"), "k", "f", slow, lambda: True))
        await asyncio.sleep(0)
        with pytest.raises(DuplicateRequest):
            await replies.answer(exchange_of("t"), "k", "f", slow, lambda: True)
        release.set()
    assert not replies._turns


async def test_cancelled_requests_of_one_key_leave_none_in_flight() -> None:
    replies = Idempotency(MemoryIdempotency(), wait_s=60)
    runs = 0
    begun, release = asyncio.Event(), asyncio.Event()

    async def slow() -> Reply:
        nonlocal runs
        runs += 1
        begun.set()
        await release.wait()
        return Reply(200, b"{}")

    async with asyncio.TaskGroup() as group:
        calls = [
            group.create_task(replies.answer(exchange_of("t"), "k", "f", slow, lambda: True))
            for _ in range(4)
        ]
        await begun.wait()
        calls[0].cancel()
        calls[2].cancel()
        release.set()
    assert calls[1].result().body == calls[3].result().body == b"{}"
    assert runs == 2
    assert not replies._turns


async def outcome_of(call: Awaitable[Reply]) -> Reply | BaseException:
    try:
        return await call
    except (BackendUnavailable, asyncio.CancelledError) as error:
        return error


@pytest.mark.parametrize("ends", ["stored", "fails", "cancelled"])
async def test_of_concurrent_repeats_at_two_gateways_one_runs_at_a_time(ends: str) -> None:
    store = SqliteIdempotencyStore(Path(":memory:"), unix_time=lambda: 1.0)
    here, there = Idempotency(store, wait_s=60), Idempotency(store, wait_s=60)
    begun, release, runs = asyncio.Event(), asyncio.Event(), 0

    async def run() -> Reply:
        nonlocal runs
        runs += 1
        begun.set()
        await release.wait()
        if ends == "fails" and runs == 1:
            raise BackendUnavailable("busy")
        return Reply(200, b"{}", keep=True)

    async with asyncio.TaskGroup() as group:
        first = group.create_task(outcome_of(here.answer(exchange_of("t"), "k", "f", run, lambda: True)))
        await begun.wait()
        second = group.create_task(there.answer(exchange_of("t"), "k", "f", run, lambda: True))
        with pytest.raises(IdempotencyConflict):
            await Idempotency(store, wait_s=60).answer(exchange_of("t"), "k", "x", run, lambda: True)
        with pytest.raises(DuplicateRequest):
            await Idempotency(store, wait_s=0.3).answer(exchange_of("t"), "k", "f", run, lambda: True)
        assert runs == 1 and not second.done()
        if ends == "cancelled":
            first.cancel()
        release.set()
    outcome = first.result()
    assert second.result().body == b"{}"
    kinds = {"stored": Reply, "fails": BackendUnavailable, "cancelled": asyncio.CancelledError}
    assert isinstance(outcome, kinds[ends])
    assert runs == (1 if ends == "stored" else 2)
    assert not here._turns and not there._turns
    await store.close()


@dataclass
class StalledStore(MemoryIdempotency):
    """A store whose answers to the first two claims get lost; it has taken them or not."""

    takes: bool = True
    lost = 0
    claim: Claim | None = None

    async def get(
        self, tenant: str, key: str, claim: Claim, *, reads_only: bool = False
    ) -> tuple[str, StoredReply | None] | None:
        found = await super().get(tenant, key, claim)
        if found is None and (self.takes or self.lost >= 2):
            self.claim = self.claim or (None if reads_only else claim)
            found = None if self.claim in (None, claim) else (self.claim.fingerprint, None)
        if self.lost < 2:
            self.lost += 1
            raise StateUnavailable("get", "TimeoutError")
        return found


@pytest.mark.parametrize("takes", [True, False])
async def test_of_concurrent_repeats_one_runs_also_when_the_store_has_answered_neither_claim(
    takes: bool,
) -> None:
    store, runs = StalledStore(takes=takes), 0
    here, there = Idempotency(store, wait_s=60), Idempotency(store, wait_s=60)

    async def run() -> Reply:
        nonlocal runs
        runs += 1
        return Reply(200, b"{}", keep=True)

    replies = await asyncio.gather(
        *(one.answer(exchange_of("t"), "k", "f", run, lambda: True) for one in (here, there))
    )
    assert [one.body for one in replies] == [b"{}", b"{}"]
    assert runs == 1


@pytest.mark.parametrize("key", ["", "x" * 256, "caf\xe9"])
async def test_a_key_must_be_short_and_printable(connect: Any, key: str) -> None:
    async with connect(fake_services()) as client:
        headers = {"idempotency-key": key.encode("latin-1")}
        response = await client.post("/v1/generate", json=BODY, headers=headers)
    assert response.status_code == 422
    assert response.json()["error"]["param"] == "Idempotency-Key"


async def test_a_stream_is_not_kept(connect: Any) -> None:
    journey = FakeJourney()
    async with connect(fake_services(journey)) as client:
        for _ in range(2):
            response = await client.post("/v1/generate", json={**BODY, "stream": True}, headers=KEY)
            assert response.is_success
    assert len(journey.requests) == 2


async def test_what_generates_nothing_takes_no_room_in_the_store(connect: Any) -> None:
    store = MemoryIdempotency()
    async with connect(fake_services(idempotency=store)) as client:
        first = await client.post("/tokenize", json={"prompt": "a"}, headers=KEY)
        other = await client.post("/tokenize", json={"prompt": "b"}, headers=KEY)
        text = await client.post("/detokenize", json={"tokens": [97]}, headers=KEY)
    assert [one.status_code for one in (first, other, text)] == [200, 200, 200]
    assert store.kept == {}


async def test_a_store_that_cannot_be_read_refuses_before_anything_is_billed(connect: Any) -> None:
    journey = FakeJourney()
    services = fake_services(journey, idempotency=MemoryIdempotency(broken_get=True))
    async with connect(services) as client:
        response = await client.post("/v1/generate", json=BODY, headers=KEY)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert journey.requests == []


async def test_an_outage_of_the_store_is_one_line_of_the_log_however_many_requests_it_refuses(
    connect: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Store(MemoryIdempotency):
        async def get(self, *args: Any, **options: Any) -> Any:
            if self.broken_get:
                raise StateUnavailable("get", "no connection")
            return await super().get(*args, **options)

    store = Store()
    async with connect(fake_services(idempotency=store)) as client:
        for store.broken_get in (True, True, True, False, True, True):
            await client.post("/v1/generate", json=BODY, headers=KEY)
    assert [line.message for line in caplog.records if line.levelname == "ERROR"] == [
        "answers for idempotent requests: state store: get failed (no connection)"
    ] * 2


async def test_a_store_that_cannot_be_written_does_not_hold_back_the_answer(
    connect: Any, caplog: pytest.LogCaptureFixture
) -> None:
    services = fake_services(idempotency=MemoryIdempotency(broken_put=True))
    async with connect(services) as client:
        response = await client.post("/v1/generate", json=BODY, headers=KEY)
    assert response.status_code == 200
    assert "unexpected OSError" in caplog.text


async def test_a_store_that_takes_no_writes_is_one_line_of_the_log_however_many_answers_it_does_not_store(
    connect: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Full(MemoryIdempotency):
        async def get(self, *args: Any, reads_only: bool = False, **options: Any) -> Any:
            if not reads_only:
                raise StateUnavailable("get", "OutOfMemoryError")

        async def put(self, *args: Any, **options: Any) -> Any:
            raise StateUnavailable("put", "OutOfMemoryError")

    async with connect(fake_services(idempotency=Full())) as client:
        answers = [await client.post("/v1/generate", json=BODY, headers=KEY) for _ in range(3)]
    assert [one.status_code for one in answers] == [200, 200, 200]
    assert [line.message for line in caplog.records if line.levelname in ("ERROR", "WARNING")] == [
        "answers for idempotent requests: state store: get failed (OutOfMemoryError)"
    ]


async def test_a_request_with_an_idempotency_key_ends_with_the_request_timeout(connect: Any) -> None:
    journey = FakeJourney(pieces=(), holds=True)
    services = fake_services(journey, limits=ServerConfig(request_timeout_seconds=0.05))
    async with connect(services) as client:
        response = await client.post("/v1/generate", json=BODY, headers=KEY)
    assert response.status_code == 504
