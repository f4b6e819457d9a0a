"""Anthropic's request bodies become internal requests, also those that coding agents send."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from budgeting.values import ImageContent, Message, Role, ToolCall, ToolChoice, ToolChoiceMode
from gateway.contracts.features import Feature
from gateway.contracts.messages.answer import shown_call_id
from gateway.contracts.messages.body import MessagesRequest
from gateway.contracts.messages.conversation import conversation
from gateway.contracts.messages.stream import MessagesDialect
from gateway.contracts.origin import RequestOrigin
from gateway.contracts.refusals import parse
from gateway.contracts.values import Caller, CallerRole, Contract, FormatType, GenerateRequest
from gateway.errors import InvalidRequest, PublicError

ORIGIN = RequestOrigin("req_1", "gen_1", Caller("acme", CallerRole.CALLER, "key_1"), 0.0, 1, "a" * 32)
HI = {"role": "user", "content": "Hi"}
LOOK = {
    "name": "look",
    "description": "Looks.",
    "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}},
}


def read(**fields: Any) -> GenerateRequest:
    body = {"model": "demo", "max_tokens": 64, "messages": [HI], **fields}
    return MessagesDialect().parse(json.dumps(body).encode(), ORIGIN).request


PICTURE = {"type": "base64", "media_type": "image/png", "data": "eA=="}


RESULT = {"type": "tool_result", "tool_use_id": "toolu_1"}
FOUND = {
    "type": "search_result",
    "source": "https://example.org/a",
    "title": "A page",
    "content": [{"type": "text", "text": "What it says."}],
    "citations": {"enabled": True},
}


def shown(source: dict[str, str] | str) -> dict[str, Any]:
    return {
        "role": "user",
        "content": [{"type": "text", "text": "This?"}, {"type": "image", "source": source}],
    }


def test_images_are_parts_of_the_users_message_whatever_their_source() -> None:
    request = read(messages=[shown(PICTURE), shown({"type": "url", "url": "https://example.org/a"}), HI])
    given = ImageContent("data:image/png;base64,eA==", param="messages.0.content.1.source.data")
    linked = ImageContent("https://example.org/a", param="messages.1.content.1.source.url")
    [message] = request.messages
    assert message.parts == ("This?", given, "\n\n", "This?", linked, "\n\n", "Hi")
    assert message.content == "This?\n\nThis?\n\nHi"
    assert Feature.IMAGES in request.needs
    alone = {"role": "user", "content": [{"type": "image", "source": PICTURE}]}
    assert read(messages=[alone]).messages == (Message(Role.USER, "", parts=(given_at(0),)),)
    result = {"type": "tool_result", "tool_use_id": "c", "content": "x"}
    mixed = [result, {"type": "image", "source": PICTURE}]
    assert [one.role for one in read(messages=[{"role": "user", "content": mixed}]).messages] == [
        "tool",
        "user",
    ]


def test_turns_of_the_user_in_a_row_take_time_in_proportion_to_their_number() -> None:
    """Linear: eight times the turns take about eight times as long."""

    def took_s(count: int) -> float:
        turns = [
            {"role": "user", "content": "x" * 2_000},
            shown({"type": "url", "url": "http://a/b"}),
        ] * count
        body = parse(MessagesRequest, json.dumps({"model": "m", "max_tokens": 1, "messages": turns}).encode())
        began = time.thread_time()
        assert len(conversation(body)) == 1
        return time.thread_time() - began

    small = max(min(took_s(128) for _ in range(3)), 0.002)
    assert min(took_s(1_024) for _ in range(2)) < 32 * small


def test_the_arguments_of_a_former_call_are_json_whatever_numbers_it_has() -> None:
    use = {"type": "tool_use", "id": "c", "name": "look", "input": {"a": [float("nan"), float("inf"), 2**70]}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "x"}
    turns = [HI, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    [call] = read(messages=turns).messages[1].tool_calls
    assert call.arguments == '{"a":[null,null,1180591620717411303424]}'


def test_images_of_a_tools_result_stay_between_its_texts() -> None:
    texts = [{"type": "text", "text": text} for text in ("Page", "one", "", "two")]
    shown_page = {"type": "image", "source": PICTURE}
    result = {"type": "tool_result", "tool_use_id": "c", "is_error": True}
    content = [{**result, "content": [*texts[:3], shown_page, texts[3]]}, {**result, "content": [shown_page]}]
    request = read(messages=[HI, {"role": "user", "content": content}])
    images = [
        ImageContent("data:image/png;base64,eA==", param=f"messages.1.content.{at}.source.data")
        for at in ("0.content.3", "1.content.0")
    ]
    assert request.messages[1:] == (
        Message(
            Role.TOOL,
            "Error: Page\nonetwo",
            tool_call_id="c",
            parts=("Error: ", "Page", "\n", "one", images[0], "two"),
        ),
        Message(Role.TOOL, "Error: ", tool_call_id="c", parts=("Error: ", images[1])),
    )
    assert Feature.IMAGES in request.needs


def test_texts_of_a_turn_follow_its_tool_results_which_stay_next_to_their_calls() -> None:
    texts = [{"type": "text", "text": text} for text in ("See. ", "Well?")]
    results = [{**RESULT, "tool_use_id": id, "content": id} for id in ("a", "b")]
    request = read(messages=[{"role": "user", "content": [texts[0], results[0], texts[1], results[1]]}])
    assert request.messages == (
        Message(Role.TOOL, "a", tool_call_id="a"),
        Message(Role.TOOL, "b", tool_call_id="b"),
        Message(Role.USER, "See. Well?"),
    )


def test_a_tools_result_with_a_document_is_refused_at_its_block() -> None:
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "document"}]}
    param, message = refused(messages=[HI, {"role": "user", "content": [result]}])
    assert param == "messages.1.content.0.content.0.type" and "'text' or 'image'" in message


def given_at(number: int) -> ImageContent:
    return ImageContent("data:image/png;base64,eA==", param=f"messages.0.content.{number}.source.data")


def refused(**fields: Any) -> tuple[str | None, str]:
    with pytest.raises(InvalidRequest) as error:
        read(**fields)
    return error.value.param, error.value.message


def test_the_plain_fields() -> None:
    request = read(
        stream=True, stop_sequences=["\n\n"], temperature=0.5, top_p=0.9, top_k=5, metadata={"user_id": "u-1"}
    )
    assert (request.contract, request.model, request.stream) == (Contract.MESSAGES, "demo", True)
    assert request.messages == (Message(Role.USER, "Hi"),)
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.stop, sampling.temperature) == (64, ("\n\n",), 0.5)
    assert (sampling.top_p, sampling.top_k) == (0.9, 5)
    assert (request.user, request.session_id) == ("u-1", "u-1")


def test_a_loop_of_tools_is_a_typed_conversation() -> None:
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "of another model"}
    use = {
        "type": "tool_use",
        "id": shown_call_id("toolu_1"),
        "name": "look",
        "input": {"at": "é", "n": 2**64},
    }
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": "seen"}]}
    failed = {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no such file", "is_error": True}
    request = read(
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        messages=[
            HI,
            {
                "role": "assistant",
                "content": [
                    thought,
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "I look."},
                    use,
                    {**use, "id": "toolu_2", "input": {}},
                ],
            },
            {"role": "user", "content": [result, failed, {"type": "text", "text": "Well?"}]},
        ],
        tools=[LOOK],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )
    calls = (
        ToolCall("toolu_1", "look", '{"at":"é","n":18446744073709551616}'),
        ToolCall("toolu_2", "look", "{}"),
    )
    assert request.messages == (
        Message(Role.SYSTEM, "Be brief."),
        Message(Role.USER, "Hi"),
        Message(Role.ASSISTANT, "I look.", tool_calls=calls, reasoning="Hm."),
        Message(Role.TOOL, "seen", tool_call_id="toolu_1"),
        Message(Role.TOOL, "Error: no such file", tool_call_id="toolu_2"),
        Message(Role.USER, "Well?"),
    )
    [tool] = request.tools
    assert (tool.name, tool.description) == ("look", "Looks.")
    assert json.loads(tool.parameters or "") == LOOK["input_schema"]
    assert request.tool_choice == ToolChoice(ToolChoiceMode.REQUIRED)
    assert request.parallel_tool_calls is False
    assert request.needs == {Feature.TOOLS}


def test_consecutive_turns_of_the_model_are_one_turn_as_at_anthropic() -> None:
    def turn(*blocks: dict[str, Any]) -> dict[str, Any]:
        return {"role": "assistant", "content": list(blocks)}

    first, second = [{"type": "tool_use", "id": id, "name": "look", "input": {}} for id in ("a", "b")]
    request = read(
        messages=[
            HI,
            turn({"type": "thinking", "thinking": "Hm.", "signature": "x"}),
            {"role": "assistant", "content": "I look."},
            turn(first),
            turn({"type": "thinking", "thinking": "And there.", "signature": "x"}, second),
            {"role": "user", "content": [{**RESULT, "tool_use_id": "a"}, {**RESULT, "tool_use_id": "b"}]},
        ],
        tools=[LOOK],
    )
    calls = (ToolCall("a", "look", "{}"), ToolCall("b", "look", "{}"))
    assert request.messages == (
        Message(Role.USER, "Hi"),
        Message(Role.ASSISTANT, "I look.", tool_calls=calls, reasoning="Hm.\n\nAnd there."),
        Message(Role.TOOL, "", tool_call_id="a"),
        Message(Role.TOOL, "", tool_call_id="b"),
    )


def test_a_named_tool_must_be_one_of_the_requests() -> None:
    choice = read(tools=[LOOK], tool_choice={"type": "tool", "name": "look"}).tool_choice
    assert choice == ToolChoice(ToolChoiceMode.NAMED, "look")
    assert refused(tools=[LOOK], tool_choice={"type": "tool", "name": "x"})[0] == "tool_choice.name"
    assert refused(tool_choice={"type": "any"})[0] == "tool_choice"


def test_only_a_system_prompt_loses_a_block_that_looks_like_the_clients_attribution() -> None:
    text = "x-anthropic-billing-header: what is this?"
    result = {"type": "tool_result", "tool_use_id": "c", "content": text}
    given = [{"role": "user", "content": text}, {"role": "user", "content": [result]}]
    assert [one.content for one in read(messages=given).messages] == [text, text]


def test_the_tools_of_an_agents_many_mcp_servers_are_taken() -> None:
    tools = [{**LOOK, "name": f"mcp__server_{n % 9}__look_{n}"} for n in range(300)]
    assert len(read(tools=tools).tools) == 300


def test_what_a_coding_agent_sends_is_taken() -> None:
    """A body like Claude Code's: attribution first, reminders between turns, and fields that only it sends."""
    request = read(
        max_tokens=32_000,
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.328; cch=a1b2c;"},
            {"type": "text", "text": "You are a coding agent.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Be exact.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        ],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "Fix it.", "cache_control": None}]},
            {"role": "system", "content": "The date is today."},
        ],
        tools=[{**LOOK, "eager_input_streaming": True, "cache_control": {"type": "ephemeral"}}],
        thinking={"type": "adaptive", "display": "summarized"},
        output_config={"effort": "high"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        metadata={"user_id": json.dumps({"device_id": "d" * 64, "session_id": "s" * 36})},
        service_tier="auto",
        stream=True,
    )
    assert request.messages == (
        Message(Role.SYSTEM, "You are a coding agent.\n\nBe exact."),
        Message(Role.USER, "Fix it.\n\nThe date is today."),
    )
    assert request.reasoning_effort == "high"
    assert request.dropped == ("context_management",)
    assert Feature.REASONING_EFFORT not in request.needs


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({}, None),
        ({"thinking": {"type": "adaptive"}}, None),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, "none"),
        ({"thinking": {"type": "enabled", "budget_tokens": 4000}}, "low"),
        ({"thinking": {"type": "enabled", "budget_tokens": 10_000}}, "medium"),
        ({"thinking": {"type": "enabled", "budget_tokens": 31_999}}, "high"),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 31_999}, "output_config": {"effort": "low"}},
            "low",
        ),
    ],
)
def test_thinking_becomes_a_reasoning_effort(fields: dict[str, Any], effort: str | None) -> None:
    assert read(max_tokens=32_000, **fields).reasoning_effort == effort


def test_a_budget_of_thinking_is_1024_tokens_or_more_and_less_than_the_whole_answer() -> None:
    for budget, reason in (
        (1_023, "is 1023; allowed: 1024 or more"),
        (2_000, "is 2000; allowed: less than max_tokens, which is 2000"),
    ):
        param, message = refused(max_tokens=2_000, thinking={"type": "enabled", "budget_tokens": budget})
        assert (param, message) == ("thinking.budget_tokens", f"thinking.budget_tokens {reason}")
    assert read(max_tokens=2_000, thinking={"type": "enabled", "budget_tokens": 1_024})


def test_a_json_schema_in_output_config_becomes_the_response_format() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    shape = read(output_config={"format": {"type": "json_schema", "schema": schema}}).response_format
    assert shape.type is FormatType.JSON_SCHEMA
    assert json.loads(shape.spec) == schema


def test_a_json_schema_in_output_format_the_earlier_name_becomes_the_response_format() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "schema": schema}
    request = read(output_format=form)
    assert json.loads(request.response_format.spec) == schema and request.dropped == ()
    inside = PublicError(400, "invalid_request", "no backend supports response_format", "response_format")
    assert request.in_body_terms(inside).param == "output_format"
    param, message = refused(output_format=form, output_config={"format": form})
    assert (param, message) == (
        "output_format",
        "output_format is given with output_config.format; allowed: one of them",
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": " "}]}, "messages.0.content"),
        ({"messages": [HI, {"role": "assistant", "content": "Yes, "}]}, "messages.1.role"),
        (
            {"messages": [HI, {"role": "assistant", "content": "Yes"}, {"role": "user", "content": ""}]},
            "messages.2.content",
        ),
        ({"system": "Be brief.", "messages": [{"role": "user", "content": []}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": [FOUND]}]}, "messages.0.content.0.type"),
        (
            {"messages": [{"role": "user", "content": [{**RESULT, "content": [FOUND]}]}]},
            "messages.0.content.0.content.0.type",
        ),
        ({"messages": [shown("https://example.org/a.png")]}, "messages.0.content.1.source"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0.source"),
        ({"messages": [shown({"type": "file", "file_id": "f"})]}, "messages.0.content.1.source.type"),
        ({"messages": [shown({"type": "url"})]}, "messages.0.content.1.source.url"),
        ({"messages": [shown({"type": "base64", "data": "eA=="})]}, "messages.0.content.1.source.media_type"),
        (
            {"messages": [shown({"type": "base64", "media_type": "image/png"})]},
            "messages.0.content.1.source.data",
        ),
        ({"messages": [{**shown(PICTURE), "role": "assistant"}, HI]}, "messages.0.content.1.type"),
        ({"system": [{"type": "image", "source": PICTURE}]}, "system.0.type"),
        ({"messages": [{"role": "user", "content": [{"type": "new"}]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
            "messages.0.content.0.tool_use_id",
        ),
        ({"system": [{"type": "document"}]}, "system.0.type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "mcp_toolset", "mcp_server_name": "x"}]}, "tools.0.type"),
        (
            {
                "mcp_servers": [{"type": "url", "url": "https://x", "name": "x"}],
                "tools": [{"type": "mcp_toolset", "mcp_server_name": "x"}],
            },
            "mcp_servers",
        ),
        ({"tools": [{"input_schema": {}}]}, "tools.0.name"),
        ({"tools": [{"name": "look"}]}, "tools.0.input_schema"),
        ({"tools": [LOOK, LOOK]}, "tools.1.name"),
        ({"mcp_servers": [{"type": "url", "url": "https://x"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"thread": {"type": "create"}}, "thread"),
        ({"compaction": {"type": "summary"}}, "compaction"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "regex"}}}, "output_config.format.type"),
        ({"output_format": {"type": "regex"}}, "output_format.type"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
    ],
)
def test_what_is_not_served_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    found, message = refused(**fields)
    assert found == param
    assert message.startswith(param)


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305'"),
        ({"messages": [{"role": "user", "content": [{"type": "server_tool_use"}]}]}, "'server_tool_use'"),
        ({"messages": [shown({"type": "file", "file_id": "f"})]}, "'file'"),
        ({"messages": [{"role": "user", "content": [{"type": "my words"}]}]}, "a string of 8 characters"),
    ],
)
def test_a_refused_type_is_shown_if_it_is_a_word(fields: dict[str, Any], shown: str) -> None:
    param, message = refused(**fields)
    assert message.startswith(f"{param} is {shown}, which is not supported; allowed: ")
