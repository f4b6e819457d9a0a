"""What every backend must do: the port's invariants, and each feature that it declares."""

from __future__ import annotations

import asyncio
import json
import re
import uuid

import pytest
from msgspec.structs import replace

from adapters.values import Adapter
from gateway.backends.port import BackendState
from gateway.contracts.events import Delta
from gateway.contracts.features import Feature
from gateway.contracts.values import FinishReason, FormatType
from resilience.failures import BackendFailure, FailureKind
from tests.conformance.conftest import END_TOKEN, LONG_QUESTION, PENALIZED_TOKENS, PENALTIES, QUESTIONS
from tests.conformance.harness import Specimen, collect, collect_all, shaped

pytestmark = pytest.mark.asyncio(loop_scope="session")


def needs(specimen: Specimen, feature: Feature | None = None) -> None:
    """Skip a test that needs a real model, or a feature that the backend does not declare."""
    if not specimen.computes:
        pytest.skip("a script computes nothing")
    if feature is not None and feature not in specimen.backend.features:
        pytest.skip(f"{specimen.backend.kind} declares that it has no {feature.value}")


def declared(specimen: Specimen, *features: Feature) -> list[Feature]:
    """Return the features that the backend declares; skip a test that needs one of them."""
    needs(specimen)
    found = [feature for feature in features if feature in specimen.backend.features]
    if not found:
        pytest.skip(f"{specimen.backend.kind} declares none of {', '.join(features)}")
    return found


async def test_a_backend_is_ready_and_describes_itself(specimen: Specimen) -> None:
    backend = specimen.backend
    assert backend.state is BackendState.READY
    assert backend.kind in ("embedded", "vllm", "openai", "bedrock")
    assert backend.name and backend.model
    assert backend.features <= frozenset(Feature)


async def test_deltas_join_up_and_add_up_to_the_usage(specimen: Specimen) -> None:
    work = specimen.work(LONG_QUESTION, max_tokens=20)
    answer = await collect(specimen.backend, work)
    assert answer.text
    assert {delta.index for delta in answer.deltas} == {0}
    assert answer.tokens == answer.completion.usage.output_tokens
    assert 0 < answer.tokens <= 20
    assert answer.completion.usage.input_tokens == len(work.token_ids)
    assert 0 <= answer.completion.usage.cached_tokens <= len(work.token_ids)
    assert answer.completion.queue_wait_s >= 0
    await specimen.wait_idle()


async def test_a_greedy_answer_is_the_models_own(specimen: Specimen, reference: dict[str, str]) -> None:
    needs(specimen)
    answer = await collect(specimen.backend, specimen.work(QUESTIONS[2], max_tokens=24))
    assert answer.text == reference[QUESTIONS[2]]


async def test_an_answer_in_larger_pieces_is_the_same_answer(
    specimen: Specimen, reference: dict[str, str]
) -> None:
    needs(specimen)
    answer = await collect(specimen.backend, specimen.work(QUESTIONS[0], max_tokens=24, stream=False))
    assert answer.text == reference[QUESTIONS[0]]
    assert answer.tokens == answer.completion.usage.output_tokens


async def test_answers_do_not_depend_on_concurrent_requests(
    specimen: Specimen, reference: dict[str, str]
) -> None:
    needs(specimen)
    asked = QUESTIONS * 3
    works = [specimen.work(question, max_tokens=24) for question in asked]
    answer = await collect_all(specimen.backend, works)
    assert [one.text for one in answer] == [reference[question] for question in asked]
    await specimen.wait_idle()


async def test_a_raw_prompt_is_continued_as_it_is(specimen: Specimen) -> None:
    needs(specimen, Feature.RAW_PROMPT)
    work = specimen.work("The reader asked which volume", raw=True, max_tokens=8)
    answer = await collect(specimen.backend, work)
    assert answer.completion.usage.input_tokens == len(work.token_ids)
    assert answer.text


async def test_max_tokens_ends_an_answer_with_length(specimen: Specimen) -> None:
    needs(specimen)
    answer = await collect(specimen.backend, specimen.work(LONG_QUESTION, max_tokens=3))
    assert answer.completion.finish_reason is FinishReason.LENGTH
    assert answer.completion.usage.output_tokens == 3


async def test_an_answer_that_the_model_ends_has_the_finish_reason_stop(specimen: Specimen) -> None:
    needs(specimen)
    answer = await collect(specimen.backend, specimen.work(QUESTIONS[1], max_tokens=400))
    assert answer.completion.finish_reason is FinishReason.STOP
    assert answer.tokens == answer.completion.usage.output_tokens < 400


async def test_a_stop_string_ends_the_answer_before_it(specimen: Specimen, reference: dict[str, str]) -> None:
    needs(specimen, Feature.STOP)
    whole = reference[QUESTIONS[0]]
    word = whole.split()[3]
    answer = await collect(specimen.backend, specimen.work(QUESTIONS[0], max_tokens=24, stop=(word,)))
    assert answer.text == whole[: whole.index(word)]
    assert answer.completion.finish_reason is FinishReason.STOP
    assert answer.tokens == answer.completion.usage.output_tokens
    await specimen.wait_idle()


async def test_a_seed_repeats_an_answer_and_another_one_does_not(specimen: Specimen) -> None:
    needs(specimen, Feature.SEED)

    works = [
        specimen.work(LONG_QUESTION, temperature=1.0, seed=seed, max_tokens=12) for seed in (7, 7, 0, 1, 2, 3)
    ]
    once, again, *others = [answer.text for answer in await collect_all(specimen.backend, works)]
    assert once == again
    assert len(set(others)) > 1


async def test_n_texts_are_told_apart_by_their_index(specimen: Specimen, reference: dict[str, str]) -> None:
    needs(specimen, Feature.N)
    work = specimen.work(QUESTIONS[0], n=3, max_tokens=24)
    answer = await collect(specimen.backend, work)
    assert [answer.of(index) for index in range(3)] == [reference[QUESTIONS[0]]] * 3
    assert len(answer.completion.others) == 2
    assert answer.tokens == answer.completion.usage.output_tokens
    assert answer.completion.usage.input_tokens == len(work.token_ids)
    await specimen.wait_idle()


async def test_n_texts_with_a_seed_differ_from_each_other(specimen: Specimen) -> None:
    needs(specimen, Feature.N)
    answer = await collect(
        specimen.backend, specimen.work(LONG_QUESTION, n=4, temperature=1.0, max_tokens=8, seed=3)
    )
    assert len({answer.of(index) for index in range(4)}) > 1


@pytest.mark.parametrize("raw", [False, True], ids=["chat", "raw"])
@pytest.mark.parametrize("count", [0, 2])
async def test_logprobs_have_an_entry_a_token_and_the_likely_ones_in_order(
    specimen: Specimen, count: int, raw: bool
) -> None:
    needs(specimen, Feature.LOGPROBS)
    work = specimen.work("Tell me about Berserk", raw=raw, max_tokens=5, logprobs=count)
    answer = await collect(specimen.backend, work)
    entries = answer.logprobs()
    assert len(entries) == answer.tokens == 5
    assert b"".join(entry.data for entry in entries).decode() == answer.text
    for entry in entries:
        assert entry.logprob <= 0
        assert len(entry.top) == count
        if count:
            assert entry.top[0].data == entry.data, "greedy takes the likeliest"
            assert entry.top[0].logprob >= entry.top[1].logprob
            assert entry.top[0].logprob == pytest.approx(entry.logprob, abs=1e-3)


async def test_the_bytes_of_a_character_spread_over_tokens_are_told_apart(specimen: Specimen) -> None:
    needs(specimen, Feature.LOGPROBS)
    spread = "髙"  # no vocabulary has it as one token
    first, *_ = ids = specimen.tokenizer.encode(spread, add_special_tokens=False)
    assert len(ids) > 1
    work = specimen.work("Hello", max_tokens=2, logprobs=1, logit_bias={first: 100.0})
    answer = await collect(specimen.backend, work)
    assert [entry.data for entry in answer.logprobs()] == [specimen.tokenizer.token_bytes(first)] * 2


async def test_logit_bias_forces_and_forbids_a_token(specimen: Specimen) -> None:
    needs(specimen, Feature.LOGIT_BIAS)
    [token] = specimen.tokenizer.encode(" the")[-1:]
    forced = await collect(
        specimen.backend, specimen.work(QUESTIONS[0], max_tokens=3, logit_bias={token: 100.0})
    )
    assert forced.text.strip() == "the the the"
    plain = await collect(specimen.backend, specimen.work(QUESTIONS[0], max_tokens=1))
    first = specimen.tokenizer.encode(plain.text)[-1]
    barred = await collect(
        specimen.backend, specimen.work(QUESTIONS[0], max_tokens=1, logit_bias={first: -100.0})
    )
    assert barred.text != plain.text


async def test_each_penalty_changes_an_answer_as_its_formula_says(
    specimen: Specimen, penalized: dict[str, str]
) -> None:
    features = declared(specimen, *PENALTIES)
    # The end token is forbidden: the model would end before it repeats itself.
    asked = {"max_tokens": PENALIZED_TOKENS, "logit_bias": {END_TOKEN: -100.0}}
    works = [
        specimen.work(LONG_QUESTION, **asked, **{feature.value: PENALTIES[feature]}) for feature in features
    ]
    answers = await collect_all(specimen.backend, works)
    assert [answer.text for answer in answers] == [penalized[feature] for feature in features]
    assert penalized["none"] not in [answer.text for answer in answers]


async def test_the_narrowest_choice_of_tokens_is_the_greedy_one(
    specimen: Specimen, reference: dict[str, str]
) -> None:
    narrowest = {Feature.TOP_K: 1, Feature.TOP_P: 0.0001, Feature.MIN_P: 1.0}
    works = [
        specimen.work(QUESTIONS[0], temperature=1.5, max_tokens=24, **{feature.value: narrowest[feature]})
        for feature in declared(specimen, *narrowest)
    ]
    answers = await collect_all(specimen.backend, works)
    assert [answer.text for answer in answers] == [reference[QUESTIONS[0]]] * len(works)


@pytest.mark.parametrize(
    ("feature", "asked", "reason", "least"),
    [
        (Feature.LOGIT_BIAS, {}, FinishReason.STOP, 0),
        (Feature.IGNORE_EOS, {"ignore_eos": True}, FinishReason.LENGTH, 12),
        (Feature.MIN_TOKENS, {"min_tokens": 5}, FinishReason.STOP, 5),
    ],
)
async def test_the_models_end_ends_an_answer_unless_it_is_ignored_or_comes_too_early(
    specimen: Specimen, feature: Feature, asked: dict[str, object], reason: FinishReason, least: int
) -> None:
    needs(specimen, Feature.LOGIT_BIAS)
    needs(specimen, feature)
    work = specimen.work(QUESTIONS[0], max_tokens=12, logit_bias={END_TOKEN: 100.0}, **asked)
    answer = await collect(specimen.backend, work)
    assert answer.completion.finish_reason is reason
    assert least <= answer.completion.usage.output_tokens <= least + 1  # some count the end token, too


async def test_a_stop_token_ends_an_answer(specimen: Specimen, reference: dict[str, str]) -> None:
    needs(specimen, Feature.STOP_TOKEN_IDS)
    ids = specimen.tokenizer.encode(reference[QUESTIONS[0]], add_special_tokens=False)
    place = next(n for n, token in enumerate(ids) if n > 1 and token not in ids[:n])
    work = specimen.work(QUESTIONS[0], max_tokens=24, stop_token_ids=(ids[place],))
    answer = await collect(specimen.backend, work)
    assert answer.completion.finish_reason is FinishReason.STOP
    assert answer.text == specimen.tokenizer.decode(ids[:place])


SCHEMA = {
    "type": "object",
    "properties": {"answer": {"enum": ["yes", "no"]}},
    "required": ["answer"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        (FormatType.CHOICE, json.dumps(["yes", "no"])),
        (FormatType.REGEX, "[0-9]{3}-[0-9]{2}"),
        (FormatType.JSON_SCHEMA, json.dumps(SCHEMA)),
        (FormatType.GRAMMAR, 'start: "yes" | "no"'),
    ],
)
async def test_a_shaped_answer_has_its_shape(specimen: Specimen, kind: FormatType, spec: str) -> None:
    needs(specimen, Feature.RESPONSE_FORMAT)
    work = specimen.work("Is it in stock?", max_tokens=64, response_format=shaped(kind, spec))
    answer = await collect(specimen.backend, work)
    text = answer.text
    if answer.completion.finish_reason is FinishReason.LENGTH:
        # Some grammars allow any amount of white space in JSON; this model writes a lot.
        assert kind is FormatType.JSON_SCHEMA and text.split() in (["{"], ["{", '"answer"'])
    elif kind is FormatType.JSON_SCHEMA:
        assert json.loads(text)["answer"] in ("yes", "no")
    elif kind is FormatType.REGEX:
        assert re.fullmatch(spec, text)
    else:
        assert text in ("yes", "no")


async def test_an_answer_in_json_object_format_begins_as_an_object(specimen: Specimen) -> None:
    needs(specimen, Feature.RESPONSE_FORMAT)
    work = specimen.work("As JSON please", max_tokens=8, response_format=shaped(FormatType.JSON_OBJECT))
    assert (await collect(specimen.backend, work)).text.lstrip().startswith("{")


async def test_an_impossible_shape_is_bad_input(specimen: Specimen) -> None:
    needs(specimen, Feature.RESPONSE_FORMAT)
    work = specimen.work("Hello", response_format=shaped(FormatType.REGEX, "(unclosed"))
    with pytest.raises(BackendFailure) as caught:
        await collect(specimen.backend, work)
    assert caught.value.kind is FailureKind.INVALID_INPUT
    await specimen.wait_idle()


async def test_adapters_answer_in_their_own_ways(specimen: Specimen) -> None:
    if not specimen.adapters:
        assert not specimen.computes or Feature.LORA not in specimen.backend.features
        return
    needs(specimen, Feature.LORA)
    texts = {}
    # One after the other: vLLM 0.33 on the CPU lets a concurrent adapter change the base model's answer.
    for adapter in (None, *specimen.adapters.values()):
        answer = await collect(specimen.backend, specimen.work(LONG_QUESTION, adapter=adapter, max_tokens=6))
        texts[adapter.adapter_id if adapter else ""] = answer.text
        assert answer.tokens == answer.completion.usage.output_tokens
    assert len(set(texts.values())) == 3
    again = specimen.work(LONG_QUESTION, adapter=specimen.adapters["conform_a"], max_tokens=6)
    assert (await collect(specimen.backend, again)).text == texts["conform_a"]
    await specimen.wait_idle()


async def test_an_adapter_that_is_not_there_is_a_model_not_found(specimen: Specimen) -> None:
    needs(specimen, Feature.LORA)
    ghost = Adapter("ghost", 99, "demo", "/nowhere/ghost")
    with pytest.raises(BackendFailure) as caught:
        await collect(specimen.backend, specimen.work("Hello", adapter=ghost))
    assert caught.value.kind is FailureKind.MODEL_NOT_FOUND
    await specimen.wait_idle()


def long_text(specimen: Specimen, blocks: int, word: str) -> str:
    """Return a text of at least ``blocks`` cache blocks of tokens."""
    text = word
    while len(specimen.encode(text)) < blocks * specimen.block_size:
        text += " " + word
    return text


async def test_a_repeated_prompt_is_found_in_the_cache_and_a_tenant_finds_only_its_own(
    specimen: Specimen,
) -> None:
    needs(specimen)
    if not specimen.counts_cached:
        pytest.skip("it does not count cached tokens")
    text, run = long_text(specimen, 5, "volume"), uuid.uuid4().hex

    async def cached(tenant: str) -> int:
        answer = await collect(specimen.backend, specimen.work(text, max_tokens=2, cache_salt=tenant + run))
        return answer.completion.usage.cached_tokens

    assert await cached("acme") == 0
    assert await cached("acme") >= 4 * specimen.block_size
    assert await cached("umbra") == 0
    assert await cached("umbra") > 0


async def test_an_adapter_does_not_find_the_base_models_cache(specimen: Specimen) -> None:
    needs(specimen, Feature.LORA)
    if not specimen.counts_cached or not specimen.adapters:
        pytest.skip("it does not count cached tokens, or has no adapters")
    text = long_text(specimen, 5, "chapter")
    base = specimen.work(text, max_tokens=2, cache_salt=uuid.uuid4().hex)
    await collect(specimen.backend, base)
    styled = replace(base, adapter=specimen.adapters["conform_a"])
    assert (await collect(specimen.backend, styled)).completion.usage.cached_tokens == 0


async def test_a_prompt_longer_than_the_model_takes_is_refused_and_leaves_nothing(specimen: Specimen) -> None:
    needs(specimen)
    text = "volume " * (specimen.max_model_len + 50)
    with pytest.raises(BackendFailure) as caught:
        await collect(specimen.backend, specimen.work(text))
    assert caught.value.kind in (FailureKind.TOKEN_LIMIT_EXCEEDED, FailureKind.INVALID_INPUT)
    await specimen.wait_idle()


async def test_every_priority_is_taken(specimen: Specimen) -> None:
    for priority in (-1, 1) if specimen.priority else ():
        assert (
            await collect(specimen.backend, specimen.work("Hello", priority=priority, max_tokens=2))
        ).deltas


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("after", [0, 1, 3])
async def test_cancelling_at_any_stage_leaves_nothing_on_the_backend(
    specimen: Specimen, after: int, n: int
) -> None:
    if n > 1 and Feature.N not in specimen.backend.features:
        pytest.skip("it gives one text")
    seen: list[Delta] = []
    there = asyncio.Event()

    async def out(delta: Delta) -> None:
        seen.append(delta)
        if len(seen) >= after:
            there.set()

    work = specimen.work(LONG_QUESTION, max_tokens=400, n=n, logit_bias={END_TOKEN: -100.0})
    async with asyncio.TaskGroup() as group:
        call = group.create_task(specimen.backend.generate(work, out))
        if after:
            waiting = group.create_task(there.wait())
            await asyncio.wait({call, waiting}, return_when=asyncio.FIRST_COMPLETED)
            there.set()
        else:
            await asyncio.sleep(0.01)
        call.cancel()
    at_end = len(seen)
    await specimen.wait_idle()
    assert len(seen) == at_end, "no delta after the end"
    assert (await collect(specimen.backend, specimen.work("Hello", max_tokens=2))).deltas


async def test_many_cancelled_at_once_leave_nothing(specimen: Specimen) -> None:
    async def ignore(delta: Delta) -> None:
        return

    async with asyncio.TaskGroup() as group:
        calls = [
            group.create_task(
                specimen.backend.generate(specimen.work(f"{LONG_QUESTION} {number}", max_tokens=200), ignore)
            )
            for number in range(12)
        ]
        await asyncio.sleep(0.3)
        for call in calls:
            call.cancel()
    await specimen.wait_idle()


async def test_a_sink_that_fails_ends_the_generation(specimen: Specimen) -> None:
    class Gone(Exception):
        pass

    async def out(delta: Delta) -> None:
        raise Gone

    with pytest.raises(Gone):
        await specimen.backend.generate(specimen.work(LONG_QUESTION, max_tokens=300), out)
    await specimen.wait_idle()


async def test_the_load_is_reported_without_waiting_and_returns_to_zero(specimen: Specimen) -> None:
    needs(specimen)
    await collect(specimen.backend, specimen.work("Hello", max_tokens=1))
    async with asyncio.timeout(60):
        # No report was read while another specimen was tested, and a stale load counts as None: wait for a new one.
        while specimen.backend.load is None:  # noqa: ASYNC110 (it is told, not announced)
            await asyncio.sleep(0.05)
    async with asyncio.TaskGroup() as group:
        answers = [
            group.create_task(
                collect(
                    specimen.backend,
                    specimen.work(f"{LONG_QUESTION} {number}", max_tokens=60, logit_bias={END_TOKEN: -100.0}),
                )
            )
            for number in range(4)
        ]
        busiest = 0
        while not busiest and not all(answer.done() for answer in answers):
            await asyncio.sleep(0.01)
            load = specimen.backend.load
            busiest = load.running + load.waiting if load else 0
    assert busiest >= 1
    await specimen.wait_idle()
    for _ in range(1200):
        load = specimen.backend.load
        if load is not None and load.running == load.waiting == 0:
            break
        await asyncio.sleep(0.05)
    assert load is not None and load.running == load.waiting == 0
    if specimen.reports_blocks:
        assert load.total_blocks > 0 and load.block_size == specimen.block_size
    assert 0 <= load.kv_usage <= 1
