"""Similar questions: what is found, what is never found, and what a broken embedder costs."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import replace
from math import inf, isclose, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience.question_vectors import cosine, nearest, numbers_in, unit_vector
from resilience.response_cache import EMBEDDER_REST_S, MAX_LOOKING, digest_of
from resilience.response_cache_values import (
    MAX_SHELF,
    AnswersLost,
    CachedAnswer,
    Lookup,
    Question,
    StoreBroke,
)
from tests.resilience.test_response_cache import ANSWER, CacheRig
from tests.resilience.words_embedder import WordsEmbedder

ASKED = "Who created the book Berserk?"
REWORDED = "Who made the book Berserk?"


def question(text: str, shelf: str = "one", tenant: str = "acme", model: str = "words") -> Question:
    return Question(text, shelf, tenant, model, threshold=0.75)


def rig() -> tuple[CacheRig, WordsEmbedder]:
    made, embedder = CacheRig(), WordsEmbedder()
    made.cache.embedder = embedder
    return made, embedder


async def remember(rig: CacheRig, *questions: Question, answer: CachedAnswer = ANSWER) -> None:
    for one in questions:
        rig.cache.remember(
            lambda one=one: digest_of([one.text, one.shelf]),  # type: ignore[misc]
            answer,
            lambda one=one: one,  # type: ignore[misc]
        )
    await rig.cache.flush()


async def find(rig: CacheRig, asked: Question) -> CachedAnswer | None:
    return await rig.cache.find(digest_of([asked.text, asked.shelf]), question=asked)


async def test_a_similar_question_is_answered_with_its_similarity() -> None:
    made, _ = rig()
    await remember(made, question(ASKED))
    found = await find(made, question(REWORDED))
    assert found is not None and found.similarity == pytest.approx(0.8)
    assert replace(found, similarity=None) == ANSWER
    assert await find(made, question(ASKED)) == ANSWER
    assert made.kinds == [Lookup.SIMILAR, Lookup.EXACT]


@pytest.mark.parametrize(
    "asked",
    [
        question("Who created the music of Berserk and when?"),
        question(REWORDED, shelf="other"),
        replace(question(REWORDED), threshold=0.81),
    ],
)
async def test_a_question_below_the_threshold_or_of_another_group_is_not_answered(asked: Question) -> None:
    made, _ = rig()
    await remember(made, question(ASKED))
    assert await find(made, asked) is None
    assert made.kinds == [Lookup.MISS]


async def test_the_most_similar_of_several_is_taken_and_the_next_when_it_has_gone() -> None:
    made, _ = rig()
    await remember(made, question("Who made a book Berserk?"), answer=CachedAnswer("near", "stop"))
    await remember(made, question("So who made the book Berserk?"), answer=CachedAnswer("nearer", "stop"))
    found = await find(made, question(REWORDED))
    assert found is not None and found.text == "nearer"
    shelf = await made.store.shelf("one")
    vectors = dict(shelf)
    gone = digest_of(["So who made the book Berserk?", "one"])
    made.store._entries.pop(gone)

    async def with_a_stale_key(name: str) -> list[tuple[str, bytes]]:
        return list(vectors.items())

    made.store.shelf = with_a_stale_key  # type: ignore[method-assign]
    found = await find(made, question(REWORDED))
    assert found is not None and found.text == "near"


async def test_questions_are_embedded_in_batches_by_tenant_and_model() -> None:
    made, embedder = rig()
    await remember(
        made,
        question("a"),
        question("b"),
        question("c", tenant="globex", shelf="two"),
        question("d", model="other", shelf="three"),
    )
    assert sorted(embedder.calls) == [
        ("acme", "other", ("d",)),
        ("acme", "words", ("a", "b")),
        ("globex", "words", ("c",)),
    ]


async def test_a_broken_embedder_is_a_miss_left_alone_for_a_while_and_answers_are_kept_all_the_same() -> None:
    made, embedder = rig()
    embedder.broken = True
    await remember(made, question(ASKED))
    assert made.events == [AnswersLost(1, "no_vector")]
    assert await find(made, question(REWORDED)) is None
    assert await find(made, question(ASKED)) == ANSWER
    assert len(embedder.calls) == 1
    assert made.kinds == [Lookup.NO_VECTOR, Lookup.EXACT]
    embedder.broken, made.now = False, EMBEDDER_REST_S
    await remember(made, question(ASKED))
    assert await find(made, question(REWORDED)) is not None


async def test_an_embedder_that_hangs_is_a_miss_and_no_fault_of_the_store() -> None:
    made, embedder = rig()
    await remember(made, question(ASKED))
    embedder.hangs = True
    made.cache.timeout_s = 0.1
    async with asyncio.timeout(15):
        assert await find(made, question(REWORDED)) is None
    assert made.kinds == [Lookup.NO_VECTOR]
    assert not [event for event in made.events if isinstance(event, StoreBroke)]


async def test_a_caller_without_time_left_does_not_keep_others_from_the_embedder() -> None:
    made, embedder = rig()
    await remember(made, question(ASKED))
    embedder.hangs = True
    async with asyncio.timeout(15):
        assert await made.cache.find(question(REWORDED).text, 0.01, question(REWORDED)) is None
    embedder.hangs = False
    assert await find(made, question(REWORDED)) is not None


async def test_without_an_embedder_the_same_question_alone_is_found() -> None:
    made = CacheRig()
    await remember(made, question(ASKED))
    assert await find(made, question(REWORDED)) is None
    assert await find(made, question(ASKED)) == ANSWER


async def test_lookups_that_wait_for_vectors_are_bounded_and_leave_nothing() -> None:
    made, embedder = rig()
    await remember(made, question(ASKED))
    embedder.hangs = True
    embedder.calls.clear()
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(find(made, question(REWORDED))) for _ in range(2 * MAX_LOOKING)]
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(embedder.calls) == MAX_LOOKING
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    embedder.hangs = False
    assert await find(made, question(REWORDED)) is not None


async def test_a_group_holds_its_newest_questions_alone() -> None:
    made, _ = rig()
    made.store._capacity = 10 * MAX_SHELF
    await remember(made, *(question(f"question number {n}") for n in range(MAX_SHELF + 10)))
    shelf = await made.store.shelf("one")
    assert len(shelf) == MAX_SHELF
    made.store.check_integrity()
    assert shelf[0][0] == digest_of([f"question number {MAX_SHELF + 9}", "one"])


@pytest.mark.parametrize("numbers", [[], [0.0, 0.0], [nan, 1.0], [inf, 1.0]])
def test_a_vector_without_a_direction_is_none(numbers: list[float]) -> None:
    assert unit_vector(array("f", numbers).tobytes()) is None


@given(
    st.lists(st.floats(-1e3, 1e3, width=32), min_size=4, max_size=4).filter(
        lambda v: any(abs(x) > 1 for x in v)
    )
)
def test_a_vector_is_as_similar_to_itself_as_can_be_whatever_its_length(numbers: list[float]) -> None:
    one = unit_vector(array("f", numbers).tobytes())
    other = unit_vector(array("f", [3 * x for x in numbers]).tobytes())
    turned = unit_vector(array("f", [-x for x in numbers]).tobytes())
    assert one is not None and other is not None and turned is not None
    assert isclose(cosine(one, other), 1.0, abs_tol=1e-5) and cosine(one, other) <= 1.0
    assert isclose(cosine(one, turned), -1.0, abs_tol=1e-5)


def test_vectors_of_another_length_are_not_compared() -> None:
    one = unit_vector(array("f", [1.0, 0.0]).tobytes())
    assert one is not None
    assert nearest(one, [("longer", one + one), ("same", one)], 0.5) == [(1.0, "same")]


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("Where is order 4711?", ("4711",)),
        ("From 9:30 to 10.15 on 2026-11-23", ("9:30", "10.15", "2026-11-23")),
        ("Where is it?", ()),
    ],
)
def test_the_numbers_of_a_question_are_found_in_order(text: str, numbers: tuple[str, ...]) -> None:
    assert numbers_in(text) == numbers
