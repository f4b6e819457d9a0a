"""Resuming an answer that another call began: what a backend does that declares a way to resume, and what a
backend does that declares none."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from gateway.backends.port import Continue, PartialAnswer, Work
from gateway.contracts.events import Delta
from gateway.contracts.features import Feature
from gateway.contracts.values import FinishReason, FormatType
from resilience.failures import BackendFailure, FailureKind
from tests.conformance.conftest import END_TOKEN, LONG_QUESTION, QUESTIONS
from tests.conformance.harness import Specimen, collect, collect_all, shaped

pytestmark = pytest.mark.asyncio(loop_scope="session")

TOKENS = 24
# After how many of its ``TOKENS`` tokens an answer is broken off.
SPLITS = (1, 2, 5, 9, 14, 20, 23)


def needs_a_way(specimen: Specimen) -> None:
    if not specimen.computes:
        pytest.skip("a script computes nothing")
    if not specimen.backend.continues:
        pytest.skip(f"{specimen.backend.name} declares that it cannot go on with an answer")


def partial_of(specimen: Specimen, text: str, split: int) -> PartialAnswer | None:
    """Return the first ``split`` tokens of ``text``; None if their text, encoded again, gives other tokens."""
    ids = specimen.tokenizer.encode(text, add_special_tokens=False)
    given = specimen.tokenizer.decode(ids[:split])
    if Continue.TOKENS in specimen.backend.continues:
        return PartialAnswer(given, ids[:split])
    bare = specimen.tokenizer.encode(given.rstrip(), add_special_tokens=False)
    return PartialAnswer(given) if bare == ids[: len(bare)] else None


def resumed_work(specimen: Specimen, question: str, what: PartialAnswer, **changes: object) -> Work:
    asked = specimen.work(question, **{"max_tokens": TOKENS, **changes})
    return replace(asked, partial=what)


async def test_a_backend_declares_only_ways_to_resume_that_the_port_knows(specimen: Specimen) -> None:
    ways = specimen.backend.continues
    assert ways <= frozenset(Continue)
    assert ways != {Continue.SHAPED}, "a shape goes beside a way"


async def test_the_token_ids_of_the_deltas_decode_to_the_text(specimen: Specimen) -> None:
    if not specimen.returns_ids:
        pytest.skip("it does not tell ids")
    works = (
        specimen.work(QUESTIONS[0], max_tokens=TOKENS),
        specimen.work(QUESTIONS[0], max_tokens=TOKENS, stream=False),
        specimen.work(QUESTIONS[0], max_tokens=TOKENS, stop=("no such words in any answer",)),
        specimen.work(QUESTIONS[0], max_tokens=TOKENS, n=2),
    )
    for work, answer in zip(works, await collect_all(specimen.backend, works), strict=True):
        for index in range(work.sampling.n):
            mine = [delta for delta in answer.deltas if delta.index == index]
            ids = [token for delta in mine for token in delta.token_ids]
            assert specimen.tokenizer.decode([token for token in ids if token > END_TOKEN]) == answer.of(
                index
            )
            if work.sampling.n == 1:
                assert all(len(delta.token_ids) == delta.tokens for delta in mine)
                assert len(ids) == answer.completion.usage.output_tokens


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_resumed_anywhere_ends_as_the_whole_answer(
    specimen: Specimen, stream: bool, reference: dict[str, str]
) -> None:
    needs_a_way(specimen)
    whole = reference[QUESTIONS[0]]
    parts = [(split, what) for split in SPLITS if (what := partial_of(specimen, whole, split))]
    rests = await collect_all(
        specimen.backend,
        [
            resumed_work(specimen, QUESTIONS[0], what, max_tokens=TOKENS - split, stream=stream)
            for split, what in parts
        ],
    )
    for (split, what), rest in zip(parts, rests, strict=True):
        assert what.text + rest.text == whole, split
    assert len(parts) > 2
    await specimen.wait_idle()


async def test_the_usage_is_of_the_own_prompt_and_of_this_call_alone(
    specimen: Specimen, reference: dict[str, str]
) -> None:
    needs_a_way(specimen)
    what = next(
        filter(None, (partial_of(specimen, reference[QUESTIONS[0]], split) for split in (14, 15, 16)))
    )
    for _ in range(2):  # the second call finds the blocks of the first in the cache
        work = resumed_work(specimen, QUESTIONS[0], what, max_tokens=3, cache_salt="continuing")
        answer = await collect(specimen.backend, work)
        usage = answer.completion.usage
        assert answer.tokens == usage.output_tokens == 3
        assert answer.completion.finish_reason is FinishReason.LENGTH
        assert usage.cached_tokens <= usage.input_tokens
        assert all((delta.cached_tokens or 0) <= usage.input_tokens for delta in answer.deltas)
        if specimen.exact_prompt:
            assert usage.input_tokens == len(work.token_ids)
        else:
            assert 0 < usage.input_tokens < 1.5 * len(work.token_ids)


async def test_a_stop_string_that_began_before_the_break_ends_the_rest(
    specimen: Specimen, reference: dict[str, str]
) -> None:
    needs_a_way(specimen)
    whole = reference[QUESTIONS[0]]
    what = next(filter(None, (partial_of(specimen, whole, split) for split in (8, 9, 10, 11))))
    length = len(what.text)
    stop = whole[length - 3 : length + 3]
    answer = await collect(specimen.backend, resumed_work(specimen, QUESTIONS[0], what, stop=(stop,)))
    assert answer.text == ""
    assert answer.completion.finish_reason is FinishReason.STOP
    assert answer.tokens == answer.completion.usage.output_tokens > 0
    later = whole[length + 4 : length + 8]
    answer = await collect(specimen.backend, resumed_work(specimen, QUESTIONS[0], what, stop=(later,)))
    assert what.text + answer.text == whole[: whole.index(later, length - 3)]
    await specimen.wait_idle()


async def test_a_sampled_answer_goes_on_in_the_same_way_each_time(
    specimen: Specimen, reference: dict[str, str]
) -> None:
    needs_a_way(specimen)
    if Feature.SEED not in specimen.backend.features:
        pytest.skip("it takes no seed")
    what = next(
        filter(None, (partial_of(specimen, reference[QUESTIONS[0]], split) for split in (8, 9, 10, 11)))
    )
    asked = resumed_work(specimen, QUESTIONS[0], what, temperature=1.0, seed=7)
    once, again = await collect_all(specimen.backend, [asked, replace(asked, generation_id="gen_again")])
    assert once.text == again.text


@pytest.mark.parametrize("after", [0, 2])
async def test_cancelling_a_resumed_answer_leaves_nothing(specimen: Specimen, after: int) -> None:
    needs_a_way(specimen)
    ids = specimen.tokenizer.encode(" a dragon", add_special_tokens=False)
    known = Continue.TOKENS in specimen.backend.continues
    what = PartialAnswer(specimen.tokenizer.decode(ids), ids if known else None)
    seen: list[Delta] = []
    there = asyncio.Event()

    async def out(delta: Delta) -> None:
        seen.append(delta)
        if len(seen) >= after:
            there.set()

    async with asyncio.TaskGroup() as group:
        work = resumed_work(specimen, LONG_QUESTION, what, max_tokens=400, logit_bias={END_TOKEN: -100.0})
        call = group.create_task(specimen.backend.generate(work, out))
        if after:
            waiting = group.create_task(there.wait())
            await asyncio.wait({call, waiting}, return_when=asyncio.FIRST_COMPLETED)
            there.set()
        else:
            await asyncio.sleep(0.01)
        call.cancel()
    await specimen.wait_idle()


async def test_a_partial_answer_that_a_backend_cannot_resume_is_bad_input(specimen: Specimen) -> None:
    ways = specimen.backend.continues
    what = PartialAnswer("It", specimen.tokenizer.encode("It", add_special_tokens=False))
    refused = []
    if not ways:
        refused.append(resumed_work(specimen, QUESTIONS[0], what))
    elif specimen.computes:
        refused.append(resumed_work(specimen, QUESTIONS[0], what, n=2))
        if Continue.TEXT not in ways:
            refused.append(resumed_work(specimen, QUESTIONS[0], PartialAnswer("It")))
        if Continue.SHAPED not in ways:
            yes = shaped(FormatType.REGEX, "It is")
            refused.append(resumed_work(specimen, QUESTIONS[0], what, response_format=yes))
    for work in refused:
        with pytest.raises(BackendFailure) as caught:
            await collect(specimen.backend, work)
        assert caught.value.kind is FailureKind.INVALID_INPUT
    await specimen.wait_idle()


async def test_a_resumed_structured_answer_keeps_its_format(specimen: Specimen) -> None:
    if Continue.SHAPED not in specimen.backend.continues or not specimen.computes:
        pytest.skip("it cannot")
    ids = specimen.tokenizer.encode("yes, of", add_special_tokens=False)
    work = resumed_work(
        specimen,
        QUESTIONS[0],
        PartialAnswer("yes, of", ids),
        response_format=shaped(FormatType.CHOICE, '["yes, of course", "no"]'),
    )
    assert (await collect(specimen.backend, work)).text == " course"
