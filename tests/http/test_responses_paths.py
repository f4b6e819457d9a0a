"""The paths of OpenAI's Responses, over HTTP."""

from __future__ import annotations

from typing import Any

from gateway.errors import BackendUnavailable, public_error
from gateway.testing import CALLER_KEY, FakeJourney, fake_services
from tests.contracts.responses_language import check
from tests.contracts.test_responses_stream import events
from tests.http.fakes import FakePrompts

ASKED = {"model": "demo", "input": "hi"}
KEY = {"Authorization": f"Bearer {CALLER_KEY}"}


async def test_a_response_comes_whole_and_streamed(connect: Any) -> None:
    async with connect(fake_services(FakeJourney(pieces=("One ", "moment")))) as client:
        whole = await client.post("/v1/responses", json=ASKED, headers=KEY)
        streamed = await client.post("/v1/responses", json={**ASKED, "stream": True}, headers=KEY)
    assert whole.json()["output"][0]["content"][0]["text"] == "One moment"
    assert streamed.headers["content-type"].startswith("text/event-stream")
    sent = events(streamed.content)
    check(sent)
    assert sent[-1]["response"]["output"][0]["content"][0]["text"] == "One moment"


async def test_an_answer_that_breaks_ends_in_a_failure_and_one_that_never_began_is_an_error(
    connect: Any,
) -> None:
    gone = public_error(BackendUnavailable("the worker is gone"))
    async with connect(fake_services(FakeJourney(pieces=("One ",), error=gone))) as client:
        broken = await client.post("/v1/responses", json={**ASKED, "stream": True}, headers=KEY)
    sent = events(broken.content)
    check(sent)
    assert sent[-1]["type"] == "response.failed"
    async with connect(fake_services(FakeJourney(pieces=(), error=gone))) as client:
        refused = await client.post("/v1/responses", json={**ASKED, "stream": True}, headers=KEY)
        stranger = await client.post("/v1/responses", json=ASKED, headers={"Authorization": "Bearer x"})
        stored = await client.get("/v1/responses/resp_1", headers=KEY)
    assert (refused.status_code, refused.json()["error"]["sluice_code"]) == (503, "backend_unavailable")
    assert (stranger.status_code, stranger.json()["error"]["type"]) == (401, "authentication_error")
    assert stored.status_code == 404 and stored.json()["error"]["message"]


async def test_input_tokens_are_counted_by_what_would_be_sent(connect: Any) -> None:
    prompts: Any = FakePrompts()
    async with connect(fake_services(prompts=prompts)) as client:
        found = await client.post(
            "/v1/responses/input_tokens", json={**ASKED, "instructions": "four"}, headers=KEY
        )
        wrong = await client.post("/v1/responses/input_tokens", json={"model": "demo"}, headers=KEY)
    assert found.json()["object"] == "response.input_tokens" and found.json()["input_tokens"] > 0
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "input")
