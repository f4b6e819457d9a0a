"""The paths of OpenAI's Responses, over HTTP."""

from __future__ import annotations

from typing import Any

from gateway.contracts.values import FinishReason
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


async def test_where_nothing_is_stored_the_field_that_names_a_response_is_refused(connect: Any) -> None:
    after = {**ASKED, "previous_response_id": "resp_1"}
    reference = {**ASKED, "input": [{"type": "item_reference", "id": "msg_1_0"}]}
    async with connect(fake_services()) as client:
        for path in ("", "/input_tokens", "/compact"):
            for body, param in ((after, "previous_response_id"), (reference, "input.0.id")):
                refused = await client.post(f"/v1/responses{path}", json=body, headers=KEY)
                assert (refused.status_code, refused.json()["error"]["param"]) == (404, param)
        unknown = await client.get("/v1/responses/resp_1", headers=KEY)
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "response_id")


async def test_input_tokens_are_counted_by_what_would_be_sent(connect: Any) -> None:
    prompts: Any = FakePrompts()
    async with connect(fake_services(prompts=prompts)) as client:
        found = await client.post(
            "/v1/responses/input_tokens", json={**ASKED, "instructions": "four"}, headers=KEY
        )
        wrong = await client.post("/v1/responses/input_tokens", json={"model": "demo"}, headers=KEY)
    assert found.json()["object"] == "response.input_tokens" and found.json()["input_tokens"] > 0
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "input")


CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "Is Berserk there?"},
    {"type": "function_call", "call_id": "c1", "name": "stock", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "41 volumes"},
    {"role": "assistant", "content": "Yes, 41 volumes."},
    {"role": "user", "content": [{"type": "input_text", "text": "And this one?"}, {"type": "input_image"}]},
]
PICTURE = f"data:image/png;base64,{'A' * 40_000}"
COMPACT = "/v1/responses/compact"


async def test_a_conversation_is_compacted_to_the_users_messages_and_the_models_summary(connect: Any) -> None:
    journey = FakeJourney(pieces=("Berserk: ", "41 volumes."))
    tools = [{"type": "function", "name": "stock", "parameters": {}}]
    chat = [
        *CHAT[:-1],
        {**CHAT[-1], "content": [CHAT[-1]["content"][0], {"type": "input_image", "image_url": PICTURE}]},
    ]
    async with connect(fake_services(journey)) as client:
        made = await client.post(COMPACT, json={"model": "demo", "input": chat, "tools": tools}, headers=KEY)
        *asked, instruction = journey.requests[-1].messages
        compacted = made.json()
        again = {"model": "demo", "input": [*compacted["output"], {"role": "user", "content": "Thanks."}]}
        went_on = await client.post("/v1/responses", json=again, headers=KEY)
    assert made.status_code == 200 and compacted["object"] == "response.compaction"
    assert compacted["id"].startswith("resp_") and compacted["usage"]["output_tokens"] > 0
    assert (len(asked), instruction.role) == (5, "user") and "Summarize" in instruction.content
    first, second, summary = compacted["output"]
    assert first["content"] == [{"type": "input_text", "text": "Is Berserk there?"}]
    assert second["content"][1]["image_url"] == PICTURE
    assert summary["type"] == "compaction"
    assert went_on.status_code == 200, went_on.text
    roles = [(one.role, one.content) for one in journey.requests[-1].messages[-2:]]
    assert roles == [
        ("assistant", "Summary of our conversation so far:\nBerserk: 41 volumes."),
        ("user", "Thanks."),
    ]


async def test_what_is_no_conversation_or_no_summary_is_refused_by_its_field(connect: Any) -> None:
    cut = {"finish_reason": FinishReason.LENGTH}
    foreign = {"type": "compaction", "encrypted_content": "gAAAAABforeign"}
    async with connect(fake_services(FakeJourney(pieces=("Ber",), changes=cut))) as client:
        for path, changes, param in (
            (COMPACT, {"input": None}, "input"),
            (COMPACT, {"input": []}, "input"),
            (COMPACT, {"stream": True}, "stream"),
            (COMPACT, {"store": True}, "store"),
            (COMPACT, {"previous_response_id": "resp_9"}, "previous_response_id"),
            (COMPACT, {}, "input"),
            ("/v1/responses", {"input": [foreign, CHAT[0]]}, "input.0.encrypted_content"),
        ):
            refused = await client.post(path, json={**ASKED, **changes}, headers=KEY)
            assert refused.status_code in (400, 404), changes
            assert refused.json()["error"]["param"] == param, refused.text
    assert "gAAAA" not in refused.text
