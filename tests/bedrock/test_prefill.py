"""Resuming a partial answer as the last assistant turn, for models that complete one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from benchmarks.bedrock.requests import RequestChecker
from benchmarks.bedrock.stand_in import ANSWER, Behaviour, StandIn
from budgeting.values import Message
from gateway.backends.bedrock.models import takes_prefill
from gateway.backends.bedrock.request import ConverseWriter
from gateway.backends.bedrock.tools import ConverseTools
from gateway.backends.port import Continue, PartialAnswer
from gateway.contracts.values import FinishReason
from resilience.failures import BackendFailure, FailureKind
from tests.bedrock.conftest import HAIKU, MakeBackend
from tests.bedrock.support import ASSISTANT, USER, failure_of, texts, wait_idle, work
from tests.conformance.harness import collect

WHOLE = "".join(ANSWER)
CHECKER = RequestChecker()


@pytest.mark.parametrize(
    ("model_id", "takes"),
    [
        (HAIKU, True),
        ("us.anthropic.claude-3-7-sonnet-20250219-v1:0", True),
        ("anthropic.claude-sonnet-4-20250514-v1:0", True),
        ("eu.anthropic.claude-haiku-4-5-20251001-v1:0", True),
        ("global.anthropic.claude-opus-4-5-20251101-v1:0", True),
        ("us.anthropic.claude-opus-4-6-v1", False),
        ("anthropic.claude-sonnet-4-6", False),
        ("anthropic.claude-sonnet-5", False),
        ("us.amazon.nova-lite-v1:0", True),
        ("meta.llama3-70b-instruct-v1:0", False),
        ("arn:aws:bedrock:us-east-1:123456789012:application-inference-profile/abc", False),
    ],
)
def test_only_models_that_are_known_to_complete_a_message_are_asked_to(model_id: str, takes: bool) -> None:
    assert takes_prefill(model_id, None) is takes
    assert takes_prefill(model_id, not takes) is not takes


def written(partial: str, *messages: Message) -> list[dict[str, Any]]:
    asked = replace(work(*messages), partial=PartialAnswer(partial))
    request = ConverseWriter(HAIKU, lambda system: False).request(asked, ConverseTools(asked))
    assert CHECKER.faults("converse", request) == []
    turns: list[dict[str, Any]] = request["messages"]
    return turns


def test_the_beginning_is_the_last_turn_without_white_space_at_its_end() -> None:
    *before, last = written("Vinland \n")
    assert [turn["role"] for turn in before] == ["user"]
    assert (last["role"], texts(last)) == ("assistant", ["Vinland"])


def test_a_partial_answer_directly_follows_the_callers_own_prefill() -> None:
    *_, last = written(" Saga", Message(USER, "Go on."), Message(ASSISTANT, "Vinland"))
    assert texts(last) == ["Vinland Saga"]


def test_white_space_alone_is_no_turn() -> None:
    assert [turn["role"] for turn in written(" \n")] == ["user"]


@given(st.text(max_size=20))
def test_any_beginning_makes_a_request_that_the_service_takes(partial: str) -> None:
    written(partial)


@pytest.mark.parametrize("streaming", [True, False])
async def test_an_answer_resumed_at_any_character_ends_as_the_whole_answer(
    bedrock: StandIn, make: MakeBackend, streaming: bool
) -> None:
    backend = make(streaming=streaming)
    assert backend.continues == {Continue.TEXT}
    for split in range(len(WHOLE)):
        answer = await collect(backend, replace(work(), partial=PartialAnswer(WHOLE[:split])))
        assert WHOLE[:split] + answer.text == WHOLE
        assert answer.tokens == answer.completion.usage.output_tokens
    await wait_idle(backend)


async def test_the_prompt_is_counted_without_the_beginning(bedrock: StandIn, make: MakeBackend) -> None:
    backend = make()
    bedrock.always["us-east-1"] = Behaviour(cache=(500, 0))
    bedrock.count_tokens = lambda request: 1000
    asked = work(Message(USER, "word " * 300))
    fresh = (await collect(backend, asked)).completion.usage
    partial = (await collect(backend, replace(asked, partial=PartialAnswer("word " * 300)))).completion.usage
    assert fresh.input_tokens == 1000
    assert partial.input_tokens == pytest.approx(500, rel=0.05)
    assert partial.cached_tokens <= partial.input_tokens


async def test_a_stop_string_that_began_before_the_break_ends_the_rest(
    bedrock: StandIn, make: MakeBackend
) -> None:
    backend = make()
    bedrock.always["us-east-1"] = Behaviour(delay_s=0.05)
    answer = await collect(backend, replace(work(stop=("a and V",)), partial=PartialAnswer("Vinland Saga")))
    assert answer.text == ""
    assert answer.completion.finish_reason is FinishReason.STOP
    assert answer.tokens == answer.completion.usage.output_tokens == 2
    await wait_idle(backend)


async def test_a_beginning_too_long_for_the_model_is_refused_before_it_is_sent(
    bedrock: StandIn, make: MakeBackend
) -> None:
    failure = await failure_of(
        make(max_input_tokens=200), replace(work(), partial=PartialAnswer("word " * 500))
    )
    assert failure.kind is FailureKind.TOKEN_LIMIT_EXCEEDED
    assert bedrock.seen == []


async def test_a_model_without_prefill_is_not_asked(bedrock: StandIn, make: MakeBackend) -> None:
    model_id = "us.anthropic.claude-opus-4-6-v1"
    backend = make(model_id=model_id)
    assert backend.continues == frozenset()
    with pytest.raises(BackendFailure, match="cannot resume") as caught:
        await collect(backend, replace(work(), partial=PartialAnswer("Vinland")))
    assert caught.value.kind is FailureKind.INVALID_INPUT
    assert bedrock.seen == []


async def test_a_prefill_that_bedrock_refuses_is_bad_input(bedrock: StandIn, make: MakeBackend) -> None:
    backend = make(model_id="us.anthropic.claude-opus-4-6-v1", prefill=True)
    failure = await failure_of(backend, replace(work(), partial=PartialAnswer("Vinland")))
    assert failure.kind is FailureKind.INVALID_INPUT
