"""Requests to Bedrock: every conversation in a form that the service accepts, with no text lost."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from benchmarks.bedrock.requests import RequestChecker
from budgeting.values import ImageContent, Message
from gateway.backends.bedrock.models import cacheable_from
from gateway.backends.bedrock.request import EARLIER, ConverseWriter, _turns
from gateway.backends.bedrock.tools import ConverseTools
from gateway.config.backends import BedrockGuardrail
from gateway.contracts.images import ImageData
from resilience.failures import BackendFailure, FailureKind
from tests.bedrock.conftest import HAIKU
from tests.bedrock.support import ASSISTANT, SYSTEM, USER, work
from tests.images.samples import sample

CHECKER = RequestChecker()
contents = st.one_of(
    st.text(max_size=12), st.sampled_from(["", " ", "\n", "Evidence:\nyes", "Context:\nnow", "word ", "  x"])
)
conversations = st.lists(st.builds(Message, st.sampled_from([SYSTEM, USER, ASSISTANT]), contents), max_size=9)


def written(*messages: Message, cached: bool = False, **sampling: Any) -> dict[str, Any]:
    asked = work(*messages, **sampling)
    return ConverseWriter(HAIKU, lambda system: cached).request(asked, ConverseTools(asked))


@given(
    conversations,
    st.booleans(),
    st.fixed_dictionaries(
        {
            "max_tokens": st.integers(1, 4096),
            "temperature": st.none() | st.floats(0, 1),
            "top_p": st.none() | st.floats(0, 1),
            "stop": st.lists(st.text(min_size=1, max_size=4), max_size=4).map(tuple),
        }
    ),
)
def test_any_conversation_becomes_a_request_that_the_service_takes_and_loses_no_text(
    messages: list[Message], cached: bool, sampling: dict[str, Any]
) -> None:
    not_blank = [message for message in messages if message.content.strip()]
    turns = [message for message in not_blank if message.role is not SYSTEM]
    try:
        asked = work(*(messages or [Message(USER, "")]), **sampling)
        writer = ConverseWriter(HAIKU, lambda system: cached, BedrockGuardrail(id="abc", version="DRAFT"))
        request = writer.request(asked, ConverseTools(asked))
    except BackendFailure as failure:
        assert failure.kind is FailureKind.INVALID_INPUT and not turns
        return
    assert CHECKER.faults("converse", request) == CHECKER.faults("converse-stream", request) == []
    blocks = [
        *request.get("system", []),
        *(block for turn in request["messages"] for block in turn["content"]),
    ]
    sent = "\n".join(block["text"] for block in blocks if "text" in block)
    assert all(message.content.rstrip() in sent for message in not_blank)


def test_a_plain_conversation_is_sent_as_it_is() -> None:
    assert written(
        Message(SYSTEM, "Be kind."), Message(SYSTEM, "Be short."), Message(USER, "Hello"),
        Message(ASSISTANT, "Hi"), Message(USER, "A manga?"), temperature=0.5, top_p=0.9, stop=("END",),
    ) == {
        "modelId": HAIKU,
        "system": [{"text": "Be kind."}, {"text": "Be short."}],
        "messages": [
            {"role": "user", "content": [{"text": "Hello"}]},
            {"role": "assistant", "content": [{"text": "Hi"}]},
            {"role": "user", "content": [{"text": "A manga?"}]},
        ],
        "inferenceConfig": {"maxTokens": 64, "temperature": 0.5, "topP": 0.9, "stopSequences": ["END"]},
    }  # fmt: skip


def test_evidence_before_the_latest_turn_opens_that_turn_under_its_title() -> None:
    request = written(
        Message(SYSTEM, "Be kind."), Message(USER, "Hello"), Message(ASSISTANT, "Hi"),
        Message(SYSTEM, "Evidence:\n[1] It ends."), Message(USER, "Does it end?"),
    )  # fmt: skip
    assert request["messages"][-1]["content"] == [
        {"text": "Evidence:\n[1] It ends.\n\nMessage:\nDoes it end?"}
    ]


def test_what_changes_with_the_request_never_stands_before_the_cache_point() -> None:
    request = written(
        Message(SYSTEM, "Be kind."), Message(SYSTEM, "Earlier in this conversation:\nthey met"),
        Message(SYSTEM, "Context:\nnoon"), Message(USER, "Hello"), cached=True,
    )  # fmt: skip
    assert request["system"] == [{"text": "Be kind."}, {"cachePoint": {"type": "default"}}]
    assert [turn["role"] for turn in request["messages"]] == ["user"]


def test_images_are_blocks_of_bytes_between_their_texts() -> None:
    seen = {name: sample(name) for name in ("png", "jpeg", "gif", "webp")}
    parts = ["One ", "and", *[ImageContent(sha256=name) for name in seen], " ", "two"]
    message = Message(USER, "One and two", parts=tuple(parts))
    given = {name: ImageData(f"image/{name}", memoryview(data)) for name, data in seen.items()}
    asked = replace(work(Message(SYSTEM, "Evidence:\nsome"), message), images=given)
    request = ConverseWriter(HAIKU, lambda system: False).request(asked, ConverseTools(asked))
    assert CHECKER.faults("converse", request) == []
    [turn] = request["messages"]
    images = [{"image": {"format": name, "source": {"bytes": data}}} for name, data in seen.items()]
    assert turn["content"] == [
        {"text": "Evidence:\nsome\n\nMessage:\nOne and"},
        *images,
        {"text": " two"},
    ]
    alone = replace(work(Message(USER, "", parts=(ImageContent(sha256="png"),))), images=given)
    request = ConverseWriter(HAIKU, lambda system: False).request(alone, ConverseTools(alone))
    assert request["messages"] == [{"role": "user", "content": images[:1]}]


def test_turns_of_one_role_in_a_row_become_one() -> None:
    request = written(Message(USER, "One"), Message(USER, " "), Message(USER, "Two"))
    assert request["messages"] == [{"role": "user", "content": [{"text": "One\n\nTwo"}]}]


def test_turns_of_one_role_in_a_row_take_time_in_proportion_to_their_number() -> None:
    """Linear: eight times the turns take about eight times as long."""

    def took_s(count: int) -> float:
        asked = work(*[Message(USER, "x" * 2_000)] * count)
        began = time.thread_time()
        _turns(asked.messages, ConverseTools(asked), {})
        return time.thread_time() - began

    small = max(min(took_s(256) for _ in range(3)), 0.001)
    assert min(took_s(2_048) for _ in range(2)) < 24 * small


def test_a_conversation_that_was_trimmed_to_begin_with_an_answer_gets_a_placeholder_before_it() -> None:
    request = written(Message(ASSISTANT, "Hi"), Message(USER, "A manga?"))
    assert [turn["content"][0]["text"] for turn in request["messages"]] == [EARLIER, "Hi", "A manga?"]


def test_a_prefill_loses_the_white_space_at_its_end_and_nothing_else_does() -> None:
    request = written(Message(USER, "Name one \n"), Message(ASSISTANT, "  It is \n"))
    assert [turn["content"][0]["text"] for turn in request["messages"]] == ["Name one \n", "  It is"]


@pytest.mark.parametrize("messages", [[Message(USER, " \n")], [Message(SYSTEM, "Be kind.")]])
def test_a_conversation_without_a_turn_is_bad_input(messages: list[Message]) -> None:
    with pytest.raises(BackendFailure, match="a turn with some text") as caught:
        written(*messages)
    assert caught.value.kind is FailureKind.INVALID_INPUT and caught.value.param == "messages"


@pytest.mark.parametrize(
    ("model", "setting", "minimum"),
    [
        (HAIKU, "auto", None),
        (HAIKU, True, 1024),
        ("us.anthropic.claude-3-7-sonnet-20250219-v1:0", "auto", 1024),
        ("eu.anthropic.claude-haiku-4-5-20251001-v1:0", "auto", 4096),
        ("anthropic.claude-opus-4-5-20251101-v1:0", True, 4096),
        ("amazon.nova-lite-v1:0", "auto", 1000),
        ("amazon.nova-lite-v1:0", False, None),
        ("meta.llama3-8b-instruct-v1:0", "auto", None),
    ],
)
def test_cache_points_are_set_where_the_model_takes_them(
    model: str, setting: Any, minimum: int | None
) -> None:
    assert cacheable_from(model, setting) == minimum
