"""Bias, penalties, grammars and log-probabilities in a real engine, alone and together."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.engine import Engine
from engine.values import GenerationRequest, GrammarKind, SamplingParams, SequenceEnd, StructuredOutput
from tests.engine.support import greedy, random_prompts, reference_greedy, run_prompts, run_to_end
from tests.engine.test_engine import POISON, poisoned_model

MakeEngine = Callable[..., Engine]
__all__ = ["poisoned_model"]  # the fixture
PROMPTS = random_prompts(24, 512, longest=80)
OPTIONS: tuple[dict[str, object], ...] = (
    {},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 3},
    {"min_p": 0.1, "presence_penalty": 1.5, "logprobs": 0},
    {"top_k": 20, "frequency_penalty": 0.8, "logit_bias": ((5, 8.0), (9, -100.0))},
    {"structured": StructuredOutput(GrammarKind.REGEX, "[a-z ]+"), "logprobs": 2},
    {"structured": StructuredOutput(GrammarKind.JSON_OBJECT), "top_p": 0.9, "repetition_penalty": 1.1},
)


def mixed(max_tokens: int = 24) -> list[GenerationRequest]:
    """Returns one request for each prompt, with each of the ``OPTIONS`` in turn."""
    return [
        GenerationRequest(
            str(n),
            prompt,
            SamplingParams(**{"max_tokens": max_tokens, "seed": n, **OPTIONS[n % len(OPTIONS)]}),  # type: ignore[arg-type]
        )
        for n, prompt in enumerate(PROMPTS)
    ]


def test_every_request_gives_the_same_alone_in_a_batch_and_after_preemption(make_engine: MakeEngine) -> None:
    roomy, tight = make_engine(), make_engine(num_blocks=20)
    alone = {one.request_id: run_to_end(roomy, [one])[one.request_id] for one in mixed()}
    batched, preempted = run_to_end(roomy, mixed()), run_to_end(tight, mixed()[::-1])
    assert tight.signals.preemptions > 0
    for name, expected in alone.items():
        for answer in (batched[name], preempted[name]):
            assert (answer.token_ids, answer.text) == (expected.token_ids, expected.text)
            assert [entry.token_id for entry in answer.logprobs] == [
                entry.token_id for entry in expected.logprobs
            ]
            assert [entry.logprob for entry in answer.logprobs] == pytest.approx(
                [entry.logprob for entry in expected.logprobs], abs=1e-3
            )


def test_requests_that_ask_for_logprobs_get_one_for_each_token_and_others_get_none(
    make_engine: MakeEngine,
) -> None:
    requests = mixed()
    answers = run_to_end(make_engine(), requests)
    for request in requests:
        answer, asked = answers[request.request_id], request.sampling.logprobs
        assert [entry.token_id for entry in answer.logprobs] == ([] if asked is None else answer.token_ids)
        assert all(len(entry.top) == asked for entry in answer.logprobs)


def test_logprobs_are_those_of_transformers(make_engine: MakeEngine, model_folder: Path) -> None:
    prompts = PROMPTS[:6]
    sampling = SamplingParams(
        12, temperature=0.8, seed=3, ignore_eos=True, logprobs=5, repetition_penalty=1.4, min_p=0.02
    )
    answers = run_to_end(
        make_engine(model_folder),
        [GenerationRequest(str(n), prompt, sampling) for n, prompt in enumerate(prompts)],
    )
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    for prompt, answer in zip(prompts, answers.values(), strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *answer.token_ids]])).logits[0]
        expected = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        for row, entry in zip(expected, answer.logprobs, strict=True):
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=2e-3)
            best = row.topk(5).values.tolist()
            assert [logprob for _, logprob in entry.top] == pytest.approx(best, abs=2e-3)
            assert [float(row[token]) for token, _ in entry.top] == pytest.approx(best, abs=2e-3)


def test_a_banned_token_never_comes_and_a_pushed_one_always(make_engine: MakeEngine) -> None:
    engine = make_engine()
    [usual] = run_prompts(engine, PROMPTS[:1], greedy(10, ignore_eos=True))
    banned = tuple((token, -100.0) for token in set(usual))
    [other] = run_prompts(engine, PROMPTS[:1], greedy(10, ignore_eos=True, logit_bias=banned))
    assert not set(usual) & set(other)
    [pushed] = run_prompts(engine, PROMPTS[:1], greedy(5, logit_bias=((300, 100.0),)))
    assert pushed == [300] * 5


def test_before_min_tokens_no_end_token_is_chosen_and_no_stop_string_is_matched(
    make_engine: MakeEngine,
) -> None:
    engine, ends = make_engine(), make_engine().info.eos_token_ids
    pushed = tuple((token, 50.0) for token in (*ends, 301))
    for stops, asked in (((), 5), ((301,), 5), ((), 1)):
        [tokens] = run_prompts(
            engine, PROMPTS[:1], greedy(20, logit_bias=pushed, min_tokens=asked, stop_token_ids=stops)
        )
        ending = {*ends, *stops}
        assert not ending & set(tokens[:asked])
        assert tokens[-1] in ending or not stops
    text = run_to_end(engine, [GenerationRequest("a", PROMPTS[0], greedy(12, ignore_eos=True))])["a"].text
    stop = (text[0],)
    for least, given in ((0, ""), (12, text)):
        sampling = greedy(12, ignore_eos=True, stop=stop, min_tokens=least)
        assert run_to_end(engine, [GenerationRequest("a", PROMPTS[0], sampling)])["a"].text == given


def test_the_repetition_penalty_is_that_of_transformers(make_engine: MakeEngine, model_folder: Path) -> None:
    prompts = PROMPTS[:8]
    expected = reference_greedy(model_folder, prompts, 24, repetition_penalty=1.3)
    assert run_prompts(make_engine(model_folder), prompts, greedy(24, repetition_penalty=1.3)) == expected
    assert expected != reference_greedy(model_folder, prompts, 24)


def test_a_nan_ends_its_own_request_whatever_it_and_its_neighbours_ask_for(
    make_engine: MakeEngine, poisoned_model: Path
) -> None:
    requests = [one for one in mixed(12) if POISON not in one.prompt_token_ids]
    expected = {one.request_id: run_to_end(make_engine(), [one])[one.request_id] for one in requests[:12]}
    bad = [
        GenerationRequest(f"bad-{n}", (10,) * 20 + (POISON,), SamplingParams(12, **options))  # type: ignore[arg-type]
        for n, options in enumerate(OPTIONS)
    ]
    answers = run_to_end(make_engine(poisoned_model), bad + requests[:12])
    for one in bad:
        failed = answers[one.request_id]
        assert failed.last is not None
        assert (failed.finish_reason, failed.last.error) == (SequenceEnd.ERROR, "nan_output")
        assert failed.token_ids == [] and failed.logprobs == []
    for name, answer in expected.items():
        if POISON not in answer.token_ids:
            assert answers[name].token_ids == answer.token_ids
