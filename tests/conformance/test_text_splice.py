"""``TextSplice``: joins new text to text sent before, for a backend that sees only the new text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.backends.partial_answer import TextSplice, check_partial, generate_rest
from gateway.backends.port import Completion, Continue, DeltaSink, PartialAnswer, Work
from gateway.contracts.events import Delta
from gateway.contracts.values import FinishReason, FormatType, ResponseFormat, Sampling, Usage
from resilience.failures import BackendFailure, FailureKind

WORK = Work("gen_1", (1, 2, 3), (), Sampling(max_tokens=8), partial=PartialAnswer("It is", (7, 8)))


def through(splice: TextSplice, pieces: list[str]) -> tuple[str, bool]:
    """Return the text that the splice lets through, and whether a stop string ended it."""
    given = ""
    for piece in pieces:
        if not splice.is_open:
            given += piece
            continue
        text = splice.push(piece)
        if text is None:
            return given, True
        given += text
    return given + splice.flush(), False


@given(
    text=st.text("ab ", max_size=20),
    stops=st.lists(st.text("ab ", min_size=1, max_size=5), max_size=3),
    split=st.integers(0, 20),
    size=st.integers(1, 4),
)
def test_only_a_stop_string_across_the_edge_ends_an_answer(
    text: str, stops: list[str], split: int, size: int
) -> None:
    given, later = text[:split], text[split:]
    pieces = [later[at : at + size] for at in range(0, len(later), size)]
    across = any(
        text.startswith(stop, at)
        for stop in stops
        for at in range(max(0, split - len(stop) + 1), min(split, len(text)))
        if at + len(stop) > split
    )
    assert through(TextSplice(given, stops), pieces) == (("", True) if across else (later, False))


@given(
    white=st.text(" \n", max_size=4),
    later=st.text(" \nab", max_size=12),
    size=st.integers(1, 3),
)
def test_white_space_that_was_not_sent_is_not_given_twice(white: str, later: str, size: int) -> None:
    pieces = [later[at : at + size] for at in range(0, len(later), size)]
    again = 0
    while again < min(len(white), len(later)) and white[again] == later[again]:
        again += 1
    assert through(TextSplice("It is" + white, (), white), pieces) == (later[again:], False)


async def test_the_pieces_that_were_held_back_keep_their_count_ids_and_first_figures() -> None:
    sent = [
        Delta(" a", 1, 3, 0.5, token_ids=(9,)),
        Delta("b", 2, token_ids=(10, 11)),
        Delta("c", 1, token_ids=(12,)),
    ]

    async def generate(work: Work, out: DeltaSink) -> Completion:
        for delta in sent:
            await out(delta)
        return Completion(FinishReason.STOP, Usage(3, 4))

    answer = await _collect("s abX", generate)
    assert answer[0] == [Delta(" abc", 4, 3, 0.5, token_ids=(9, 10, 11, 12))]
    assert answer[1].usage == Usage(3, 4)


async def test_an_answer_that_ends_while_text_is_held_back_gives_it() -> None:
    async def generate(work: Work, out: DeltaSink) -> Completion:
        await out(Delta(" a", 1))
        await out(Delta("", 1))
        return Completion(FinishReason.LENGTH, Usage(3, 2))

    deltas, completion = await _collect("s abX", generate)
    assert deltas == [Delta(" a", 2)]
    assert completion.finish_reason is FinishReason.LENGTH


async def test_a_stop_string_across_the_edge_ends_the_generation_and_counts_its_tokens() -> None:
    left = []

    async def generate(work: Work, out: DeltaSink) -> Completion:
        try:
            while True:
                await out(Delta(" ab", 1, 2, 0.25))
        finally:
            left.append(work)

    deltas, completion = await _collect("s ab ab", generate)
    assert deltas == [Delta("", 2, 2, 0.25)]
    assert completion == Completion(FinishReason.STOP, Usage(3, 2, 2), 0.25)
    assert left == [_stopped_by("s ab ab")]


def _stopped_by(stop: str) -> Work:
    return replace(WORK, sampling=replace(WORK.sampling, stop=(stop,)))


async def _collect(stop: str, generate: object) -> tuple[list[Delta], Completion]:
    deltas: list[Delta] = []

    async def out(delta: Delta) -> None:
        deltas.append(delta)

    return deltas, await generate_rest(generate, _stopped_by(stop), out)  # type: ignore[arg-type]


TOKENS, TEXT = frozenset({Continue.TOKENS}), frozenset({Continue.TEXT})


@pytest.mark.parametrize(
    ("work", "ways"),
    [
        (WORK, frozenset()),
        (replace(WORK, partial=PartialAnswer("It is", (7, 8), "It is")), TOKENS),
        (replace(WORK, partial=PartialAnswer("It is")), TOKENS),
        (replace(WORK, sampling=Sampling(max_tokens=8, n=2)), TOKENS),
        (replace(WORK, response_format=ResponseFormat(FormatType.JSON_OBJECT)), TEXT),
    ],
)
def test_a_partial_answer_that_cannot_be_resumed_is_bad_input(work: Work, ways: frozenset[Continue]) -> None:
    with pytest.raises(BackendFailure, match="local cannot resume") as caught:
        check_partial(work, ways, "local")
    assert caught.value.kind is FailureKind.INVALID_INPUT


def test_a_partial_answer_that_the_backend_can_resume_is_accepted() -> None:
    check_partial(replace(WORK, partial=None), frozenset(), "local")
    check_partial(WORK, TOKENS, "local")
    check_partial(WORK, TEXT, "local")
    shaped = replace(WORK, response_format=ResponseFormat(FormatType.JSON_OBJECT))
    check_partial(shaped, TOKENS | {Continue.SHAPED}, "local")
