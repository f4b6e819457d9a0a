"""The order of an answer's events: a legal sequence folds to the whole answer, any other is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.contracts.events import (
    MAX_CALLS,
    AnswerFold,
    Delta,
    IllegalEvent,
    Reasoning,
    ToolArgs,
    ToolBegin,
    ToolEnd,
)
from gateway.contracts.values import FinishReason, TokenLogprob
from tests.answer_events import EventSequence, answers

BEGIN = ToolBegin("stock", 1, id="a")
ARGS = ToolArgs("{}", 1)
END = ToolEnd("", 0)
CALL = (BEGIN, ARGS, END)


def folded(*events: Delta, n: int = 1) -> AnswerFold:
    fold = AnswerFold(n)
    for event in events:
        fold.take(event)
    return fold


@given(answers())
def test_every_legal_answer_folds_to_its_parts(answer: EventSequence) -> None:
    fold = folded(*answer.events, n=len(answer.reasons))
    fold.end(answer.reasons)
    for index in range(len(answer.reasons)):
        assert fold.text(index) == answer.text(index)
        assert fold.reasoning(index) == answer.reasoning(index)
        assert fold.tool_calls(index) == answer.tool_calls(index)


@given(answers(), st.data())
def test_a_tool_event_given_twice_is_refused_and_changes_nothing(
    answer: EventSequence, data: st.DataObject
) -> None:
    repeatable = [at for at, one in enumerate(answer.events) if isinstance(one, ToolBegin | ToolEnd)]
    if not repeatable:
        return
    at = data.draw(st.sampled_from(repeatable))
    n = len(answer.reasons)
    fold = folded(*answer.events[: at + 1], n=n)
    with pytest.raises(IllegalEvent):
        fold.take(answer.events[at])
    for event in answer.events[at + 1 :]:
        fold.take(event)
    fold.end(answer.reasons)
    assert all(fold.tool_calls(index) == answer.tool_calls(index) for index in range(n))


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ((Delta("a", 1, index=1),), "choice 1 of 1"),
        ((Delta("a", 1, index=-1),), "choice -1 of 1"),
        ((ARGS,), "call 0 is not open"),
        ((END,), "call 0 is not open"),
        ((BEGIN, ToolArgs("{}", 1, call=1)), "call 1 is not open"),
        ((BEGIN, ToolEnd("", 0, call=1)), "call 1 is not open"),
        ((BEGIN, ToolArgs("", 1)), "empty piece of arguments"),
        ((BEGIN, ToolEnd("}", 1)), "has text"),
        ((BEGIN, Delta("a", 1)), "text inside call 0"),
        ((BEGIN, Reasoning("a", 1)), "text inside call 0"),
        ((BEGIN, ToolBegin("x", 1, call=1, id="b")), "begins inside call 0"),
        ((*CALL, ARGS), "call 0 is not open"),
        ((*CALL, ToolBegin("x", 1, call=0, id="b")), "call 0 follows 1 calls"),
        ((*CALL, ToolBegin("x", 1, call=2, id="b")), "call 2 follows 1 calls"),
        ((*CALL, ToolBegin("x", 1, call=1, id="a")), "the id of another call"),
        ((ToolBegin("", 1, id="a"),), "has no name"),
        ((ToolBegin("x", 1),), "has no id"),
    ],
)
def test_an_event_out_of_order_is_refused_by_name(events: tuple[Delta, ...], said: str) -> None:
    *legal, last = events
    fold = folded(*legal)
    with pytest.raises(IllegalEvent, match=said):
        fold.take(last)


@pytest.mark.parametrize(
    ("events", "reasons", "said"),
    [
        ((), (), "0 finish reasons for 1 choices"),
        ((), (FinishReason.TOOL_CALLS,), "has none"),
        ((BEGIN,), (FinishReason.TOOL_CALLS,), "inside call 0"),
        ((BEGIN, ARGS), (FinishReason.STOP,), "inside call 0"),
    ],
)
def test_an_end_that_does_not_fit_the_answer_is_refused(
    events: tuple[Delta, ...], reasons: tuple[FinishReason, ...], said: str
) -> None:
    with pytest.raises(IllegalEvent, match=said):
        folded(*events).end(reasons)


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.DEADLINE, FinishReason.ERROR])
def test_an_answer_that_is_cut_short_may_end_inside_a_call(reason: FinishReason) -> None:
    fold = folded(BEGIN, ToolArgs('{"a', 1))
    fold.end([reason])
    assert fold.in_call()
    assert fold.tool_calls()[0].arguments == '{"a'


def test_no_event_is_accepted_after_the_end() -> None:
    fold = folded(*CALL)
    fold.end([FinishReason.TOOL_CALLS])
    with pytest.raises(IllegalEvent, match="has ended"):
        fold.take(Delta("a", 1))
    with pytest.raises(IllegalEvent, match="has ended"):
        fold.end([FinishReason.TOOL_CALLS])


def test_tokens_without_text_may_come_at_any_time() -> None:
    fold = folded(BEGIN, Delta("", 3), ARGS, Delta("", 1), END)
    fold.end([FinishReason.TOOL_CALLS])
    assert fold.text() == ""


def test_log_probabilities_of_tokens_that_gave_a_call_no_piece_belong_to_no_text() -> None:
    silent = Delta("", 1, logprobs=(TokenLogprob(b"{", -0.5),))
    assert folded(silent, BEGIN, silent, ARGS, END, silent).in_order() == folded(*CALL).in_order()


def test_the_number_of_calls_is_bounded() -> None:
    fold = AnswerFold()
    for call in range(MAX_CALLS):
        fold.take(ToolBegin("x", 1, call=call, id=f"c{call}"))
        fold.take(ToolEnd("", 0, call=call))
    with pytest.raises(IllegalEvent, match=f"more than {MAX_CALLS} calls"):
        fold.take(ToolBegin("x", 1, call=MAX_CALLS, id="last"))
