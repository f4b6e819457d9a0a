"""Stored responses over HTTP: conversations go on from them, and clients read them again."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
import zlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from msgspec import structs
from openai.types.responses import ResponseInputMessageItem, ResponseOutputMessage

from accounting.errors import LedgerUnavailable
from accounting.keys import KeyLimits
from accounting.stored_responses import ResponseStore, StoredResponse
from gateway.config.responses import ResponsesSection
from gateway.config.settings import ServerConfig
from gateway.contracts.origin import EdgeRequest
from gateway.contracts.responses.request import ResponsesRequest
from gateway.contracts.values import Caller
from gateway.errors import BackendUnavailable, Draining, InvalidKey, UnknownModel, public_error
from gateway.http.responses import ResponsesRerun
from gateway.keys.ceilings import Ceilings
from gateway.keys.rate_limits import KeyLimiter
from gateway.requests.background import LEASE_S, BackgroundResponses
from gateway.requests.in_flight import InFlightRequests
from gateway.requests.stored_responses import StoredResponses
from gateway.testing import OTHER_KEY, FakeHealth, FakeJourney, FakeKeys, fake_services
from tests.contracts.responses_language import check
from tests.contracts.test_responses_stream import events

ASKED = {"model": "demo", "input": "What should I read?"}
OTHER = {"authorization": f"Bearer {OTHER_KEY}"}
Connect = Callable[[Any], Any]


def held() -> FakeJourney:
    """A journey whose answer ends only after ``resume()``."""
    return FakeJourney(pieces=("One ", "moment"), holds=True)


class ResponsesRig:
    """A gateway with stored responses; ``now`` is its Unix time."""

    store_type = ResponseStore
    stored_type = StoredResponses

    def __init__(self, connect: Connect, folder: Path, **section: Any) -> None:
        self.connect = connect
        self.now = 1_800_000_000.0
        self.url = f"sqlite+aiosqlite:///{folder}/state.db"
        self.section = ResponsesSection(**section)
        self.numbers = itertools.count(1)

    async def row(self, path: str) -> StoredResponse:
        """The response of acme as it is stored."""
        store = ResponseStore(self.url, tenant_bytes=self.section.max_tenant_bytes)
        found = await store.get("acme", path.rpartition("/")[2], self.now)
        await store.close()
        assert found is not None
        return found

    @asynccontextmanager
    async def serving(self, journey: Any = None, **changes: Any) -> AsyncIterator[httpx.AsyncClient]:
        store = self.store_type(self.url, tenant_bytes=self.section.max_tenant_bytes)
        keep = self.stored_type(store, self.section, lambda: self.now)
        self.background = BackgroundResponses(keep, lambda: self.now, look_s=0.02)
        services = fake_services(
            journey or FakeJourney(pieces=("One ", "moment")),
            responses=keep,
            background=self.background,
            new_id=lambda kind: f"{kind}_{next(self.numbers)}",
            **changes,
        )
        self.background.rerun = ResponsesRerun(services)
        async with asyncio.TaskGroup() as tasks, self.connect(services) as client:
            running = tasks.create_task(self.background.run())
            await asyncio.sleep(0)
            yield client
            running.cancel()


@pytest.fixture
def rig(connect: Connect, tmp_path: Path) -> ResponsesRig:
    return ResponsesRig(connect, tmp_path)


async def made(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await client.post("/v1/responses", json={**ASKED, **fields})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_a_response_is_stored_unless_the_request_says_otherwise(rig: ResponsesRig) -> None:
    async with rig.serving() as client:
        stored, left = await made(client), await made(client, store=False)
        assert (stored["store"], left["store"]) == (True, False)
        assert (await client.get(f"/v1/responses/{stored['id']}")).json() == stored
        unknown = await client.get(f"/v1/responses/{left['id']}")
    assert unknown.status_code == 404
    assert unknown.json()["error"]["code"] == "not_found"


def shown(url: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]


async def test_an_image_is_stored_by_its_address_alone(rig: ResponsesRig) -> None:
    journey = FakeJourney(pieces=("A cat.",))
    async with rig.serving(journey) as client:
        held = await made(client, input=shown("data:image/png;base64,eA=="))
        assert held["store"] is False
        assert (await client.get(f"/v1/responses/{held['id']}")).status_code == 404
        for field, url in (("store", "data:,"), ("background", "data:,"), ("store", "DATA:,")):
            refused = await client.post("/v1/responses", json={**ASKED, "input": shown(url), field: True})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
        for url in (" data:image/png;base64,eA==", "\tdata:,", "ftp://example.org/a.png", "a.png", ""):
            body = {**ASKED, "input": shown(url), "background": True}
            refused = await client.post("/v1/responses", json=body)
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (400, "input.0.content.0.image_url")
            assert error["message"].endswith("allowed: one that begins with https://, http:// or data:")
        linked = await made(client, input=shown("HTTPS://example.org/a.png"))
        assert linked["store"] is True
        await made(client, input="And now?", previous_response_id=linked["id"])
        [image] = journey.requests[-1].messages[0].images
        assert image.url == "HTTPS://example.org/a.png"


async def test_a_streamed_response_is_stored_before_its_end_is_sent(rig: ResponsesRig) -> None:
    async with (
        rig.serving() as client,
        client.stream("POST", "/v1/responses", json={**ASKED, "stream": True}) as got,
    ):
        sent = events(await got.aread())
        check(sent)
        stored = await client.get(f"/v1/responses/{sent[-1]['response']['id']}")
    assert stored.json() == sent[-1]["response"]


@pytest.mark.parametrize("param", ["limit", "order", "after"])
async def test_a_wrong_parameter_of_the_input_items_is_named(rig: ResponsesRig, param: str) -> None:
    async with rig.serving() as client:
        first = await made(client)
        refused = await client.get(f"/v1/responses/{first['id']}/input_items", params={param: "x"})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, param)
    assert error["message"].startswith(f"{param} is ") and "allowed: " in error["message"]


async def test_a_conversation_goes_on_from_a_stored_response_on_any_gateway(rig: ResponsesRig) -> None:
    async with rig.serving() as client:
        first = await made(client, instructions="Be brief.")
    journey = FakeJourney(pieces=("Another",))
    async with rig.serving(journey) as client:
        second = await made(client, input="And then?", previous_response_id=first["id"])
        third = await made(client, input="Why?", previous_response_id=second["id"])
        items = (await client.get(f"/v1/responses/{third['id']}/input_items", params={"order": "asc"})).json()
    assert second["previous_response_id"] == first["id"]
    assert [(one.role, one.content) for one in journey.requests[-1].messages] == [
        ("user", "What should I read?"),
        ("assistant", "One moment"),
        ("user", "And then?"),
        ("assistant", "Another"),
        ("user", "Why?"),
    ]
    texts = [item["content"][0]["text"] for item in items["data"]]
    assert texts == ["What should I read?", "One moment", "And then?", "Another", "Why?"]


async def test_an_item_of_a_stored_response_can_be_referred_to_by_its_id(rig: ResponsesRig) -> None:
    journey = FakeJourney(pieces=("One ", "moment"))
    async with rig.serving(journey) as client:
        first = await made(client)
        [given] = (await client.get(f"/v1/responses/{first['id']}/input_items")).json()["data"]
        references = [
            {"type": "item_reference", "id": one} for one in (given["id"], first["output"][0]["id"])
        ]
        await made(client, input=[*references, {"role": "user", "content": "And then?"}])
        assert [(one.role, one.content) for one in journey.requests[-1].messages] == [
            ("user", "What should I read?"),
            ("assistant", "One moment"),
            ("user", "And then?"),
        ]
        for headers, item in ((OTHER, given["id"]), ({}, "msg_none_0")):
            body = {**ASKED, "input": [{"type": "item_reference", "id": item}]}
            unknown = await client.post("/v1/responses", json=body, headers=headers)
            assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "input.0.id")


@pytest.mark.parametrize("fields", [{}, {"id": None}, {"id": ""}, {"id": 5}])
async def test_a_reference_to_an_item_without_its_id_is_refused_by_the_field(
    rig: ResponsesRig, fields: dict[str, Any]
) -> None:
    async with rig.serving() as client:
        given = [{"role": "user", "content": "x"}, {"type": "item_reference", **fields}]
        refused = await client.post("/v1/responses", json={**ASKED, "input": given})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input.1.id")


async def test_a_stored_answer_that_is_no_input_is_refused_where_it_is_asked_for(rig: ResponsesRig) -> None:
    async with rig.serving(FakeJourney(pieces=("One ", "mo\0ment"))) as client:
        first = await made(client)
        reference = {"type": "item_reference", "id": first["output"][0]["id"]}
        for more, param in (
            ({"previous_response_id": first["id"]}, "previous_response_id"),
            ({"input": [reference, {"role": "user", "content": "And then?"}]}, "input.0.id"),
        ):
            refused = await client.post("/v1/responses", json={**ASKED, **more})
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (400, param)
            assert "content.0.text contains a null character" in error["message"]


async def test_a_stored_conversation_is_as_long_as_a_body_at_most(rig: ResponsesRig) -> None:
    # 40 kB that are stored in a few hundred bytes.
    long, limits = {"input": "x" * 40_000}, ServerConfig(max_body_bytes=100_000)
    async with rig.serving(limits=limits) as client:
        ids = [(await made(client, **long))["id"]]
        ids.append((await made(client, **long, previous_response_id=ids[-1]))["id"])
        ids.append((await made(client, **long, previous_response_id=ids[-1]))["id"])
        body = {**ASKED, "previous_response_id": ids[-1]}
        followed = await client.post("/v1/responses", json=body)
        counted = await client.post("/v1/responses/input_tokens", json=body)
        listed = await client.get(f"/v1/responses/{ids[-1]}/input_items")
        shown = await client.get(f"/v1/responses/{ids[-1]}")
        before = await client.get(f"/v1/responses/{ids[-2]}/input_items")
    for reply, param in (
        (followed, "previous_response_id"),
        (counted, "previous_response_id"),
        (listed, "response_id"),
    ):
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
        assert "100000 bytes" in reply.json()["error"]["message"]
    assert (shown.status_code, before.status_code) == (200, 200)


async def test_input_items_come_in_pages(rig: ResponsesRig) -> None:
    async with rig.serving() as client:
        items = [{"role": "user", "content": f"line {n}"} for n in range(5)]
        path = f"/v1/responses/{(await made(client, input=items))['id']}/input_items"
        first = (await client.get(path, params={"limit": 2})).json()
        rest = (await client.get(path, params={"after": first["last_id"], "limit": 10})).json()
        wrong = await client.get(path, params={"after": "item_9"})
    assert [one["content"][0]["text"] for one in first["data"]] == ["line 4", "line 3"]
    assert first["has_more"] is True and rest["has_more"] is False
    assert [one["content"][0]["text"] for one in rest["data"]] == ["line 2", "line 1", "line 0"]
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "after")


async def test_a_messages_text_is_listed_as_the_part_that_the_official_client_reads(
    rig: ResponsesRig,
) -> None:
    said = [{"role": role, "content": role} for role in ("developer", "assistant", "user")]
    journey = FakeJourney(pieces=("Yes.",))
    async with rig.serving(journey) as client:
        first = await made(client, input=said)
        path = f"/v1/responses/{first['id']}/input_items"
        listed = (await client.get(path, params={"order": "asc"})).json()["data"]
        await made(client, input="And then?", previous_response_id=first["id"])
    assert [item["content"][0]["text"] for item in listed] == [one["content"] for one in said]
    for item, read in zip(
        listed, (ResponseInputMessageItem, ResponseOutputMessage, ResponseInputMessageItem), strict=True
    ):
        read.model_validate(item)
    asked = [(one.role, one.content) for one in journey.requests[-1].messages]
    assert asked[:3] == [("system", "developer"), ("assistant", "assistant"), ("user", "user")]


async def test_another_tenants_response_is_an_unknown_one(rig: ResponsesRig) -> None:
    async with rig.serving() as client:
        stored = await made(client)
        path = f"/v1/responses/{stored['id']}"
        foreign = await client.get(path, headers=OTHER)
        unknown = await client.get("/v1/responses/resp_nowhere", headers=OTHER)
        shown = foreign.text.replace(stored["id"], "resp_nowhere")
        assert (foreign.status_code, json.loads(shown)["error"]) == (404, unknown.json()["error"])
        for method, where in (("DELETE", path), ("POST", f"{path}/cancel"), ("GET", f"{path}/input_items")):
            assert (await client.request(method, where, headers=OTHER)).status_code == 404
        follows = await client.post(
            "/v1/responses", json={**ASKED, "previous_response_id": stored["id"]}, headers=OTHER
        )
        assert (follows.status_code, follows.json()["error"]["param"]) == (404, "previous_response_id")
        assert (await client.get(path)).status_code == 200


async def test_a_deleted_response_is_gone_and_so_is_what_goes_on_from_it(rig: ResponsesRig) -> None:
    async with rig.serving() as client:
        first = await made(client)
        second = await made(client, previous_response_id=first["id"])
        gone = await client.delete(f"/v1/responses/{first['id']}")
        assert gone.json() == {"id": first["id"], "object": "response", "deleted": True}
        assert (await client.delete(f"/v1/responses/{first['id']}")).status_code == 404
        follows = await client.post("/v1/responses", json={**ASKED, "previous_response_id": second["id"]})
    assert follows.status_code == 404


async def test_only_what_reads_a_conversation_is_refused_for_a_response_before_it(rig: ResponsesRig) -> None:
    path, alone = "/v1/responses/resp_nowhere", "no response 'resp_nowhere' is stored"
    async with rig.serving() as client:
        for method, where in (("GET", path), ("DELETE", path), ("POST", f"{path}/cancel")):
            assert (await client.request(method, where)).json()["error"]["message"] == alone
        follows = {**ASKED, "previous_response_id": "resp_nowhere"}
        asked = await client.get(f"{path}/input_items"), await client.post("/v1/responses", json=follows)
    for one in asked:
        assert one.json()["error"]["message"] == f"{alone}, or not all before it in its conversation"


async def test_responses_expire_and_a_tenants_oldest_make_room(connect: Connect, tmp_path: Path) -> None:
    rig = ResponsesRig(connect, tmp_path, keep_seconds=120, max_tenant_bytes=2_500)
    async with rig.serving() as client:
        ids = []
        for _ in range(8):
            ids.append((await made(client))["id"])
            rig.now += 1
        rig.now += 55
        await eventually_gone(client, ids[0])
        assert (await client.get(f"/v1/responses/{ids[-1]}")).status_code == 200
        rig.now += 80
        assert (await client.get(f"/v1/responses/{ids[-1]}")).status_code == 404


async def eventually_gone(client: httpx.AsyncClient, response_id: str) -> None:
    for _ in range(200):
        if (await client.get(f"/v1/responses/{response_id}")).status_code == 404:
            return
        await asyncio.sleep(0.1)
    raise AssertionError("it is still there")


async def test_what_cannot_be_stored_is_answered_and_says_so(connect: Connect, tmp_path: Path) -> None:
    rig = ResponsesRig(connect, tmp_path, max_bytes=1024)
    async with rig.serving(FakeJourney(pieces=tuple(map(str, range(2_000))))) as client:
        whole = await made(client)
        streamed = await client.post("/v1/responses", json={**ASKED, "stream": True})
    for response in (whole, events(streamed.content)[-1]["response"]):
        assert response["store"] is False
        assert "larger than 1024 bytes" in response["sluice"]["warnings"][-1]
    (tmp_path / "sub").mkdir()
    rig.url = f"sqlite+aiosqlite:///{tmp_path}/nowhere/state.db"
    async with rig.serving() as client:
        assert "not stored" in (await made(client))["sluice"]["warnings"][-1]
        assert (await client.get("/v1/responses/resp_1")).status_code == 503


async def test_a_gateway_that_stores_nothing_says_so(connect: Connect) -> None:
    async with connect(fake_services()) as client:
        assert (await made(client))["store"] is False
        for fields, param in (({"store": True}, "store"), ({"background": True}, "background")):
            refused = await client.post("/v1/responses", json={**ASKED, **fields})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        follows = await client.post("/v1/responses", json={**ASKED, "previous_response_id": "resp_1"})
        assert follows.status_code == 404


async def test_a_background_response_runs_on_and_can_be_followed_from_any_event(rig: ResponsesRig) -> None:
    journey = held()
    async with rig.serving(journey) as client:
        begun = await made(client, background=True)
        assert (begun["status"], begun["background"]) == ("queued", True)
        path = f"/v1/responses/{begun['id']}"
        assert (await client.get(path)).json()["status"] in ("queued", "in_progress")
        early = await client.post("/v1/responses", json={**ASKED, "previous_response_id": begun["id"]})
        message = "previous_response_id has not ended yet; allowed: a response that has ended"
        assert (early.status_code, early.json()["error"]["message"]) == (400, message)
        journey.resume()
        live = await client.get(path, params={"stream": "true"})
        sent = events(live.content)
        check(sent)
        assert (await client.get(path)).json() == sent[-1]["response"]
        assert sent[-1]["response"]["output"][0]["content"][0]["text"] == "One moment"
        for after in range(len(sent) - 1):
            again = await client.get(path, params={"stream": "true", "starting_after": after})
            assert events(again.content) == sent[after + 1 :]
        over = await client.get(path, params={"stream": "true", "starting_after": len(sent) - 1})
        assert over.content == b""


async def test_events_after_more_than_the_last_one_are_refused_with_its_number(rig: ResponsesRig) -> None:
    async with rig.serving() as client:
        path = f"/v1/responses/{(await made(client, background=True))['id']}"
        await ended(client, path)
        last = len(events((await client.get(path, params={"stream": "true"})).content)) - 1
        for after in (last + 1, 2**53 - 1, 2**70):
            over = await client.get(path, params={"stream": "true", "starting_after": after})
            assert (over.status_code, over.json()["error"]["param"]) == (400, "starting_after")
        over = await client.get(path, params={"stream": "true", "starting_after": last + 1})
        assert f"{last}, the last event" in over.json()["error"]["message"]


async def abandoned_for_good(rig: ResponsesRig) -> str:
    """The path of a background response whose lease is over, and which may not be run again."""
    async with rig.serving(held()) as client:
        path = f"/v1/responses/{(await made(client, background=True))['id']}"
    store = ResponseStore(rig.url, tenant_bytes=rig.section.max_tenant_bytes)
    await store.forbid_rerun(await rig.row(path))
    await store.close()
    rig.now += LEASE_S + 1
    return path


async def test_the_last_event_of_a_response_that_ended_elsewhere_has_a_number_that_can_be_written(
    rig: ResponsesRig,
) -> None:
    path = await abandoned_for_good(rig)
    async with rig.serving() as client:
        await ended(client, path)
        assert (await rig.row(path)).events is None
        got = await client.get(path, params={"stream": "true", "starting_after": 2**53 - 1})
        assert [one["sequence_number"] for one in events(got.content)] == [2**53]
        got = await client.get(path, params={"stream": "true", "starting_after": 2**64})
        assert (got.status_code, got.json()["error"]["param"]) == (400, "starting_after")


async def test_a_background_stream_goes_on_when_its_caller_leaves(rig: ResponsesRig) -> None:
    journey, body = held(), {**ASKED, "background": True, "stream": True}
    async with rig.serving(journey) as client, asyncio.TaskGroup() as tasks:
        call = tasks.create_task(client.post("/v1/responses", json=body))
        await journey.started.wait()
        call.cancel()
        await asyncio.wait([call])
        assert journey.running == 1
        journey.resume()
        path = f"/v1/responses/resp_{journey.requests[0].generation_id.removeprefix('gen_')}"
        found = await client.get(path, params={"stream": "true"})
    check(events(found.content))
    assert journey.finished == 1


async def test_a_cancelled_background_response_frees_its_journey(rig: ResponsesRig) -> None:
    journey = held()
    async with rig.serving(journey) as client:
        begun = await made(client, background=True)
        path = f"/v1/responses/{begun['id']}"
        await journey.started.wait()
        run = rig.background.of("acme", begun["id"])
        assert run is not None and run.task is not None
        assert (await client.post(f"{path}/cancel")).json()["status"] == "cancelled"
        assert (await client.post(f"{path}/cancel")).json()["status"] == "cancelled"
        found = (await client.get(path)).json()
        replayed = events((await client.get(path, params={"stream": "true"})).content)
        assert run.task.done() and journey.cancelled == 1
        journey.resume()
        refused = await client.post(f"/v1/responses/{(await made(client))['id']}/cancel")
    assert found["status"] == "cancelled"
    [message] = found["output"]
    assert (message["status"], message["content"][0]["text"]) == ("incomplete", "One moment")
    assert replayed[-1]["type"] == "response.incomplete"
    assert replayed == events(b"".join([event async for event in run.follow(-1)]))
    assert replayed[-1]["response"] == found
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_id")


async def test_a_deleted_background_response_frees_its_journey_before_a_heartbeat(rig: ResponsesRig) -> None:
    journey = held()
    async with rig.serving(journey) as client:
        rig.background.look_s = 300.0
        await asyncio.sleep(0.1)
        begun = await made(client, background=True)
        await journey.started.wait()
        run = rig.background.of("acme", begun["id"])
        assert run is not None and run.task is not None
        assert (await client.delete(f"/v1/responses/{begun['id']}")).json()["deleted"]
        await asyncio.wait({run.task}, timeout=30)
        assert run.task.done() and journey.cancelled == 1


async def test_a_response_cancelled_at_another_gateway_is_stored_by_the_one_that_runs_it(
    rig: ResponsesRig,
) -> None:
    journey = held()
    async with rig.serving(journey) as runs, rig.serving() as other:
        path = f"/v1/responses/{(await made(runs, background=True))['id']}"
        await journey.started.wait()
        cancelled = (await other.post(f"{path}/cancel")).json()
        replayed = events((await other.get(path, params={"stream": "true"})).content)
        assert journey.cancelled == 1
        found = (await runs.get(path)).json()
    [message] = found["output"]
    assert (message["status"], message["content"][0]["text"]) == ("incomplete", "One moment")
    assert (found["status"], replayed[-1]["type"]) == ("cancelled", "response.incomplete")
    assert cancelled == found == replayed[-1]["response"]


@pytest.mark.parametrize("after", [-1, 0, 7])
async def test_the_stream_of_a_response_cancelled_after_its_gateway_died_has_an_end(
    rig: ResponsesRig, after: int
) -> None:
    async with rig.serving(held()) as client:
        path = f"/v1/responses/{(await made(client, background=True))['id']}"
    async with rig.serving(health=FakeHealth(is_ready=False)) as client:
        rig.now += LEASE_S + 1
        assert (await client.post(f"{path}/cancel")).json()["status"] == "cancelled"
        found = await client.get(path, params={"stream": "true", "starting_after": after})
    replayed = events(found.content)
    assert [one["sequence_number"] for one in replayed] == {-1: [0, 1, 2, 3], 0: [1, 2, 3], 7: [8]}[after]
    assert (replayed[-1]["type"], replayed[-1]["response"]["status"]) == ("response.incomplete", "cancelled")


async def test_the_stream_of_a_response_ends_with_a_failure_when_its_gateway_stops(rig: ResponsesRig) -> None:
    journey = held()
    async with rig.serving(journey) as client:
        begun = await made(client, background=True)
        await journey.started.wait()
        run = rig.background.of("acme", begun["id"])
        assert run is not None and run.task is not None
    [*_, last] = events(b"".join([event async for event in run.follow(-1)]))
    assert last["type"] == "response.failed"
    assert last["response"]["error"]["message"] == "the gateway that ran the response has ended"
    assert (await rig.row(f"/v1/responses/{begun['id']}")).status in ("queued", "in_progress")


@pytest.mark.parametrize("end", ["cut", "cancelled", "followed and cut"])
async def test_the_part_of_a_response_that_is_made_again_is_not_billed_and_any_other_part_is(
    rig: ResponsesRig, end: str
) -> None:
    journey = held()
    async with rig.serving(journey) as client, asyncio.timeout(60):
        path = f"/v1/responses/{(await made(client, background=True))['id']}"
        run = rig.background.of("acme", path.rpartition("/")[2])
        await journey.started.wait()
        assert run is not None and not run.discarded
        if end == "cancelled":
            await client.post(f"{path}/cancel")
        elif end == "followed and cut":
            await rig.background.show(run)
    assert journey.cancelled and run.discarded is (end == "cut")


DRAINED = public_error(Draining("the gateway is stopping"))


async def test_a_background_response_that_the_end_of_a_drain_cuts_is_run_again_by_the_next_gateway(
    rig: ResponsesRig,
) -> None:
    async with rig.serving(FakeJourney(pieces=("One ",), error=DRAINED)) as client:
        path = f"/v1/responses/{(await made(client, background=True))['id']}"
        async with asyncio.timeout(60):
            while rig.background.of("acme", path.rpartition("/")[2]) is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert (await rig.row(path)).status in ("queued", "in_progress")
    rig.now += LEASE_S + 1
    async with rig.serving() as client:
        assert (await ended(client, path))["status"] == "completed"


async def test_a_gateway_that_is_stopping_takes_no_background_response(rig: ResponsesRig) -> None:
    requests, outcomes = InFlightRequests(), list[EdgeRequest]()
    async with rig.serving(emit_edge=outcomes.append) as client:
        rig.background.counted = requests.counted
        assert (await made(client, background=True))["status"] == "queued"
        assert requests.in_flight == 0
        requests.drain()
        for stream in (False, True):
            body = {**ASKED, "background": True, "stream": stream}
            refused = await client.post("/v1/responses", json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert int(refused.headers["retry-after"]) >= 1
    assert [(one.contract, one.status) for one in outcomes] == [("responses", 503)] * 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_background_response_that_the_concurrency_limit_refuses_is_reported(
    rig: ResponsesRig, stream: bool
) -> None:
    limiter = KeyLimiter(ceilings=Ceilings(KeyLimits(), 0, clock=time.monotonic))
    outcomes = list[EdgeRequest]()
    async with rig.serving(limiter=limiter, emit_edge=outcomes.append) as client:
        body = {**ASKED, "background": True, "stream": stream}
        sent = await client.post("/v1/responses", json=body)
    assert (sent.status_code, sent.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert int(sent.headers["retry-after"]) >= 1
    [told] = [one for one in outcomes if one.contract == "responses"]
    assert (told.request_id, told.status) == (sent.headers["x-request-id"], 429)
    assert told.error is not None and told.error.code == "rate_limited"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_background_request_that_a_whole_one_would_be_refused_is_refused_at_once_and_not_stored(
    rig: ResponsesRig, stream: bool
) -> None:
    journey = FakeJourney(pieces=(), error=public_error(UnknownModel("no such model", param="model")))
    async with rig.serving(journey) as client:
        whole = await client.post("/v1/responses", json=ASKED)
        body = {**ASKED, "background": True, "stream": stream}
        sent = await client.post("/v1/responses", json=body)
        assert (sent.status_code, sent.json()) == (whole.status_code, whole.json())
        assert (sent.status_code, sent.json()["error"]["param"]) == (404, "model")
        path = f"/v1/responses/resp_{journey.requests[-1].generation_id.removeprefix('gen_')}"
        assert (await client.get(path)).status_code == 404
    assert not rig.background._runs


async def test_a_background_request_that_is_refused_when_it_is_run_again_ends_as_failed(
    rig: ResponsesRig,
) -> None:
    async with rig.serving(held()) as client:
        path = f"/v1/responses/{(await made(client, background=True))['id']}"
    rig.now += LEASE_S + 1
    gone = public_error(UnknownModel("no such model", param="model"))
    async with rig.serving(FakeJourney(pieces=(), error=gone)) as client:
        found = await ended(client, path)
    assert (found["status"], found["error"]["message"]) == ("failed", "no such model")


async def test_a_background_response_that_a_drain_cuts_keeps_what_its_caller_has_received(
    rig: ResponsesRig,
) -> None:
    async with rig.serving(FakeJourney(pieces=("One ",), error=DRAINED)) as client:
        body = {**ASKED, "background": True, "stream": True}
        sent = events((await client.post("/v1/responses", json=body)).content)
        path = f"/v1/responses/{sent[0]['response']['id']}"
        found = await ended(client, path)
        assert events((await client.get(path, params={"stream": "true"})).content) == sent
    assert found["status"] == "failed" and found["output"][0]["content"][0]["text"] == "One "


async def test_a_background_response_that_fails_says_why(rig: ResponsesRig) -> None:
    gone = public_error(BackendUnavailable("the worker is gone"))
    async with rig.serving(FakeJourney(pieces=("One ",), error=gone)) as client:
        path = f"/v1/responses/{(await made(client, background=True))['id']}"
        sent = events((await client.get(path, params={"stream": "true"})).content)
        check(sent)
        found = (await client.get(path)).json()
    assert found["status"] == sent[-1]["response"]["status"] == "failed"
    assert found["error"]["message"] == "the worker is gone"


async def ended(client: httpx.AsyncClient, path: str) -> dict[str, Any]:
    """Poll until the response has ended, and return it."""
    for _ in range(3_000):
        found: dict[str, Any] = (await client.get(path)).json()
        if found["status"] not in ("queued", "in_progress"):
            return found
        await asyncio.sleep(0.02)
    raise AssertionError(f"it has not ended: {found}")


async def test_a_response_whose_gateway_died_is_run_again_by_another(rig: ResponsesRig) -> None:
    async with rig.serving() as client:
        before = await made(client)
    async with rig.serving(held()) as client:
        begun = await made(client, background=True, previous_response_id=before["id"], metadata={"a": "b"})
    journey, path = FakeJourney(pieces=("Two ", "moments")), f"/v1/responses/{begun['id']}"
    async with rig.serving(journey) as client:
        # The first gateway's lease is still valid, so that gateway may still live.
        await asyncio.sleep(0.1)
        assert not journey.requests
        rig.now += LEASE_S + 1
        found = await ended(client, path)
        sent = events((await client.get(path, params={"stream": "true"})).content)
    check(sent)
    assert (found["status"], sent[-1]["response"]) == ("completed", found)
    assert found["output"][0]["content"][0]["text"] == "Two moments"
    same = ("id", "created_at", "metadata", "previous_response_id", "store", "background")
    assert [found[name] for name in same] == [begun[name] for name in same]
    [request] = journey.requests
    assert [one.content for one in request.messages] == [ASKED["input"], "One moment", ASKED["input"]]
    # The first run may have a row of its own in the ledger.
    assert request.generation_id != f"gen_{begun['id'].removeprefix('resp_')}"
    assert (request.caller.tenant, request.caller.key_id) == ("acme", "key_1")


async def test_a_response_that_a_stopping_gateway_cuts_is_run_again_by_another(rig: ResponsesRig) -> None:
    cut = FakeJourney(pieces=("One ",), error=public_error(Draining("the gateway is stopping")))
    async with rig.serving(cut) as client:
        path = f"/v1/responses/{(await made(client, background=True))['id']}"
        followed = await client.post("/v1/responses", json={**ASKED, "background": True, "stream": True})
        async with asyncio.timeout(60):
            await cut.started.wait()
            while cut.running:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert (await client.get(path)).json()["status"] in ("queued", "in_progress")
        shown = await client.get(f"/v1/responses/{events(followed.content)[0]['response']['id']}")
        assert shown.json()["status"] == "failed", "its client has received events"
    rig.now += LEASE_S + 1
    async with rig.serving() as client:
        assert (await ended(client, path))["status"] == "completed"


async def test_an_abandoned_response_is_run_again_by_only_one_gateway(rig: ResponsesRig) -> None:
    async with rig.serving(held()) as client:
        path = f"/v1/responses/{(await made(client, background=True))['id']}"
    rig.now += LEASE_S + 1
    journeys = FakeJourney(pieces=("One",)), FakeJourney(pieces=("One",))
    async with rig.serving(journeys[0]) as client, rig.serving(journeys[1]):
        assert (await ended(client, path))["status"] == "completed"
    assert sum(len(one.requests) for one in journeys) == 1


async def test_a_response_that_ended_two_gateways_is_not_run_a_third_time(rig: ResponsesRig) -> None:
    async with rig.serving(held()) as client:
        path = f"/v1/responses/{(await made(client, background=True))['id']}"
    rig.now += LEASE_S + 1
    journey = held()
    async with rig.serving(journey), asyncio.timeout(60):
        await journey.started.wait()
    rig.now += LEASE_S + 1
    async with rig.serving() as client:
        found = await ended(client, path)
    assert found["status"] == "failed" and "has ended" in found["error"]["message"]


async def test_a_response_that_several_cancel_at_once_ends_as_cancelled_for_all_of_them(
    rig: ResponsesRig,
) -> None:
    async with rig.serving(held()) as client:
        path = f"/v1/responses/{(await made(client, background=True))['id']}"
        answers = await asyncio.gather(*(client.post(f"{path}/cancel") for _ in range(5)))
        assert [one.json()["status"] for one in answers] == ["cancelled"] * 5
        assert (await rig.row(path)).status == "cancelled"


@pytest.mark.parametrize("given", [{"a": 1}, ["a"], 5, "", None, "twice"], ids=repr)
async def test_an_id_of_an_item_that_names_nothing_is_replaced(rig: ResponsesRig, given: object) -> None:
    items = [{"id": given, "role": "user", "content": text} for text in ("one", "two")]
    async with rig.serving() as client:
        found = await made(client, input=items)
        path, listed, last = f"/v1/responses/{found['id']}/input_items", list[str](), {}
        for _ in items:
            page = (await client.get(path, params={"order": "asc", "limit": 1, **last})).json()
            listed += [one["content"][0]["text"] for one in page["data"]]
            last = {"after": page["last_id"]}
        assert (listed, page["has_more"]) == (["one", "two"], False)
        reference = {"type": "item_reference", "id": found["output"][0]["id"]}
        await made(client, input=[reference, {"role": "user", "content": "go on"}])


async def test_a_response_is_stored_although_its_client_has_parsed_a_number_of_more_than_64_bits(
    rig: ResponsesRig,
) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a":1180591620717411303424}'}
    result = {"type": "function_call_output", "call_id": "c", "output": "x"}
    async with rig.serving() as client:
        found = await made(client, input=[{**call, "parsed_arguments": {"a": 2**70}}, result])
        assert found["store"] is True
        page = (await client.get(f"/v1/responses/{found['id']}/input_items", params={"order": "asc"})).json()
        assert [one["type"] for one in page["data"]] == ["function_call", "function_call_output"]
        assert page["data"][0]["arguments"] == call["arguments"]
        assert (await made(client, previous_response_id=found["id"]))["status"] == "completed"


async def test_the_call_of_an_output_may_be_in_the_conversation_that_it_continues(rig: ResponsesRig) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    asked = {"role": "user", "content": "Is it there?"}
    result = {"type": "function_call_output", "call_id": "c", "output": "x"}
    async with rig.serving() as client:
        before = await made(client, input=[call, asked])
        assert (await made(client, input=[result], previous_response_id=before["id"]))["store"] is True
        refused = await client.post("/v1/responses", json={**ASKED, "input": [result]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input.0.call_id")


async def test_an_item_that_a_client_sends_in_each_turn_is_listed_once(rig: ResponsesRig) -> None:
    item = {"id": "mine", "role": "user", "content": "one"}
    async with rig.serving() as client:
        first = await made(client, input=[item])
        second = await made(client, input=[item], previous_response_id=first["id"])
        page = (await client.get(f"/v1/responses/{second['id']}/input_items")).json()
    assert [one["id"] for one in page["data"]] == [first["output"][0]["id"], "mine"]


async def test_a_defect_of_one_background_response_ends_no_other(rig: ResponsesRig) -> None:
    async with rig.serving(held()) as client:
        first = await made(client, background=True)
        asked = next(iter(rig.background._runs.values())).asked

        async def breaks(asked: Any, sink: Any) -> None:
            raise RuntimeError("a defect")

        other = structs.replace(asked, request=structs.replace(asked.request, generation_id="gen_b"))
        broken = await rig.background.start(other, breaks)
        async with asyncio.timeout(60):
            events = [event async for event in broken.follow(-1)]
        assert b"response.failed" in events[-1]
        assert (await client.get(f"/v1/responses/{first['id']}")).json()["status"] in (
            "queued",
            "in_progress",
        )


class HangsOnce(ResponseStore):
    """Hangs the first time that a response is finished, until that is cancelled."""

    hangs = asyncio.Event()

    async def finish(self, response: StoredResponse) -> bool:
        if not self.hangs.is_set():
            self.hangs.set()
            await asyncio.Event().wait()
        return await super().finish(response)


async def test_a_response_that_is_cancelled_while_its_end_is_stored_has_ended(rig: ResponsesRig) -> None:
    rig.store_type = HangsOnce
    async with rig.serving() as client:
        path = f"/v1/responses/{(await made(client, background=True))['id']}"
        async with asyncio.timeout(60):
            await HangsOnce.hangs.wait()
        assert (await client.post(f"{path}/cancel")).json()["status"] == "completed"
        assert (await rig.row(path)).status == "completed"


async def test_a_heartbeat_does_not_pack_the_input_of_a_response_again(rig: ResponsesRig) -> None:
    async with rig.serving(held()) as client:
        text = "".join(map(str, range(100_000)))
        path = f"/v1/responses/{(await made(client, background=True, input=text))['id']}"
        run = rig.background.of("acme", path.rpartition("/")[2])
        assert run is not None and run.row.size < 1_000
        assert text.encode() in zlib.decompress((await rig.row(path)).input)


@pytest.mark.parametrize(
    ("fields", "on_the_loop"),
    [
        ({"background": True}, False),
        ({"input": "long " * 20_000}, False),
        ({"instructions": "long " * 20_000}, False),
        ({}, True),
    ],
    ids=["background", "long input", "long instructions", "short"],
)
async def test_a_background_response_and_a_large_one_are_packed_beside_the_event_loop(
    rig: ResponsesRig, fields: dict[str, Any], on_the_loop: bool
) -> None:
    threads = list[threading.Thread]()

    class NotesThreads(StoredResponses):
        def packed(
            self, asked: ResponsesRequest, response: Mapping[str, Any], events: bytes | None = None
        ) -> StoredResponse:
            threads.append(threading.current_thread())
            return super().packed(asked, response, events)

    rig.stored_type = NotesThreads
    async with rig.serving() as client:
        path = f"/v1/responses/{(await made(client, **fields))['id']}"
        await ended(client, path)
    assert {one is threading.main_thread() for one in threads} == {on_the_loop}


class SlowToAnswer(ResponseStore):
    """A store that answers late that a response has ended, after the next heartbeat."""

    heartbeats = 0

    async def finish(self, response: StoredResponse) -> bool:
        stored = await super().finish(response)
        before = self.heartbeats
        while self.heartbeats < before + 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return stored

    async def get(self, tenant: str, response_id: str, now: float) -> StoredResponse | None:
        found = await super().get(tenant, response_id, now)
        self.heartbeats += 1
        return found

    async def keep_alive(self, response: StoredResponse, until: float) -> bool:
        self.heartbeats += 1
        return await super().keep_alive(response, until)


async def test_a_heartbeat_while_the_end_of_a_response_is_stored_does_not_cancel_its_journey(
    rig: ResponsesRig,
) -> None:
    rig.store_type = SlowToAnswer
    journey = held()
    async with rig.serving(journey) as client, asyncio.timeout(60):
        path = f"/v1/responses/{(await made(client, background=True))['id']}"
        await journey.started.wait()
        journey.resume()
        assert (await ended(client, path))["status"] == "completed"
        while journey.running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert (journey.finished, journey.cancelled) == (1, 0)


@pytest.mark.parametrize("reruns", [False, True])
async def test_a_damaged_response_keeps_no_other_abandoned_one_from_being_run_again(
    rig: ResponsesRig, reruns: bool
) -> None:
    async with rig.serving(held()) as client:
        damaged, sound = [f"/v1/responses/{(await made(client, background=True))['id']}" for _ in range(2)]
    row = await rig.row(damaged)
    store = ResponseStore(rig.url, tenant_bytes=rig.section.max_tenant_bytes)
    await store.delete("acme", row.response_id)
    again = b"not compressed" if reruns else None
    await store.put(replace(row, body=b"not compressed", again=again))
    await store.close()
    rig.now += LEASE_S + 1
    async with rig.serving() as client:
        assert (await ended(client, sound))["status"] == "completed"
        async with asyncio.timeout(60):
            while (await rig.row(damaged)).status != "failed":  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert (await made(client))["status"] == "completed"


@pytest.mark.parametrize("damage", [b"not compressed", zlib.compress(b"no JSON"), b""])
async def test_a_damaged_response_is_404_wherever_it_is_named_and_can_be_deleted(
    rig: ResponsesRig, damage: bytes
) -> None:
    async with rig.serving() as client:
        path = f"/v1/responses/{(await made(client, background=True))['id']}"
        item = (await ended(client, path))["output"][0]["id"]
        row = await rig.row(path)
        store = ResponseStore(rig.url, tenant_bytes=rig.section.max_tenant_bytes)
        await store.delete("acme", row.response_id)
        await store.put(replace(row, body=damage, events=damage))
        await store.close()
        answers = {
            "response_id": [
                await client.get(path),
                await client.get(path, params={"stream": "true"}),
                await client.get(f"{path}/input_items"),
                await client.post(f"{path}/cancel"),
            ],
            "previous_response_id": [
                await client.post("/v1/responses", json={**ASKED, "previous_response_id": row.response_id})
            ],
            "input.0.id": [
                await client.post(
                    "/v1/responses", json={**ASKED, "input": [{"type": "item_reference", "id": item}]}
                )
            ],
        }
        for param, found in answers.items():
            for one in found:
                error = one.json()["error"]
                assert (one.status_code, error["code"], error["param"]) == (404, "not_found", param)
                assert error["message"].endswith("is damaged; it can only be deleted")
        assert (await client.delete(path)).json()["deleted"]


class FailsOnce(ResponseStore):
    """Raises LedgerUnavailable the first time that a response is finished."""

    failed = False

    async def finish(self, response: StoredResponse) -> bool:
        if not self.failed:
            self.failed = True
            raise LedgerUnavailable("the database is away")
        return await super().finish(response)


async def test_a_database_that_is_away_while_an_abandoned_response_is_ended_is_asked_again(
    rig: ResponsesRig,
) -> None:
    path = await abandoned_for_good(rig)
    rig.store_type = FailsOnce
    async with rig.serving() as client, asyncio.timeout(60):
        store: Any = rig.background.stored.store
        while not store.failed:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        rig.now += LEASE_S + 1  # until then its gateway, which the database kept away too, may be alive
        assert (await ended(client, path))["status"] == "failed"


class Away(ResponseStore):
    """A store whose database cannot be reached for a time."""

    asked = 0

    async def first_lease_end(self) -> float | None:
        self.asked += 1
        if self.asked <= 10:
            raise LedgerUnavailable("the database is away")
        return await super().first_lease_end()


async def test_a_database_that_is_away_is_logged_once_and_so_is_its_return(rig: ResponsesRig) -> None:
    rig.store_type = Away
    with structlog.testing.capture_logs() as log:
        async with rig.serving(), asyncio.timeout(60):
            while len(log) < 2:  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0.01)
    assert [one["event"] for one in log] == ["stored responses unreachable", "stored responses are back"]


class Reachable(ResponseStore):
    """A store whose database can be cut off."""

    cut_off = failures = 0

    async def first_lease_end(self) -> float | None:
        self._check()
        return await super().first_lease_end()

    async def keep_alive(self, response: StoredResponse, until: float) -> bool:
        self._check()
        return await super().keep_alive(response, until)

    def _check(self) -> None:
        if self.cut_off:
            self.failures += 1
            raise LedgerUnavailable("the database is away")


async def test_a_response_whose_lease_ended_while_the_database_was_away_is_left_to_its_gateway(
    rig: ResponsesRig,
) -> None:
    rig.store_type = Reachable
    async with rig.serving(held()) as client:
        runs: Any = rig.background.stored.store
        path = f"/v1/responses/{(await made(client, background=True))['id']}"
        async with rig.serving(), asyncio.timeout(60):
            looks: Any = rig.background.stored.store
            runs.cut_off = looks.cut_off = True
            rig.now += LEASE_S + 1
            while not (runs.failures and looks.failures):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            looks.cut_off = False
            await asyncio.sleep(0.2)
            row = await rig.row(path)
            assert row.again is not None, "the other gateway has not claimed it"
            runs.cut_off = False
            while (await rig.row(path)).alive_until == row.alive_until:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


class Unwritable(ResponseStore):
    """A store whose database takes no end of a response for a time."""

    away = True

    async def finish(self, response: StoredResponse) -> bool:
        if self.away:
            raise LedgerUnavailable("the database is away")
        return await super().finish(response)


async def test_a_drain_waits_for_the_database_to_take_an_answer_that_has_ended(rig: ResponsesRig) -> None:
    rig.store_type = Unwritable
    requests = InFlightRequests()
    async with rig.serving() as client, asyncio.timeout(60):
        rig.background.reporting = requests.reporting
        store: Any = rig.background.stored.store
        path = f"/v1/responses/{(await made(client, background=True))['id']}"
        while not requests.in_flight:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        requests.drain()
        store.away = False
        await requests.drained()
        assert (await rig.row(path)).status == "completed"


async def test_an_ended_answer_that_the_database_never_took_is_an_error_in_the_log(rig: ResponsesRig) -> None:
    rig.store_type = Unwritable
    requests = InFlightRequests()
    with structlog.testing.capture_logs() as log:
        async with rig.serving() as client, asyncio.timeout(60):
            rig.background.reporting = requests.reporting
            response_id = (await made(client, background=True))["id"]
            while not requests.in_flight:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert [one["response"] for one in log if one["log_level"] == "error"] == [response_id]


class Stopped(ResponseStore):
    """The store of a gateway that is stopped, as by SIGSTOP, until ``goes_on``."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, **options)
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    async def keep_alive(self, response: StoredResponse, until: float) -> bool:
        await self.goes_on.wait()
        return await super().keep_alive(response, until)


class PushesLate(FakeJourney):
    async def _run(self, request: Any, sink: Any) -> None:
        await self._resumed.wait()
        await super()._run(request, sink)


async def test_a_gateway_that_was_stopped_gives_up_the_response_that_another_one_runs_again(
    rig: ResponsesRig,
) -> None:
    rig.store_type = Stopped
    first, second = PushesLate(pieces=("One ", "moment")), FakeJourney(pieces=("Two",), holds=True)
    async with rig.serving(first) as client, asyncio.timeout(60):
        store: Any = rig.background.stored.store
        path = f"/v1/responses/{(await made(client, background=True))['id']}"
        run = rig.background.of("acme", path.rpartition("/")[2])
        await first.started.wait()
        store.goes_on.clear()
        rig.now += LEASE_S + 1
        async with rig.serving(second) as other:
            await second.started.wait()
            first.resume()
            await asyncio.sleep(0.1)
            store.goes_on.set()
            while first.running:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert (first.finished, first.cancelled, second.running) == (0, 1, 1)
            assert run is not None and run.discarded
            second.resume()
            found = await ended(other, path)
    assert (found["status"], found["output"][0]["content"][0]["text"]) == ("completed", "Two")


class Unfinished(Reachable):
    """A store whose database is cut off when a response ends."""

    async def finish(self, response: StoredResponse) -> bool:
        self._check()
        return await super().finish(response)


async def test_the_end_of_a_response_is_stored_when_the_database_is_back_and_not_made_again(
    rig: ResponsesRig,
) -> None:
    rig.store_type = Unfinished
    journey = held()
    async with rig.serving(journey) as client, asyncio.timeout(60):
        store: Any = rig.background.stored.store
        path = f"/v1/responses/{(await made(client, background=True))['id']}"
        await journey.started.wait()
        store.cut_off = True
        journey.resume()
        run = rig.background.of("acme", path.rpartition("/")[2])
        assert run is not None
        [*_, last] = events(b"".join([event async for event in run.follow(-1)]))
        assert (await rig.row(path)).status in ("queued", "in_progress")
        rig.now += LEASE_S + 1
        store.cut_off = False
        assert await ended(client, path) == last["response"]
        assert len(journey.requests) == 1
        assert not rig.background._runs


class AwayOnce(ResponseStore):
    """A store whose database is away at the second read of a response."""

    reads = 0
    away = asyncio.Event()

    async def get(self, tenant: str, response_id: str, now: float) -> StoredResponse | None:
        self.reads += 1
        if self.reads == 2:
            self.away.set()
            raise LedgerUnavailable("the database is away")
        return await super().get(tenant, response_id, now)


async def test_the_stream_of_a_response_that_runs_elsewhere_outlasts_the_database_and_ends_when_it_is_deleted(
    rig: ResponsesRig,
) -> None:
    async with rig.serving(held()) as runs, asyncio.TaskGroup() as tasks:
        path = f"/v1/responses/{(await made(runs, background=True))['id']}"
        rig.store_type = AwayOnce
        async with rig.serving() as other, asyncio.timeout(60):
            following = tasks.create_task(other.get(path, params={"stream": "true"}))
            await AwayOnce.away.wait()
            assert (await runs.delete(path)).status_code == 200
            stream = await following
    assert (stream.status_code, stream.content) == (200, b"")


class Counting(ResponseStore):
    """Counts how often it is asked for abandoned responses."""

    asked = 0

    async def first_lease_end(self) -> float | None:
        Counting.asked += 1
        return await super().first_lease_end()


async def test_abandoned_responses_are_looked_for_when_a_lease_can_end_and_found_then(
    rig: ResponsesRig,
) -> None:
    rig.store_type = Counting
    async with rig.serving() as client:
        await asyncio.sleep(0.2)
        assert Counting.asked == 1  # there is no unfinished response: none can be abandoned within a lease
        async with rig.serving(held()) as other:
            path = f"/v1/responses/{(await made(other, background=True))['id']}"
        rig.now += LEASE_S / 2
        await asyncio.sleep(0.2)
        looks = Counting.asked
        rig.now += LEASE_S / 2 + 1
        assert (await ended(client, path))["status"] == "completed"
        assert looks == 2  # each gateway has looked once


async def test_a_response_whose_stream_was_followed_is_not_run_again(rig: ResponsesRig) -> None:
    journey = held()
    async with rig.serving(journey) as client, asyncio.TaskGroup() as tasks:
        path = f"/v1/responses/{(await made(client, background=True))['id']}"
        following = tasks.create_task(client.get(path, params={"stream": "true"}))
        for _ in range(3_000):
            if not (await rig.row(path)).again:
                break
            await asyncio.sleep(0.02)
        following.cancel()
    streamed = FakeJourney(pieces=("One ",), holds=True)
    async with rig.serving(streamed) as client, asyncio.TaskGroup() as tasks:
        body = {**ASKED, "background": True, "stream": True}
        call = tasks.create_task(client.post("/v1/responses", json=body))
        await streamed.started.wait()
        call.cancel()
    other = f"/v1/responses/resp_{streamed.requests[0].generation_id.removeprefix('gen_')}"
    rig.now += LEASE_S + 1
    last = FakeJourney()
    async with rig.serving(last) as client:
        for one in (path, other):
            assert "has ended" in (await ended(client, one))["error"]["message"]
    assert not last.requests


async def test_a_response_is_not_run_again_for_a_key_that_was_revoked(rig: ResponsesRig) -> None:
    class Revoked(FakeKeys):
        def by_id(self, key_id: str) -> Caller:
            raise InvalidKey("the key was revoked")

    async with rig.serving(held()) as client:
        path = f"/v1/responses/{(await made(client, background=True))['id']}"
    rig.now += LEASE_S + 1
    journey = FakeJourney()
    async with rig.serving(journey, keys=Revoked()) as client:
        found = await ended(client, path)
    assert (found["status"], found["error"]["message"]) == ("failed", "the key was revoked")
    assert not journey.requests


async def test_a_defect_that_keeps_a_response_from_being_run_again_is_logged_with_its_place(
    rig: ResponsesRig, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(FakeKeys):
        def by_id(self, key_id: str) -> Caller:
            raise RuntimeError("a defect")

    async with rig.serving(held()) as client:
        path = f"/v1/responses/{(await made(client, background=True))['id']}"
    rig.now += LEASE_S + 1
    async with rig.serving(FakeJourney(), keys=Broken()) as client:
        found = await ended(client, path)
    assert found["status"] == "failed" and "a defect" not in found["error"]["message"]
    assert "unexpected RuntimeError in request" in caplog.text and "by_id" in caplog.text


async def test_a_gateway_that_is_not_ready_runs_no_abandoned_response(rig: ResponsesRig) -> None:
    async with rig.serving(held()) as client:
        path = f"/v1/responses/{(await made(client, background=True))['id']}"
    rig.now += LEASE_S + 1
    health, journey = FakeHealth(is_ready=False), FakeJourney()
    async with rig.serving(journey, health=health) as client:
        await asyncio.sleep(0.2)
        assert (await client.get(path)).json()["status"] in ("queued", "in_progress") and not journey.requests
        health.is_ready = True
        assert (await ended(client, path))["status"] == "completed"


async def test_the_number_of_background_responses_is_bounded(connect: Connect, tmp_path: Path) -> None:
    rig = ResponsesRig(connect, tmp_path, max_background=1)
    async with rig.serving(held()) as client:
        await made(client, background=True)
        refused = await client.post("/v1/responses", json={**ASKED, "background": True})
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
