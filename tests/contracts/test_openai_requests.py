from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from budgeting.values import EvidenceChunk, ImageContent, Message, Role
from gateway.contracts import openai_fields
from gateway.contracts.dialect import ParsedRequest
from gateway.contracts.features import Feature
from gateway.contracts.openai import ChatRequest, CompletionRequest
from gateway.contracts.openai_body import MAX_EXTRA
from gateway.contracts.openai_stream import OpenAIDialect
from gateway.contracts.origin import RequestOrigin
from gateway.contracts.values import Caller, CallerRole, Contract, FormatType, Sampling
from gateway.errors import GrammarTooComplex, InvalidRequest

SECRET = "the caller's private words"
ORIGIN = RequestOrigin(
    request_id="req_edge",
    generation_id="gen_1",
    caller=Caller("acme", CallerRole.CALLER, "key_1"),
    arrived_at=100.0,
    created=1_800_000_000,
    trace_id="a" * 32,
    max_messages=4,
)
TURN = {"role": "user", "content": SECRET}


def chat(**fields: Any) -> ParsedRequest:
    body = {"model": "demo", "messages": [TURN], **fields}
    return OpenAIDialect(chat=True).parse(json.dumps(body).encode(), ORIGIN)


def completion(**fields: Any) -> ParsedRequest:
    body = {"model": "demo", "prompt": SECRET, **fields}
    return OpenAIDialect(chat=False).parse(json.dumps(body).encode(), ORIGIN)


def test_the_smallest_chat_is_a_model_and_one_user_turn() -> None:
    request = chat().request
    assert request.contract is Contract.CHAT
    assert request.model == "demo"
    assert request.messages == (Message(Role.USER, SECRET),)
    assert request.route is None
    assert request.sampling == Sampling()
    assert not request.stream


def test_top_logprobs_of_0_are_accepted_without_logprobs() -> None:
    assert chat(top_logprobs=0).request.sampling.logprobs is None


def test_every_sampling_field_reaches_the_inside() -> None:
    request = chat(
        max_tokens=1,
        max_completion_tokens=9,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        n=2,
        stop="END",
        seed=7,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.1,
        logit_bias={"50256": -100, "7": 3.5},
        logprobs=True,
        top_logprobs=3,
        priority=-1,
    ).request
    assert request.sampling == Sampling(
        max_tokens=9,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        n=2,
        stop=("END",),
        seed=7,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        repetition_penalty=1.1,
        logit_bias={50256: -100.0, 7: 3.5},
        logprobs=3,
    )
    assert request.priority == -1


def test_text_parts_are_joined_and_a_developer_speaks_as_the_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "rules"}, {"role": "user", "content": parts}]
    assert chat(messages=messages).request.messages == (
        Message(Role.SYSTEM, "rules"),
        Message(Role.USER, "ab"),
    )


def test_unknown_fields_of_messages_are_the_backends_affair_as_those_of_the_body() -> None:
    part = {"type": "text", "text": "a", "frob": {}}
    request = chat(frob=1, messages=[{**TURN, "frob": 2}, {"role": "user", "content": [part]}]).request
    assert request.dropped == ("messages.0.frob", "messages.1.content.0.frob")
    assert (dict(request.extra), request.needs) == ({"frob": 1}, {Feature.UNKNOWN_FIELDS})
    assert chat(messages=[{**TURN, "frob": 2}]).request.needs == {Feature.UNKNOWN_FIELDS}
    with pytest.raises(InvalidRequest, match=r"messages\.0\.function_call"):
        chat(messages=[{**TURN, "function_call": {"name": "f"}}])
    with pytest.raises(InvalidRequest, match="others are not known fields"):
        chat(messages=[{**TURN, **{f"frob{number}": 1 for number in range(MAX_EXTRA + 1)}}])


@pytest.mark.parametrize(
    "mark", [{"cache_control": {"type": "ephemeral"}}, {"prompt_cache_breakpoint": {"mode": "explicit"}}]
)
def test_marks_of_caches_on_messages_parts_and_tools_have_no_effect(mark: dict[str, Any]) -> None:
    part, function = {"type": "text", "text": "a"}, {"name": "f", "parameters": {"type": "object"}}
    tool = {"type": "function", "function": function}
    plain = chat(messages=[{"role": "user", "content": [part]}], tools=[tool]).request
    marked = {"role": "user", "content": [{**part, **mark}], **mark}
    assert chat(messages=[marked], tools=[{**tool, **mark}]).request == plain
    assert chat(messages=[marked], tools=[{**tool, "function": {**function, **mark}}]).request == plain
    options = {"mode": "explicit", "ttl": "30m"}
    assert chat(messages=[marked], tools=[tool], prompt_cache_options=options).request == plain


def test_a_budget_of_thinking_is_for_workers_that_know_it_and_null_asks_for_none() -> None:
    request = chat(thinking_token_budget=256).request
    assert (dict(request.extra), request.needs) == ({"thinking_token_budget": 256}, {Feature.FIELDS_PASSED})
    request = chat(thinking_token_budget=None).request
    assert not request.extra and not request.needs


def test_an_answer_that_the_caller_began_is_continued() -> None:
    begun = {"role": "assistant", "content": "It is"}
    ending = {"continue_final_message": True, "add_generation_prompt": False}
    request = chat(messages=[TURN, begun], **ending).request
    assert (dict(request.template_kwargs), request.needs) == (ending, {Feature.CONTINUE_FINAL_MESSAGE})
    assert chat(messages=[TURN, begun], continue_final_message=True).request == request
    open_turn = chat(add_generation_prompt=False).request
    assert open_turn.needs == {Feature.ADD_GENERATION_PROMPT}
    with pytest.raises(InvalidRequest, match="add_generation_prompt is true with continue_final_message"):
        chat(messages=[TURN, begun], continue_final_message=True, add_generation_prompt=True)
    for messages in ([TURN], [TURN, {**begun, "content": " "}]):
        with pytest.raises(InvalidRequest) as refused:
            chat(messages=messages, **ending)
        assert refused.value.param == "continue_final_message"
    with pytest.raises(InvalidRequest, match="'user' or 'tool' in the last message"):
        chat(messages=[TURN, begun], continue_final_message=False)


@pytest.mark.parametrize("role", ["system", "developer"])
def test_instructions_behind_the_last_turn_are_the_users(role: str) -> None:
    turns, retry = [TURN, {"role": "assistant", "content": "hm"}], {"role": role, "content": "Call the tool."}
    last = Message(Role.USER, "Call the tool.")
    assert chat(messages=[*turns, retry]).request.messages[-1] == last
    assert chat(messages=[*turns, retry, retry]).request.messages[-2:] == (last, last)
    assert chat(messages=[retry, *turns, retry]).request.messages[0] == Message(Role.SYSTEM, "Call the tool.")
    with pytest.raises(InvalidRequest, match="'user' or 'tool' in the last message"):
        chat(messages=[retry, retry])


def test_vllms_fields_that_control_the_end_of_a_text_are_sampling_fields() -> None:
    fields = {"ignore_eos": True, "min_tokens": 3, "stop_token_ids": [7, 8]}
    for request in (chat(**fields).request, completion(**fields).request):
        sampling = request.sampling
        assert (sampling.ignore_eos, sampling.min_tokens, sampling.stop_token_ids) == (True, 3, (7, 8))
        assert not request.extra and not request.needs
    for wrong in ({"min_tokens": 4, "max_tokens": 3}, {"min_tokens": -1}, {"stop_token_ids": [-1]}):
        with pytest.raises(InvalidRequest) as refused:
            chat(**wrong)
        assert (refused.value.param or "").startswith(next(iter(wrong)))


def test_the_seeds_of_all_texts_have_64_bits() -> None:
    largest = 2**63 - 1
    assert chat(seed=largest).request.sampling.seed == largest
    for request in (chat, completion):
        assert request(seed=largest - 2, n=3).request.sampling.seed == largest - 2
        with pytest.raises(
            InvalidRequest, match=f"seed is {largest - 1} with n 3; allowed: at most {largest - 2}"
        ):
            request(seed=largest - 1, n=3)


def test_truncation_is_asked_for_by_auto_alone() -> None:
    assert chat(truncation="auto").request.truncate
    assert not chat(truncation="disabled").request.truncate and not chat().request.truncate
    with pytest.raises(InvalidRequest, match="truncation"):
        chat(truncation="some")


def test_native_fields_travel_in_the_sluice_object() -> None:
    request = chat(
        user="u",
        sluice={
            "route": "r",
            "session_id": "s",
            "intent": "i",
            "locale": "ja",
            "adapter_id": "a",
            "prompt_version": "p",
            "retrieval_chunks": [{"chunk_id": "c", "source_type": "catalog", "text": "t"}],
            "context": {"time": 1},
            "deadline_ms": 500,
            "request_id": "mine",
        },
    ).request
    assert (request.route, request.session_id, request.intent) == ("r", "s", "i")
    assert (request.locale, request.adapter_id, request.prompt_version) == ("ja", "a", "p")
    assert request.chunks == (EvidenceChunk("c", "catalog", "t"),)
    assert request.context == {"time": 1}
    assert request.deadline == 100.5
    assert request.request_id == "mine"


def test_the_user_stands_for_the_session_when_none_is_named() -> None:
    assert chat(user="u").request.session_id == "u"
    assert chat(user="u", prompt_cache_key="k").request.session_id == "k"
    assert chat(user="u", prompt_cache_key={}).request.session_id == "u"


def test_an_official_clients_own_message_may_be_sent_back_as_history() -> None:
    answer = {
        "role": "assistant",
        "content": "hi",
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    assert chat(messages=[TURN, answer, TURN]).request.messages[1] == Message(Role.ASSISTANT, "hi")


@pytest.mark.parametrize(
    ("fields", "kind", "spec"),
    [
        ({"response_format": {"type": "text"}}, FormatType.TEXT, ""),
        ({"response_format": {"type": "json_object"}}, FormatType.JSON_OBJECT, ""),
        ({"guided_json": {"type": "object"}}, FormatType.JSON_SCHEMA, '{"type":"object"}'),
        ({"guided_json": '{"type": "object"}'}, FormatType.JSON_SCHEMA, '{"type":"object"}'),
        ({"guided_regex": "a+"}, FormatType.REGEX, "a+"),
        ({"guided_choice": ["a", "b"]}, FormatType.CHOICE, '["a","b"]'),
        ({"guided_grammar": "root ::= 'a'"}, FormatType.GRAMMAR, "root ::= 'a'"),
        ({"structured_outputs": {"json": {"type": "object"}}}, FormatType.JSON_SCHEMA, '{"type":"object"}'),
        ({"structured_outputs": {"regex": "a+"}}, FormatType.REGEX, "a+"),
        ({"structured_outputs": {"choice": ["a"]}}, FormatType.CHOICE, '["a"]'),
        ({"structured_outputs": {"grammar": "g"}}, FormatType.GRAMMAR, "g"),
        ({"structured_outputs": {"json_object": True}}, FormatType.JSON_OBJECT, ""),
        ({"response_format": {"type": "text"}, "guided_regex": "a"}, FormatType.REGEX, "a"),
        (
            {
                "guided_decoding_backend": "guidance",
                "guided_regex": "a",
                "structured_outputs": {"regex": "a"},
            },
            FormatType.REGEX,
            "a",
        ),
    ],
)
def test_every_way_to_ask_for_a_shape_is_one_shape(fields: Any, kind: FormatType, spec: str) -> None:
    shape = chat(**fields).request.response_format
    assert (shape.type, shape.spec) == (kind, spec)


def test_usage_in_a_stream_is_asked_for_with_the_stream() -> None:
    assert chat(stream=True, stream_options={"include_usage": True}).include_usage
    assert not chat(stream=True).include_usage
    running = {"include_usage": True, "continuous_usage_stats": True}
    assert chat(stream=True, stream_options=running).running_usage
    assert not chat(stream=True, stream_options={**running, "include_usage": False}).running_usage
    with pytest.raises(InvalidRequest) as refused:
        chat(stream_options={"include_usage": True})
    assert refused.value.param == "stream_options"
    with pytest.raises(InvalidRequest) as refused:
        completion(prompt=["a", "b"], stream=True, stream_options=running)
    assert refused.value.param == "stream_options.continuous_usage_stats"


def test_null_means_the_same_as_an_absent_field() -> None:
    names = set(ChatRequest.model_fields) - {"model", "messages"} | set(openai_fields.CHAT)
    assert chat(**dict.fromkeys(sorted(names))) == chat()


@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": {"a": "b"}, "user": "u2", "store": False, "service_tier": "auto"},
        {"tools": [], "tool_choice": "none", "parallel_tool_calls": True, "functions": []},
        {"tool_choice": "auto", "reasoning_effort": "none", "chat_template_kwargs": {}},
        {"verbosity": "medium", "prediction": {"type": "content", "content": "x"}},
        {"safety_identifier": "x", "prompt_cache_key": "y", "modalities": ["text"]},
        {"prompt_cache_retention": "24h"},
        {"ignore_eos": False, "min_tokens": 0, "length_penalty": 1.0, "best_of": 1},
        {
            "vllm_xargs": {},
            "kv_transfer_params": {},
            "logits_processors": [],
            "cache_salt": "",
            "chat_template": "",
        },
    ],
)
def test_fields_that_ask_for_nothing_are_accepted(fields: Any) -> None:
    assert chat(**fields).request.messages == (Message(Role.USER, SECRET),)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kv_transfer_params", {"remote_host": "a"}),
        ("ec_transfer_params", {"remote_host": "a"}),
        ("media_io_kwargs", {"image": {}}),
        ("logprob_token_ids", [5]),
        ("return_prompt_text", True),
    ],
)
def test_no_worker_is_passed_a_field_for_its_operator_or_one_whose_result_the_answer_would_lack(
    name: str, value: object
) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name} is not supported"):
        chat(**{name: value})


def image_turn(image: object, role: str = "user") -> dict[str, Any]:
    return {
        "role": role,
        "content": [{"type": "text", "text": SECRET}, {"type": "image_url", "image_url": image}],
    }


def test_an_image_is_a_part_of_its_turn_and_needs_a_backend_that_takes_images() -> None:
    turn = image_turn({"url": "https://example.org/a.png", "detail": "low"})
    request = chat(messages=[turn]).request
    image = ImageContent("https://example.org/a.png", "low", "messages.0.content.1.image_url.url")
    assert request.messages == (Message(Role.USER, SECRET, parts=(SECRET, image)),)
    assert request.needs == {Feature.IMAGES}
    assert "example.org" not in repr(request), "an address may hold a key"
    alone = chat(messages=[{"role": "user", "content": turn["content"][1:]}]).request
    assert alone.messages[0].content == "" and len(alone.messages[0].parts) == 1


def test_an_image_of_a_tools_result_is_a_part_of_it() -> None:
    result = {**image_turn({"url": "https://example.org/a.png"}, "tool"), "tool_call_id": "c"}
    request = chat(messages=[TURN, result]).request
    image = ImageContent("https://example.org/a.png", None, "messages.1.content.1.image_url.url")
    assert request.messages[1] == Message(Role.TOOL, SECRET, tool_call_id="c", parts=(SECRET, image))
    assert Feature.IMAGES in request.needs


def test_a_refusal_in_an_assistants_parts_is_its_text() -> None:
    parts = [{"type": "text", "text": "Sorry. "}, {"type": "refusal", "refusal": SECRET}]
    request = chat(messages=[TURN, {"role": "assistant", "content": parts}, TURN]).request
    assert request.messages[1] == Message(Role.ASSISTANT, f"Sorry. {SECRET}")


@pytest.mark.parametrize(
    ("content", "whole"),
    [(None, SECRET), ("Sorry. ", f"Sorry. {SECRET}"), ([{"type": "text", "text": "No. "}], f"No. {SECRET}")],
)
def test_a_refusal_that_a_client_sends_back_is_a_text_of_its_message(content: Any, whole: str) -> None:
    refused = {"role": "assistant", "content": content, "refusal": SECRET}
    assert chat(messages=[TURN, refused, TURN]).request.messages[1] == Message(Role.ASSISTANT, whole)


REFUSED_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"model": ""}, "model"),
    ({"model": None}, "model"),
    ({"messages": []}, "messages"),
    ({"messages": [TURN] * 5}, "messages"),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages.0.content.0.text"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages.0.content.0.type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
    (
        {"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}]},
        "messages.0.content.0.type",
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "refusal"}]}, TURN]},
        "messages.0.content.0.refusal",
    ),
    ({"messages": [{**TURN, "refusal": "x"}]}, "messages.0.refusal"),
    ({"messages": [{"role": "assistant", "content": "", "refusal": "a\0"}, TURN]}, "messages.0.refusal"),
    ({"messages": [image_turn(None)]}, "messages.0.content.1.image_url"),
    ({"messages": [image_turn({})]}, "messages.0.content.1.image_url.url"),
    ({"messages": [image_turn("data:,x")]}, "messages.0.content.1.image_url"),
    ({"messages": [image_turn({"url": "a\0"})]}, "messages.0.content.1.image_url.url"),
    (
        {"messages": [image_turn({"url": "data:,x", "detail": "max"})]},
        "messages.0.content.1.image_url.detail",
    ),
    (
        {"messages": [image_turn({"url": "data:,x"}, "assistant"), TURN]},
        "messages.0.content.1.image_url.url",
    ),
    ({"messages": [{"role": "user", "content": "a\0"}]}, "messages.0.content"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id"),
    ({"messages": [{"role": "user", "content": "x", "name": 5}]}, "messages.0.name"),
    (
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [1]}, TURN]},
        "messages.0.tool_calls.0",
    ),
    ({"messages": [{"role": "system", "content": "x"}]}, "messages.0.role"),
    ({"tools": [{"type": "function"}]}, "tools.0.function"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [1]}, "functions"),
    ({"store": True}, "store"),
    ({"prompt": "hi"}, "prompt"),
    ({"best_of": True}, "best_of"),
    ({"reasoning_effort": "highest"}, "reasoning_effort"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"temperature": "1"}, "temperature"),
    ({"n": 0}, "n"),
    ({"n": 1.5}, "n"),
    ({"stop": ""}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a", 5]}, "stop.1"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"logit_bias": {"a": 1}}, "logit_bias.a"),
    ({"logit_bias": {"-1": 1}}, "logit_bias.-1"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"logit_bias": {"1": True}}, "logit_bias.1"),
    ({"logit_bias": {"1": float("nan")}}, "logit_bias.1"),
    ({"logit_bias": {str(one): 0 for one in range(1025)}}, "logit_bias"),
    ({"logprobs": 5}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"n": 13, "logprobs": True, "top_logprobs": 19}, "n"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"priority": 5}, "priority"),
    ({"user": 0}, "user"),
    ({"user": []}, "user"),
    ({"stream": "yes"}, "stream"),
    ({"stream": True, "stream_options": {"chunks": 5}}, "stream_options.chunks"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    *(
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, **field}}},
            f"response_format.json_schema.{next(iter(field))}",
        )
        for field in ({"schema": 5}, {"schema": None}, {"name": 5}, {"description": ["a"]}, {"strict": "no"})
    ),
    ({"guided_json": "not json"}, "guided_json"),
    ({"guided_json": 5}, "guided_json"),
    ({"guided_regex": ""}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
    ({"guided_regex": "a", "structured_outputs": {"regex": "b"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"yaml": "x"}}, "structured_outputs.yaml"),
    ({"sluice": {"no": 1}}, "sluice.no"),
    ({"sluice": {"deadline_ms": 0}}, "sluice.deadline_ms"),
    ({"sluice": {"context": {"a": 2**80}}}, "sluice.context.a"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED_CHAT, ids=[json.dumps(r[0])[:60] for r in REFUSED_CHAT])
def test_a_chat_that_does_not_validate_is_refused_by_its_path(fields: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat(**fields)
    assert refused.value.param == param
    assert SECRET not in refused.value.message


def fields_of(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{at}": {} for at in range(count)}}


@pytest.mark.parametrize(
    ("schema", "param"),
    [
        (fields_of(5_001), "guided_json"),
        ({"anyOf": [fields_of(2_501), fields_of(2_500)]}, "guided_json"),
        ({"enum": list(range(5_001))}, "guided_json"),
        (
            {"properties": {"a": {"items": [{"pattern": "a" * 8_193}]}}},
            "guided_json.properties.a.items.0.pattern",
        ),
        ({"const": "x" * 65_536}, "guided_json"),
        ({"const": [[]] * 50_001}, "guided_json"),
        ('{"const":"' + "x" * 262_144 + '"}', "guided_json"),
        ('{"const":[' + "[]," * 60_000 + "[]]}", "guided_json"),
    ],
)
def test_a_schema_over_a_bound_is_refused_by_its_place(schema: Any, param: str) -> None:
    with pytest.raises(GrammarTooComplex, match=r"allowed: [0-9]+") as refused:
        chat(guided_json=schema)
    assert (refused.value.status, refused.value.code, refused.value.param) == (
        400,
        "grammar_too_complex",
        param,
    )


def test_a_schema_within_the_bounds_is_taken_but_options_of_the_compiler_are_not() -> None:
    within = {"allOf": [fields_of(2_500), {"enum": list(range(5_000))}, {"pattern": "a" * 8_192}]}
    assert chat(guided_json=within).request.response_format.param == "guided_json"
    assert chat(guided_json={"properties": {"x-guidance": {}}}).request.response_format.spec
    with pytest.raises(InvalidRequest, match=r"guided_json\.x-guidance is not supported"):
        chat(guided_json={"x-guidance": {"whitespace_pattern": "(a|b)*"}})


def test_a_refused_value_says_what_is_allowed() -> None:
    with pytest.raises(InvalidRequest, match=r"messages\.0\.content is 5; allowed: a string or an array"):
        chat(messages=[{"role": "user", "content": 5}])
    with pytest.raises(
        InvalidRequest, match=r"^functions is not supported; allowed: null or \[\] or tools instead$"
    ):
        chat(functions=[1])
    with pytest.raises(InvalidRequest, match=r"^function_call is not .* or 'auto' or tool_choice instead$"):
        chat(function_call={"name": "f"})
    with pytest.raises(InvalidRequest, match=r"\.function_call is not .* null or tool_calls instead$"):
        chat(messages=[{"role": "assistant", "content": None, "function_call": {"name": "f"}}])


@pytest.mark.parametrize(
    ("prompt", "inside"),
    [
        ("text", "text"),
        (["text"], "text"),
        ([1, 2, 3], (1, 2, 3)),
        ([[1, 2, 3]], (1, 2, 3)),
    ],
)
def test_a_prompt_is_a_text_or_token_ids_alone_or_as_a_batch_of_one(prompt: Any, inside: Any) -> None:
    request = completion(prompt=prompt).request
    assert request.raw_prompt == inside
    assert request.messages == ()
    assert request.contract is Contract.COMPLETIONS


def test_echo_is_asked_of_the_backend_and_zero_tokens_are_the_prompt_alone() -> None:
    both = completion(echo=True, max_tokens=1, logprobs=1).request.sampling
    assert (both.echo, both.prompt_only, both.max_tokens, both.logprobs) == (True, False, 1, 1)
    alone = completion(echo=True, max_tokens=0).request.sampling
    assert (alone.echo, alone.prompt_only, alone.max_tokens) == (True, True, 1)
    assert completion(echo=None).request.sampling == completion(echo=False).request.sampling
    with pytest.raises(InvalidRequest, match="max_tokens is 0 without echo; allowed: 1 or more, or 0 with"):
        completion(max_tokens=0)
    with pytest.raises(InvalidRequest, match="n is 2 with echo and logprobs; allowed: 1"):
        completion(echo=True, logprobs=0, n=2)
    assert completion(echo=True, n=2).request.sampling.n == 2


def test_each_prompt_of_a_list_is_a_request_of_its_own() -> None:
    parsed = completion(prompt=["a", "b"], sluice={"request_id": "mine"}, max_tokens=3)
    (other,) = parsed.further
    assert (parsed.request.raw_prompt, other.raw_prompt) == ("a", "b")
    assert (parsed.request.labelled, other.labelled, other.request_id) == (True, False, "mine")
    assert other.generation_id == f"{parsed.request.generation_id}-1"
    assert other.sampling == parsed.request.sampling


def test_a_text_completion_is_sixteen_tokens_unless_told_otherwise() -> None:
    assert completion().request.sampling.max_tokens == 16
    assert completion(max_tokens=5).request.sampling.max_tokens == 5


@pytest.mark.parametrize("field", sorted(openai_fields.PASSABLE))
def test_a_field_that_is_passed_to_workers_is_known_to_chats_and_text_completions(field: str) -> None:
    for ask in (chat, completion):
        request = ask(**{field: 7}).request
        assert (dict(request.extra), request.needs) == ({field: 7}, {Feature.FIELDS_PASSED})
        assert not ask(**{field: None}).request.extra


def test_no_caller_sends_tensors_to_a_worker() -> None:
    for ask in (chat, completion):
        with pytest.raises(InvalidRequest, match=r"^prompt_embeds is not supported"):
            ask(prompt_embeds="gASV")


@pytest.mark.parametrize("field", ["kv_transfer_params", "ec_transfer_params"])
def test_no_caller_names_hosts_from_which_a_worker_fetches_caches(field: str) -> None:
    hosts = {"remote_host": "169.254.169.254", "remote_port": 80}
    for ask in (chat, completion):
        for fields in ({field: hosts}, {"vllm_xargs": {field: hosts}}, {"vllm_xargs": {field: "x"}}):
            with pytest.raises(InvalidRequest) as refused:
                ask(**fields)
            assert refused.value.param == next(iter(fields))
        assert dict(ask(vllm_xargs={"mine": 1}).request.extra) == {"vllm_xargs": {"mine": 1}}


def test_neutral_completion_fields_are_accepted() -> None:
    fields = {"echo": False, "suffix": "", "best_of": 1, "logprobs": None}
    assert completion(**fields).request.raw_prompt == SECRET
    names = set(CompletionRequest.model_fields) - {"model", "prompt"} | set(openai_fields.COMPLETIONS)
    assert completion(**dict.fromkeys(sorted(names))) == completion()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [""]}, "prompt.0"),
        ({"prompt": [[]]}, "prompt.0"),
        ({"prompt": ["a", ""]}, "prompt.1"),
        ({"prompt": ["a"] * 257}, "prompt"),
        ({"prompt": [[1]] * 3, "n": 86}, "prompt"),
        ({"prompt": [[1]] * 129, "logprobs": 1}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": [-1]}, "prompt.0"),
        ({"prompt": [1, "a"]}, "prompt.1"),
        ({"prompt": ["a", "b", None]}, "prompt.2"),
        ({"prompt": [[1], "a"]}, "prompt.1"),
        ({"prompt": "a\0"}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"messages": []}, "messages"),
        ({"logprobs": True}, "logprobs"),
    ],
    ids=str,
)
def test_a_completion_that_does_not_validate_is_refused_by_its_path(fields: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        completion(**fields)
    assert refused.value.param is not None
    assert refused.value.param.startswith(param)
    assert SECRET not in refused.value.message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.sampled_from(sorted({*ChatRequest.model_fields, *openai_fields.CHAT})), JSON))
def test_any_json_under_known_chat_names_is_a_request_or_a_refusal(fields: dict[str, Any]) -> None:
    try:
        chat(**fields)
    except InvalidRequest as refused:
        assert SECRET not in refused.message


@given(st.dictionaries(st.sampled_from(sorted(CompletionRequest.model_fields)), JSON))
def test_any_json_under_known_completion_names_is_a_request_or_a_refusal(fields: dict[str, Any]) -> None:
    try:
        completion(**fields)
    except InvalidRequest as refused:
        assert SECRET not in refused.message


def test_unknown_fields_are_left_to_the_backend() -> None:
    request = chat(frobnicate={"deep": [1]}, bad_words=["no"], min_tokens=0, tools=[]).request
    assert request.extra == {"frobnicate": {"deep": [1]}, "bad_words": ["no"]}
    assert request.needs == {Feature.UNKNOWN_FIELDS, Feature.FIELDS_PASSED}
    plain = chat(min_tokens=0, metadata={"a": "b"}).request
    assert not plain.extra and not plain.needs


@pytest.mark.parametrize(
    "fields",
    [
        {"a" * 65: 1},
        {"a\nb": 1},
        {f"f{n}": 1 for n in range(33)},
        {"frobnicate": "\x00"},
        {"suffix": "x", "echo": True},
    ],
)
def test_unknown_fields_are_bounded_and_plain(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        completion(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"user": ""},
        {"stream_options": None},
        {"stream_options": {}},
        {"stream_options": {"include_usage": False}, "stream": False},
        {"messages": [{"role": "assistant", "content": None}, TURN]},
        {"messages": [{"role": "assistant", "content": [], "tool_calls": None}, TURN]},
        {"repetition_detection": None, "session_id": None},
        {"messages": [{**TURN, "frob": None}]},
    ],
)
def test_what_clients_send_by_default_and_asks_for_nothing_is_accepted(fields: dict[str, Any]) -> None:
    request = chat(**fields).request
    assert request.messages[-1].content == SECRET
    assert not request.needs and not request.extra
