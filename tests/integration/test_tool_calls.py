"""The demo model calls the shop's tools, as the official client sees it; also when its engine is killed."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.integration.live import ADMIN_KEY, LiveGateway, gateway


def tool(name: str, description: str, field: str, **more: Any) -> Any:
    schema = {"type": "object", "properties": {field: {"type": "string"}}, "required": [field]}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": schema, **more},
    }


TOOLS = [
    tool("check_stock", "Look up the stock and price of a series.", "title"),
    tool("order_status", "Look up the status of an order.", "order_id"),
]
STOCK: Any = [{"role": "user", "content": "Is Berserk in stock?"}]
ORDER: Any = [{"role": "user", "content": "Where is my order 48213?"}]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveGateway]:
    # A request waits for the check of its grammar on a busy machine, too.
    with gateway(tmp_path_factory.mktemp("tools"), SLUICE_ADMISSION__MAX_WAIT_MS="60000") as running:
        yield running


@pytest.fixture
def client(live: LiveGateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key=ADMIN_KEY, max_retries=0) as client:
        yield client


def asked(
    client: openai.OpenAI, messages: Any, **fields: Any
) -> tuple[str | None, list[tuple[str, Any]], str]:
    """Text, calls and finish reason of a whole answer."""
    answer: Any = client.chat.completions.create(model="demo", messages=messages, tools=TOOLS, **fields)
    choice = answer.choices[0]
    calls = [
        (one.function.name, json.loads(one.function.arguments)) for one in choice.message.tool_calls or ()
    ]
    return choice.message.content, calls, choice.finish_reason


def streamed(client: openai.OpenAI, messages: Any, live: LiveGateway | None = None) -> tuple[list[Any], str]:
    """Calls and finish reason of a stream; ``live``: its engine is killed inside the first arguments."""
    with client.chat.completions.stream(model="demo", messages=messages, tools=TOOLS) as stream:
        for event in stream:
            if event.type == "tool_calls.function.arguments.delta" and event.arguments_delta and live:
                os.kill(live.engine_pid(), signal.SIGKILL)
                live = None
        choice: Any = stream.get_final_completion().choices[0]
    return [
        (one.id, one.function.name, one.function.arguments) for one in choice.message.tool_calls or ()
    ], choice.finish_reason


def test_the_model_calls_the_tool_that_answers(client: openai.OpenAI) -> None:
    assert asked(client, STOCK) == (None, [("check_stock", {"title": "Berserk"})], "tool_calls")
    assert asked(client, ORDER) == (None, [("order_status", {"order_id": "48213"})], "tool_calls")


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ("stock", ("", "length")),
        ("title", ('{"', "length")),
        ("Berserk", ('{"title":"', "length")),
        ("}}", ('{"title":"Berserk"', "length")),
        ("</tool_call>", ('{"title":"Berserk"}', "tool_calls")),
    ],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_stop_string_cuts_a_call_that_has_not_all_its_arguments_and_no_backend_has_failed(
    client: openai.OpenAI, live: LiveGateway, stop: str, expected: tuple[str, str], stream: bool
) -> None:
    begins = live.log.stat().st_size
    asked: Any = {"model": "demo", "messages": STOCK, "tools": TOOLS, "stop": [stop]}
    if stream:
        choices = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
        reason = choices[-1].finish_reason
        pieces = [call.function.arguments for one in choices for call in one.delta.tool_calls or ()]
    else:
        choice = client.chat.completions.create(**asked).choices[0]
        reason = choice.finish_reason
        pieces = [call.function.arguments for call in choice.message.tool_calls or ()]
    assert ("".join(pieces), reason) == expected
    with live.log.open("rb") as log:
        log.seek(begins)
        assert b"attempt failed" not in log.read()


def test_the_model_answers_from_the_tools_result(client: openai.OpenAI) -> None:
    call = {"name": "check_stock", "arguments": '{"title":"Berserk"}'}
    result = json.dumps({"title": "Berserk", "stock": "out of stock", "price": "14.99"})
    history = [
        *STOCK,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "c", "content": result},
    ]
    text, calls, reason = asked(client, history)
    assert (calls, reason) == ([], "stop") and text and ("out of stock" in text or "14.99" in text)


def test_the_tool_choice_of_a_request_is_obeyed(client: openai.OpenAI) -> None:
    greeting: Any = [{"role": "user", "content": "Hello!"}]
    assert asked(client, greeting, tool_choice="required")[2] == "tool_calls"
    named = {"type": "function", "function": {"name": "order_status"}}
    assert [name for name, _ in asked(client, STOCK, tool_choice=named)[1]] == ["order_status"]
    text, calls, reason = asked(client, STOCK, tool_choice="none")
    assert (calls, reason) == ([], "stop") and text and "<tool_call>" not in text


def test_a_grammar_bomb_in_a_tool_is_refused_by_name(client: openai.OpenAI) -> None:
    bomb = tool("bomb", "", "x")
    bomb["function"]["parameters"] = {
        "type": "object", "properties": {"x": {"type": "integer", "multipleOf": 999_979}}, "required": ["x"],
    }  # fmt: skip
    bomb["function"]["strict"] = True
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="demo", messages=STOCK, tools=[bomb])
    assert refused.value.param == "tools.0.function.parameters"


def test_a_tool_that_is_not_strict_takes_any_object_where_its_schema_cannot_be_followed(
    client: openai.OpenAI,
) -> None:
    loose = tool("loose", "", "x")
    loose["function"]["parameters"] = {"type": "object", "properties": {"x": {"multipleOf": 999_979}}}
    answer: Any = client.chat.completions.create(
        model="demo", messages=STOCK, tools=[loose], tool_choice="required", max_tokens=200
    )
    [call] = answer.choices[0].message.tool_calls
    assert isinstance(json.loads(call.function.arguments), dict)


def test_a_stream_has_the_calls_of_the_whole_answer_also_when_its_engine_is_killed(
    client: openai.OpenAI, live: LiveGateway
) -> None:
    calls, reason = streamed(client, ORDER)
    assert ([call[1:] for call in calls], reason) == (
        [("order_status", '{"order_id":"48213"}')],
        "tool_calls",
    )
    killed, reason = streamed(client, ORDER, live)
    assert ([call[1:] for call in killed], reason) == ([call[1:] for call in calls], "tool_calls")
    assert "engine lost" in live.log.read_text()
    assert Path(f"/proc/{live.engine_pid()}").exists()


def test_a_response_has_the_call_of_the_whole_one_also_when_its_engine_is_killed(
    client: openai.OpenAI, live: LiveGateway
) -> None:
    flat: Any = [{"type": "function", **one["function"]} for one in TOOLS]
    asked: Any = {"model": "demo", "input": ORDER[0]["content"], "tools": flat}
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        for event in stream:
            if event.type == "response.output_item.added":
                os.kill(live.engine_pid(), signal.SIGKILL)
        killed = stream.get_final_response()
    found: list[Any] = [response.output for response in (whole, killed)]
    assert [[(one.type, one.name, one.arguments) for one in output] for output in found] == [
        [("function_call", "order_status", '{"order_id":"48213"}')]
    ] * 2
    assert (killed.status, killed.error) == ("completed", None)
    counted = client.responses.input_tokens.count(**asked)
    assert whole.usage is not None and counted.input_tokens == whole.usage.input_tokens


PATCH: Any = {
    "syntax": "lark",
    "definition": 'start: "*** Begin Patch" LF "*** Delete File: " /[a-z]{1,8}/ LF "*** End Patch"\n%import common.LF',
}


def test_a_custom_tools_lark_grammar_binds_its_raw_input_also_when_its_engine_is_killed(
    client: openai.OpenAI, live: LiveGateway
) -> None:
    flat: Any = {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", **PATCH}}
    asked: Any = {"model": "demo", "input": "Patch it.", "tools": [flat], "tool_choice": "required"}
    whole: Any = client.responses.create(**asked)
    [call] = whole.output
    assert (whole.status, call.type, call.status) == ("completed", "custom_tool_call", "completed")
    assert re.fullmatch(r"\*\*\* Begin Patch\n\*\*\* Delete File: [a-z]{1,8}\n\*\*\* End Patch", call.input)
    pieces: list[str] = []
    with client.responses.stream(**asked) as stream:
        for event in stream:
            if event.type == "response.custom_tool_call_input.delta":
                pieces.append(event.delta)
                if len(pieces) == 2:
                    os.kill(live.engine_pid(), signal.SIGKILL)
        killed: Any = stream.get_final_response()
    assert (killed.status, "".join(pieces), killed.output[0].input) == ("completed", call.input, call.input)

    nested: Any = {"name": "apply_patch", "format": {"type": "grammar", "grammar": PATCH}}
    answer: Any = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "Patch it."}],
        tools=[{"type": "custom", "custom": nested}],
        tool_choice="required",
    )
    [choice] = answer.choices
    assert (choice.finish_reason, choice.message.tool_calls[0].custom.input) == ("tool_calls", call.input)
    cut: Any = client.responses.create(**asked, max_output_tokens=whole.usage.output_tokens - 8)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_a_tool_or_shape_that_cannot_be_followed_is_refused_by_the_bodys_path(live: LiveGateway) -> None:
    form = {"syntax": "regex", "definition": "(["}
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(["}}, "required": ["a"]}
    flat = {"type": "custom", "name": "note", "format": {"type": "grammar", **form}}
    nested = {"name": "note", "format": {"type": "grammar", "grammar": form}}
    strict = {"type": "function", "name": "f", "strict": True, "parameters": schema}
    turn = [{"role": "user", "content": "Note it."}]
    responses: list[tuple[dict[str, Any], str]] = [
        ({"tools": [flat]}, "tools.0.format"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [flat]}]}, "tools.0.tools.0.format"),
        ({"tools": [strict]}, "tools.0.parameters"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}},
            "text.format.schema",
        ),
    ]
    chat = {"messages": turn, "tools": [{"type": "custom", "custom": nested}]}
    for path, body, param in (
        *(("/v1/responses", {"input": turn, **body}, param) for body, param in responses),
        ("/v1/chat/completions", chat, "tools.0.custom.format"),
    ):
        refused = httpx.post(
            f"{live.url}{path}", json={"model": "demo", **body}, headers=live.headers, timeout=60
        )
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, param)
        assert error["message"].startswith(f"{param} cannot be followed: ")
