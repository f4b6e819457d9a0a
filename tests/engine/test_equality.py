"""The engine's greedy tokens in float32 are those of transformers, however the work is split into steps."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from engine.engine import Engine
from engine.values import GenerationRequest, SamplingParams
from tests.engine.support import greedy, random_prompts, reference_greedy, run_prompts, run_to_end

MAX_TOKENS = 24
SHORTER = random_prompts(49, 512, longest=100)
PROMPTS = (*SHORTER[:10], tuple(range(3, 203)), *SHORTER[10:])
# Every tenth prompt is used where a test takes hundreds of steps, most of them alike.
EVERY_TENTH = 10


@cache
def reference(folder: Path) -> list[list[int]]:
    return reference_greedy(folder, PROMPTS, MAX_TOKENS)


def test_each_prompt_alone_gives_the_tokens_of_transformers(
    model_folder: Path, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine(model_folder)
    alone = [run_prompts(engine, [prompt], greedy(MAX_TOKENS))[0] for prompt in PROMPTS[::EVERY_TENTH]]
    assert alone == reference(model_folder)[::EVERY_TENTH]


def test_50_prompts_in_batches_of_32_give_the_tokens_of_transformers(
    model_folder: Path, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine(model_folder, max_num_seqs=32)
    assert run_prompts(engine, PROMPTS, greedy(MAX_TOKENS)) == reference(model_folder)


@pytest.mark.parametrize("budget", [1, 7, 64, 333])
def test_prompts_prefilled_in_chunks_give_the_tokens_of_transformers(
    model_folder: Path, make_engine: Callable[..., Engine], budget: int
) -> None:
    engine = make_engine(model_folder, max_num_batched_tokens=budget, max_num_seqs=16)
    count = {1: 2, 7: 6}.get(budget, 16)
    assert run_prompts(engine, PROMPTS[:count], greedy(MAX_TOKENS)) == reference(model_folder)[:count]


def test_preempted_sequences_give_the_tokens_of_transformers(
    model_folder: Path, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine(model_folder, num_blocks=33, max_num_batched_tokens=128)
    # The engine generates past the end token, so that the pool stays full; transformers stops there.
    tokens = run_prompts(engine, PROMPTS, greedy(MAX_TOKENS, ignore_eos=True))
    expected = reference(model_folder)
    assert [mine[: len(theirs)] for mine, theirs in zip(tokens, expected, strict=True)] == expected
    assert engine.signals.preemptions > 5


def test_requests_that_arrive_while_others_decode_give_the_tokens_of_transformers(
    model_folder: Path, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine(model_folder, max_num_batched_tokens=100)
    tokens: dict[str, list[int]] = {}
    waiting = [GenerationRequest(str(n), prompt, greedy(MAX_TOKENS)) for n, prompt in enumerate(PROMPTS[:20])]
    while waiting or engine.has_work:
        if waiting:
            tokens[waiting[0].request_id] = []
            engine.add(waiting.pop(0))
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
    assert list(tokens.values()) == reference(model_folder)[:20]


def test_a_seeded_request_gives_the_same_tokens_alone_in_a_batch_and_after_preemption(
    model_folder: Path, make_engine: Callable[..., Engine]
) -> None:
    def requests() -> list[GenerationRequest]:
        return [
            GenerationRequest(
                str(n),
                prompt,
                SamplingParams(
                    MAX_TOKENS, temperature=0.9, top_p=0.95, top_k=40 * (n % 2), seed=n, ignore_eos=True
                ),
            )
            for n, prompt in enumerate(PROMPTS[:16])
        ]

    roomy, tight = make_engine(model_folder), make_engine(model_folder, num_blocks=33)
    alone = {one.request_id: run_to_end(roomy, [one])[one.request_id].token_ids for one in requests()[::5]}
    batched = {name: answer.token_ids for name, answer in run_to_end(roomy, requests()).items()}
    preempted = {name: answer.token_ids for name, answer in run_to_end(tight, requests()[::-1]).items()}
    assert tight.signals.preemptions > 0
    assert {name: batched[name] for name in alone} == alone
    assert preempted == batched


def test_bfloat16_runs_and_mostly_agrees_with_float32(
    model_folder: Path, make_engine: Callable[..., Engine]
) -> None:
    exact = reference(model_folder)[:16]
    rounded = run_prompts(make_engine(model_folder, dtype="bfloat16"), PROMPTS[:16], greedy(4))
    first_tokens_equal = sum(a[0] == b[0] for a, b in zip(exact, rounded, strict=True))
    assert first_tokens_equal >= 12
