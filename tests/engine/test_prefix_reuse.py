"""The engine with prefix caching gives the tokens of transformers and computes no cached prefix again."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from engine.engine import Engine
from engine.values import GenerationRequest, SequenceEnd
from tests.engine.support import (
    greedy,
    random_prompts,
    reference_greedy,
    run_prompts,
    run_to_end,
    write_tiny_model,
)

MakeEngine = Callable[..., Engine]
MAX_TOKENS = 10


def sharing_prompts() -> list[tuple[int, ...]]:
    """Returns prompts that share nothing, a part of a block, some blocks or everything."""
    beginnings = [tuple([10 + at, *random_prompts(1, 512, longest=1, seed=at)[0]] * 40) for at in range(3)]
    ends = random_prompts(6, 512, longest=40, seed=3)
    prompts = [
        beginning[:length] + end
        for beginning in beginnings
        for length, end in zip((80, 80, 64, 48, 33, 7), ends, strict=True)
    ]
    return [
        *prompts,
        *(beginning[:64] for beginning in beginnings),
        *(beginning[:65] for beginning in beginnings),
    ]


PROMPTS = tuple(sharing_prompts())


@cache
def reference(folder: Path) -> list[list[int]]:
    return reference_greedy(folder, PROMPTS, MAX_TOKENS)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("budget", [7, 64, 1024])
def test_prompts_that_share_prefixes_give_the_tokens_of_transformers_cold_and_warm(
    model_folder: Path, make_engine: MakeEngine, budget: int, caching: bool
) -> None:
    engine = make_engine(model_folder, max_num_batched_tokens=budget, enable_prefix_caching=caching)
    every = 4 if budget == 7 else 1  # hundreds of steps, most of them alike
    for _ in range(2 if caching else 1):  # without a cache the second run equals the first
        tokens = run_prompts(engine, PROMPTS[::every], greedy(MAX_TOKENS))
        assert tokens == reference(model_folder)[::every]
    signals = engine.signals
    share = signals.prefix_hits / max(1, signals.prefix_queries)
    assert (0.5 < share < 1.0) if caching else signals.prefix_queries == signals.prefix_hits == 0


@pytest.mark.parametrize("caching", [True, False])
def test_after_preemptions_and_evictions_the_tokens_are_those_of_transformers(
    model_folder: Path, make_engine: MakeEngine, caching: bool
) -> None:
    engine = make_engine(
        model_folder, num_blocks=12, max_num_batched_tokens=50, enable_prefix_caching=caching
    )
    expected = reference(model_folder)
    for _ in range(2 if caching else 1):  # without a cache the second run equals the first
        # The engine generates past the end token, so that the pool stays full; transformers stops there.
        tokens = run_prompts(engine, PROMPTS, greedy(MAX_TOKENS, ignore_eos=True))
        assert [mine[: len(theirs)] for mine, theirs in zip(tokens, expected, strict=True)] == expected
    assert engine.signals.preemptions > 3


def test_the_next_turn_of_a_conversation_finds_prompt_and_answer(make_engine: MakeEngine) -> None:
    engine = make_engine()
    history: tuple[int, ...] = PROMPTS[0]
    for turn in range(4):
        request = GenerationRequest(str(turn), history, greedy(21, ignore_eos=True))
        answer = run_to_end(engine, [request])[str(turn)]
        assert answer.last is not None
        computed = 0 if turn == 0 else len(history) - 5 - 1  # without 5 new tokens and the last output token
        assert answer.last.cached_tokens == computed // 16 * 16
        history += (*answer.token_ids, 30, 31, 32, 33, 34)


def test_cached_tokens_are_reported_from_the_first_output_on(make_engine: MakeEngine) -> None:
    engine = make_engine()
    run_prompts(engine, [PROMPTS[0]], greedy(2))
    engine.add(GenerationRequest("again", PROMPTS[0], greedy(2, ignore_eos=True)))
    outputs = [engine.step()[0], engine.step()[0]]
    assert {output.cached_tokens for output in outputs} == {(len(PROMPTS[0]) - 1) // 16 * 16}
    assert engine.signals.tokens_scheduled == 1


@pytest.mark.parametrize("caching", [True, False])
def test_a_nan_spares_requests_that_share_the_prefix_and_is_never_found_in_the_cache(
    make_engine: MakeEngine, tmp_path: Path, caching: bool
) -> None:
    common = tuple(range(100, 164))
    good = [(*common, 200 + number) for number in range(4)]
    expected = run_prompts(make_engine(), good, greedy(40, ignore_eos=True))
    poison = min(set(range(3, 100)).difference(*expected))
    folder = write_tiny_model(tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][poison, 3] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    engine = make_engine(folder, max_num_batched_tokens=96, enable_prefix_caching=caching)
    for number, prompt in enumerate(good):
        engine.add(GenerationRequest(str(number), prompt, greedy(40, ignore_eos=True)))
    tokens: dict[str, list[int]] = {str(number): [] for number in range(4)}
    errors = 0
    for step in range(200):
        if step in (4, 8, 12):
            engine.add(
                GenerationRequest(f"bad {step}", (*common, *[300] * 20, poison, *[300] * 30), greedy(4))
            )
        for output in engine.step():
            if output.finish_reason is SequenceEnd.ERROR:
                assert output.error == "nan_output"
                errors += 1
            else:
                tokens[output.request_id] += output.token_ids
        engine.check_integrity()
    assert list(tokens.values()) == expected
    assert errors == 3
    assert engine.signals.kv_usage == 0


def test_prompts_of_two_salts_are_each_computed(make_engine: MakeEngine) -> None:
    engine = make_engine()
    requests = [
        GenerationRequest(salt, PROMPTS[0], greedy(4), cache_salt=salt) for salt in ("acme", "globex")
    ]
    for request in (*requests, *requests):
        run_to_end(engine, [request])
    usable = (len(PROMPTS[0]) - 1) // 16 * 16
    assert engine.signals.prefix_hits == 2 * usable
