"""The bodies of `/v1/responses`: the internal request of each, and the fields that are refused by name."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
from msgspec import structs
from openai.types.responses import (
    CustomTool,
    FunctionTool,
    ParsedResponseFunctionToolCall,
    ParsedResponseOutputMessage,
    ParsedResponseOutputText,
    ResponseCustomToolCall,
)
from openai.types.responses.input_token_count_params import InputTokenCountParams
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from openai.types.shared import Reasoning

from budgeting.values import ImageContent, Message, Role, ToolCall, ToolChoice, ToolChoiceMode, ToolKind
from gateway.contracts.features import Feature
from gateway.contracts.responses.request import ResponsesRequest
from gateway.contracts.responses.stream import ResponsesDialect
from gateway.contracts.values import Contract, FormatType
from gateway.errors import InvalidRequest, PublicError
from tests.contracts.test_openai_requests import ORIGIN as SHORT
from tests.contracts.test_openai_requests import chat

ORIGIN = structs.replace(SHORT, max_messages=100)

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
# A coding agent's body: two parallel calls, a custom tool with raw text, a namespace.
AGENT: dict[str, Any] = {
    "model": "demo",
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<rules>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Mend it."}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None,
         "content": [{"type": "reasoning_text", "text": "Look first."}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "Let me see.", "annotations": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "shell", "arguments": "{}"},
        {"type": "function_call", "call_id": "call_2", "namespace": "fs", "name": "read", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1", "output": "ok"},
        {"type": "function_call_output", "call_id": "call_2",
         "output": [{"type": "input_text", "text": "text"}]},
        {"type": "custom_tool_call", "call_id": "call_3", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "call_3", "output": "Done!"},
    ],
    "tools": [
        {"type": "function", "name": "shell", "description": "Run.", "strict": False, "parameters": SCHEMA},
        {"type": "custom", "name": "apply_patch", "description": "Patch.",
         "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}},
        {"type": "namespace", "name": "fs", "description": "Files",
         "tools": [{"type": "function", "name": "read", "parameters": SCHEMA}]},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "conversation-1",
    "client_metadata": {"x": "y"},
}  # fmt: skip


def test_an_image_of_the_users_is_a_part_of_the_message() -> None:
    image = {"type": "input_image", "image_url": "https://example.org/a", "detail": "high", "file_id": None}
    body = {
        "model": "demo",
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "?"}, image]}],
    }
    request = parsed(body).request
    found = ImageContent("https://example.org/a", "high", "input.0.content.1.image_url")
    assert request.messages == (Message(Role.USER, "?", parts=("?", found)),)
    assert Feature.IMAGES in request.needs


@pytest.mark.parametrize("detail", ["auto", "low", "high", "original"])
def test_an_image_may_have_each_detail_that_the_official_client_knows(detail: str) -> None:
    url = "https://example.org/a"
    item = {"role": "user", "content": [{"type": "input_image", "image_url": url, "detail": detail}]}
    image = {"type": "image_url", "image_url": {"url": url, "detail": detail}}
    response = parsed({"model": "demo", "input": [item]}).request
    for one in (response, chat(messages=[{"role": "user", "content": [image]}]).request):
        (found,) = one.messages[0].parts
        assert isinstance(found, ImageContent) and found.detail == detail


@pytest.mark.parametrize("kind", ["function_call_output", "custom_tool_call_output"])
def test_an_image_of_a_tools_output_is_a_part_of_the_result(kind: str) -> None:
    image = {"type": "input_image", "image_url": "https://example.org/a"}
    output = [{"type": "input_text", "text": "Page 1"}, image]
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    given = [call, {"type": kind, "call_id": "c", "output": output}]
    request = parsed({"model": "demo", "input": given}).request
    found = ImageContent("https://example.org/a", None, "input.1.output.1.image_url")
    assert request.messages[1] == Message(Role.TOOL, "Page 1", tool_call_id="c", parts=("Page 1", found))
    assert Feature.IMAGES in request.needs


def parsed(body: dict[str, Any]) -> ResponsesRequest:
    return cast("ResponsesRequest", ResponsesDialect().parse(json.dumps(body).encode(), ORIGIN))


def test_an_agents_body_becomes_one_conversation() -> None:
    request = parsed(AGENT).request
    assert (
        request.contract is Contract.RESPONSES and request.stream and request.session_id == "conversation-1"
    )
    assert request.messages == (
        Message(Role.SYSTEM, "You are a coding agent."),
        Message(Role.SYSTEM, "<rules>"),
        Message(Role.USER, "Mend it."),
        Message(
            Role.ASSISTANT,
            "Let me see.",
            tool_calls=(ToolCall("call_1", "shell", "{}"), ToolCall("call_2", "fs__read", "{}")),
            reasoning="Look first.",
        ),
        Message(Role.TOOL, "ok", tool_call_id="call_1"),
        Message(Role.TOOL, "text", tool_call_id="call_2"),
        Message(
            Role.ASSISTANT, "", tool_calls=(ToolCall("call_3", "apply_patch", "*** Begin", ToolKind.CUSTOM),)
        ),
        Message(Role.TOOL, "Done!", tool_call_id="call_3"),
    )
    assert [(tool.name, tool.kind) for tool in request.tools] == [
        ("shell", ToolKind.FUNCTION),
        ("apply_patch", ToolKind.CUSTOM),
        ("fs__read", ToolKind.FUNCTION),
    ]
    assert request.tool_choice == ToolChoice(ToolChoiceMode.AUTO)
    assert request.parallel_tool_calls is False and request.reasoning_effort == "medium"
    assert request.needs >= {Feature.TOOLS, Feature.CUSTOM_TOOLS, Feature.REASONING_EFFORT}
    assert parsed(AGENT).namespaces == {"fs__read": ("fs", "read")}


@pytest.mark.parametrize("by_alias", [True, False])
def test_the_items_of_the_official_client_can_be_sent_back(by_alias: bool) -> None:
    part = ParsedResponseOutputText(
        annotations=[], text="{}", type="output_text", parsed={"a": 1}, logprobs=None
    )
    given = (
        ParsedResponseOutputMessage(
            id="m", content=[part], role="assistant", status="completed", type="message"
        ),
        ParsedResponseFunctionToolCall(
            arguments="{}", call_id="c", name="f", type="function_call", parsed_arguments={"a": 1}
        ),
        ResponseCustomToolCall(call_id="d", input="x", name="p", type="custom_tool_call"),
    )
    items = [one.model_dump(by_alias=by_alias) for one in given]
    turns = [{"role": "user", "content": "hi"}, *items, {"role": "user", "content": "go on"}]
    answer = parsed({"model": "demo", "input": turns}).request.messages[1]
    assert (answer.content, [call.name for call in answer.tool_calls]) == ("{}", ["f", "p"])


def test_a_custom_tools_grammar_has_the_form_of_chats_that_workers_get() -> None:
    [form] = [tool.format for tool in parsed(AGENT).request.tools if tool.format is not None]
    grammar = {"syntax": "lark", "definition": "start: /.+/"}
    assert json.loads(form) == {"type": "grammar", "grammar": grammar}
    assert parsed(AGENT).echo["tools"][1]["format"] == {"type": "grammar", **grammar}


def test_the_response_repeats_its_request() -> None:
    echo = parsed(AGENT).echo
    assert echo["instructions"] == "You are a coding agent." and echo["store"] is False
    assert echo["tools"][0]["name"] == "shell" and echo["tools"][2]["tools"][0]["name"] == "read"
    plain = parsed({"model": "demo", "input": "hi"}).echo
    assert (plain["tool_choice"], plain["tools"], plain["text"]) == ("auto", [], {"format": {"type": "text"}})


def test_an_instruction_behind_the_last_turn_is_the_users() -> None:
    answer, retry = {"role": "assistant", "content": "hm"}, {"role": "system", "content": "Call the tool."}
    given = [{"role": "user", "content": "hi"}, answer, retry]
    assert parsed({"model": "demo", "input": given}).request.messages[-1] == Message(
        Role.USER, "Call the tool."
    )


def test_two_answers_in_a_row_stay_two_messages() -> None:
    said = [{"role": "assistant", "content": "One."}, {"role": "assistant", "content": "Two."}]
    messages = parsed(
        {"model": "demo", "input": [*said, {"role": "user", "content": "Go on."}]}
    ).request.messages
    assert [one.content for one in messages] == ["One.", "Two.", "Go on."]


def test_a_schema_and_a_named_tool_are_asked_for() -> None:
    body = {
        "model": "demo",
        "input": "hi",
        "text": {"format": {"type": "json_schema", "name": "r", "strict": True, "schema": SCHEMA}},
        "tools": [AGENT["tools"][0]],
        "tool_choice": {"type": "function", "name": "shell"},
        "max_output_tokens": 9,
        "top_logprobs": 2,
        "include": ["message.output_text.logprobs"],
    }
    request = parsed(body).request
    assert request.response_format.type is FormatType.JSON_SCHEMA and request.response_format.strict
    assert request.tool_choice == ToolChoice(ToolChoiceMode.NAMED, "shell")
    assert (request.sampling.max_tokens, request.sampling.logprobs) == (9, 2)
    assert parsed(body).echo["tool_choice"] == body["tool_choice"]
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "shell"}]}
    only = parsed({**body, "tool_choice": allowed})
    assert only.request.tool_choice == ToolChoice(ToolChoiceMode.REQUIRED, allowed=("shell",))
    assert only.echo["tool_choice"] == allowed


def test_a_load_test_may_ask_that_no_end_token_ends_the_answer() -> None:
    """``vllm bench serve --backend openai-responses --ignore-eos`` and guidellm do."""
    body = {"model": "demo", "input": "hi"}
    assert parsed({**body, "ignore_eos": True, "stop": None}).request.sampling.ignore_eos
    assert not parsed(body).request.sampling.ignore_eos


@pytest.mark.parametrize("empty", [{"user": ""}, {"prompt_cache_key": ""}, {"top_logprobs": 0}])
def test_a_field_of_a_response_that_asks_for_nothing_is_accepted(empty: dict[str, Any]) -> None:
    request = parsed({"model": "demo", "input": "hi", **empty}).request
    assert (request.user, request.session_id, request.sampling.logprobs) == (None, None, None)


def test_the_official_clients_reasoning_and_tools_of_an_answer_may_be_sent_again() -> None:
    """As it dumps them, with null for each field that it knows; or with the defaults."""
    tools = [FunctionTool(type="function", name="a"), CustomTool(type="custom", name="b")]
    dumped = [tool.model_dump(by_alias=True) for tool in tools]
    body = {"model": "demo", "input": "hi"}
    again = {"reasoning": Reasoning(effort="low").model_dump(), "tools": dumped}
    assert [tool.name for tool in parsed({**body, **again}).request.tools] == ["a", "b"]
    default = {
        "reasoning": {"mode": "standard", "context": "auto"},
        "tools": [{**AGENT["tools"][0], "async": False, "allowed_callers": ["direct"]}],
    }
    assert parsed({**body, **default}).request.tools
    for field, value in (("context", "all_turns"), ("mode", "pro")):
        with pytest.raises(InvalidRequest, match=rf"^reasoning\.{field} is not supported"):
            parsed({**body, "reasoning": {field: value}})


def test_openais_marks_of_caches_have_no_effect_on_a_response() -> None:
    part = {"type": "input_text", "text": "hi"}
    plain = parsed({"model": "demo", "input": [{"role": "user", "content": [part]}]}).request
    marked = {"role": "user", "content": [{**part, "prompt_cache_breakpoint": {"mode": "explicit"}}]}
    body = {"model": "demo", "input": [marked], "prompt_cache_options": {"mode": "explicit", "ttl": "12h"}}
    assert parsed(body).request == plain


def test_each_field_of_the_official_client_may_be_null_and_the_default_window_of_the_background_given() -> (
    None
):
    names = {*ResponseCreateParamsBase.__annotations__, *InputTokenCountParams.__annotations__}
    nothing = dict.fromkeys(names - {"model", "input"})
    at_once = {"background_options": {"completion_window": "soonest"}}
    assert parsed({"model": "demo", "input": "hi", **nothing, **at_once}).request.messages
    for window in ("2h", "8h"):
        with pytest.raises(InvalidRequest, match=r"^background_options is not supported"):
            parsed({"model": "demo", "input": "hi", "background_options": {"completion_window": window}})


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"input": []}, "input"),
        ({"input": " "}, "input"),
        ({"input": [{"role": "assistant", "content": "x"}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
        ({"input": [{"type": "message", "role": "user"}]}, "input.0.content"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "n"}]}, "input.0.arguments"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input.0.call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input.0.call_id"),
        ({"input": [*AGENT["input"][:7], {"type": "custom_tool_call_output", "call_id": "c", "output": "x"}]},
         "input.7.call_id"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
         "input.0.content.0.type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
         "input.0.content.0.file_id"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.image_url"),
        ({"input": [{"role": "system", "content": [{"type": "input_image", "image_url": "data:"}]}]},
         "input.0.content.0.type"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "zz"},
                    {"role": "user", "content": "x"}]}, "input.0.encrypted_content"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [AGENT["tools"][0], AGENT["tools"][0]]}, "tools.1.name"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools.0.tools"),
        ({"tools": [{"type": "namespace", "name": "n" * 100, "tools": [
            {"type": "function", "name": "m" * 100}]}]}, "tools.0.tools.0.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [AGENT["tools"][0]], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
        ({"tools": [AGENT["tools"][0]], "tool_choice": {"type": "function", "name": "shell", "mode": "auto"}},
         "tool_choice.mode"),
        ({"tools": [AGENT["tools"][0]], "tool_choice": {"type": "allowed_tools", "name": "shell", "tools": [
            {"type": "function", "name": "shell"}]}}, "tool_choice.name"),
        ({"input": [{"role": "assistant", "content": [{"type": "refusal"}]}, {"role": "user", "content": "x"}]},
         "input.0.content.0.refusal"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"text": {"verbosity": "high"}}, "text.verbosity"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"unheard_of": 1}, "unheard_of"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_by_its_name(change: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parsed({"model": "demo", "input": "hi", **change})
    assert refused.value.param == param
    assert refused.value.message.startswith(param)


def test_an_object_of_too_many_items_is_described_by_their_number() -> None:
    with pytest.raises(InvalidRequest) as refused:
        parsed({"model": "demo", "input": "hi", "metadata": {str(one): "x" for one in range(17)}})
    assert refused.value.message == "metadata is an object of 17 items; allowed: 16 items or fewer"


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ({"k" * 65: "v"}, f"metadata.{'k' * 64}….[key] is a string of 65 characters; allowed: 64 characters or fewer"),
        ({"k": "v" * 513}, "metadata.k is a string of 513 characters; allowed: 512 characters or fewer"),
        ({"k": 1}, "metadata.k is 1; allowed: a string"),
    ],
)  # fmt: skip
def test_metadata_has_openais_bounds(pair: dict[str, Any], message: str) -> None:
    assert parsed({"model": "demo", "input": "hi", "metadata": {"k" * 64: "v" * 512}})
    with pytest.raises(InvalidRequest) as refused:
        parsed({"model": "demo", "input": "hi", "metadata": pair})
    assert refused.value.message == message


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (" ", "input is blank"),
        ("", "input is blank"),
        ([{"role": "user", "content": "a"}, {"role": "user", "content": " "}], "input.1 is blank"),
        ([{"role": "developer", "content": "a"}, {"role": "assistant", "content": "b"}], "input.1.role is "),
        (AGENT["input"][1:5], "input.3.type is 'function_call'; allowed: a message of 'user' or the output"),
        ([], "input has no items"),
    ],
    ids=["text", "no text", "item", "answer", "call", "nothing"],
)
def test_a_last_item_that_cannot_be_answered_is_named_by_its_place_in_the_input(
    given: Any, names: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parsed({"model": "demo", "instructions": "be brief", "input": given})
    assert refused.value.message.startswith(names) and refused.value.param == "input"


@pytest.mark.parametrize(
    "message",
    [
        "{} is 9; allowed: 8",
        "{}: too many",
        "the worker refused the request: {} (bad_value)",
        "no backend of this route supports {}, tools; leave it out or choose another route",
    ],
    ids=["first", "before a colon", "after a colon", "unsupported"],
)
def test_an_error_from_inside_names_the_field_as_the_body_spells_it(message: str) -> None:
    inside = PublicError(422, "invalid_request", message.format("max_tokens"), "max_tokens")
    shown = parsed({"model": "demo", "input": "hi"}).request.in_body_terms(inside)
    assert (shown.param, shown.message) == ("max_output_tokens", message.format("max_output_tokens"))


def test_text_and_reasoning_between_calls_are_of_their_turn_which_the_results_follow() -> None:
    def call(name: str) -> dict[str, Any]:
        return {"type": "function_call", "call_id": name, "name": "shell", "arguments": "{}"}

    answer = [
        {"role": "assistant", "content": "Both."},
        call("a"),
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Now b."}]},
        {"role": "assistant", "content": " And b."},
        call("b"),
        {"type": "function_call_output", "call_id": "a", "output": "1"},
        {"type": "function_call_output", "call_id": "b", "output": "2"},
    ]
    messages = parsed(
        {"model": "demo", "input": [{"role": "user", "content": "Go"}, *answer]}
    ).request.messages
    calls = ToolCall("a", "shell", "{}"), ToolCall("b", "shell", "{}")
    assert messages[1] == Message(Role.ASSISTANT, "Both. And b.", tool_calls=calls, reasoning="Now b.")
    assert [(one.role, one.tool_call_id) for one in messages[2:]] == [(Role.TOOL, "a"), (Role.TOOL, "b")]


def test_a_backend_without_log_probabilities_is_reported_by_the_field_that_asks_for_them() -> None:
    message = "no backend of this route supports logprobs; leave it out or choose another route"
    shown = parsed({"model": "demo", "input": "hi"}).request.in_body_terms(
        PublicError(400, "invalid_request", message, "logprobs")
    )
    assert (shown.param, shown.message) == ("include", message.replace("logprobs", "include"))


@pytest.mark.parametrize(
    ("arguments", "status", "inside"),
    [
        ('{"path": "/tm', "incomplete", "{}"),
        ("", "incomplete", "{}"),
        ('{"path": "/tmp"}', "incomplete", '{"path": "/tmp"}'),
        ('{"path": "/tm', "completed", '{"path": "/tm'),
    ],
)
def test_an_incomplete_call_is_sent_back_with_arguments_that_every_backend_takes(
    arguments: str, status: str, inside: str
) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments, "status": status}
    turns = [{"role": "user", "content": "hi"}, call, {"role": "user", "content": "Go on."}]
    assert parsed({"model": "demo", "input": turns}).request.messages[1].tool_calls == (
        ToolCall("c", "f", inside),
    )
