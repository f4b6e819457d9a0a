"""The engine in this process: ends, stops, aborts, refusals, faults and signals."""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from engine.attention import group_by_shape
from engine.block_pool import BlockPool
from engine.engine import Engine
from engine.lora import AdapterBank, LoraWeights
from engine.runner import OutOfMemory, StepResult
from engine.scheduler import Chunk, Scheduler
from engine.structured import Grammars
from engine.values import GenerationRequest, SamplingParams, SequenceEnd
from tests.engine.support import (
    EOS,
    greedy,
    make_info,
    make_tokenizer,
    random_prompts,
    run_prompts,
    run_to_end,
    write_tiny_model,
)

MakeEngine = Callable[..., Engine]
PROMPT = (10, 20, 30, 40, 50)


class ScriptedRunner:
    """Gives every sequence the tokens of ``script``; a step above ``max_tokens_per_step`` has no memory."""

    def __init__(self, script: Sequence[int], *, max_tokens_per_step: int = 10_000) -> None:
        self.script = script
        self.max_tokens_per_step = max_tokens_per_step
        self.failures = 0

    def run(self, chunks: Sequence[Chunk]) -> StepResult:
        if sum(chunk.length for chunk in chunks) > self.max_tokens_per_step:
            self.failures += 1
            raise OutOfMemory("no memory")
        tokens = [self.script[chunk.sequence.num_output] if chunk.is_last else None for chunk in chunks]
        return StepResult(tokens, frozenset())


def scripted_engine(runner: ScriptedRunner, *, tokenizer: Tokenizer | None = None, **info: object) -> Engine:
    facts = make_info(**info)
    pool = BlockPool(facts.total_blocks, facts.block_size)
    return Engine(
        info=facts,
        pool=pool,
        scheduler=Scheduler(pool, max_num_seqs=16, max_num_batched_tokens=256),
        runner=runner,
        tokenizer=tokenizer or make_tokenizer(),
        grammars=Grammars(make_tokenizer(), 512, (EOS,)),
        clock=lambda: 0.0,
        seeds=random.Random(0),
        adapters=AdapterBank(0, lambda folder: LoraWeights(())),
    )


def say(
    text: str, sampling: SamplingParams, *, end: Sequence[int] = (1,)
) -> tuple[str, list[str], object, object]:
    """Returns text, deltas, finish and stop reasons for a model that generates ``text`` and then ends."""
    tokenizer = make_tokenizer()
    engine = scripted_engine(ScriptedRunner([*tokenizer.encode(text).ids, *end]), tokenizer=tokenizer)
    answer = run_to_end(engine, [GenerationRequest("a", PROMPT, sampling)])["a"]
    assert answer.last is not None
    return answer.text, answer.deltas, answer.finish_reason, answer.last.stop_reason


def test_the_end_token_stops_without_text_and_is_among_the_ids(make_engine: MakeEngine) -> None:
    engine = scripted_engine(ScriptedRunner([300, 301, 1, 302]))
    answer = run_to_end(engine, [GenerationRequest("a", PROMPT, greedy(10))])["a"]
    assert answer.token_ids == [300, 301, 1]
    assert answer.finish_reason is SequenceEnd.STOP
    assert answer.last is not None
    assert answer.last.stop_reason is None
    assert answer.last.output_tokens == 3


def test_generation_continues_after_the_end_token_with_ignore_eos() -> None:
    engine = scripted_engine(ScriptedRunner([300, 1, 301, 302]))
    answer = run_to_end(engine, [GenerationRequest("a", PROMPT, greedy(4, ignore_eos=True))])["a"]
    assert answer.token_ids == [300, 1, 301, 302]
    assert answer.finish_reason is SequenceEnd.LENGTH


def test_a_stop_id_ends_and_is_named_as_the_reason() -> None:
    engine = scripted_engine(ScriptedRunner([300, 301, 302]))
    answer = run_to_end(engine, [GenerationRequest("a", PROMPT, greedy(10, stop_token_ids=(301,)))])["a"]
    assert answer.token_ids == [300, 301]
    assert answer.finish_reason is SequenceEnd.STOP
    assert answer.last is not None
    assert answer.last.stop_reason == 301


def test_a_stop_string_that_spans_tokens_is_cut_and_named_as_the_reason() -> None:
    text, deltas, reason, stop = say("free returns within two weeks.", greedy(64, stop=("rns wit",)))
    assert text == "free retu"
    assert (reason, stop) == (SequenceEnd.STOP, "rns wit")
    assert not any("r" in delta[-1:] for delta in deltas)


def test_text_held_back_for_a_stop_string_comes_with_the_end() -> None:
    text, _, reason, _ = say("come again\nUs", greedy(64, stop=("\nUser:",)))
    assert text == "come again\nUs"
    assert reason is SequenceEnd.STOP


def test_japanese_and_emoji_arrive_whole() -> None:
    said = "次の巻は😀来週です👩‍🚀。"
    text, deltas, _, _ = say(said, greedy(200))
    assert text == said
    assert not any("\ufffd" in delta for delta in deltas)


def test_max_tokens_and_the_models_length_end_with_length(make_engine: MakeEngine) -> None:
    engine = make_engine(max_model_len=64)
    answers = run_to_end(
        engine,
        [
            GenerationRequest("short", PROMPT, greedy(3, ignore_eos=True)),
            GenerationRequest("long", PROMPT * 12, greedy(1000, ignore_eos=True)),
        ],
    )
    assert len(answers["short"].token_ids) == 3
    assert len(answers["long"].token_ids) == 4
    assert {answer.finish_reason for answer in answers.values()} == {SequenceEnd.LENGTH}


def test_the_models_length_is_lowered_to_what_the_pool_holds(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=4)
    assert engine.info.max_model_len == 64
    answer = run_to_end(engine, [GenerationRequest("a", PROMPT, greedy(1000, ignore_eos=True))])["a"]
    assert len(answer.token_ids) == 64 - len(PROMPT)


def test_an_abort_frees_the_blocks_at_once_and_leaves_the_others(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompts = random_prompts(3, 512, longest=100)
    expected = run_prompts(engine, prompts[:2], greedy(20))
    for name, prompt in zip("abc", prompts, strict=True):
        engine.add(GenerationRequest(name, prompt, greedy(20)))
    tokens: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    for count in range(100):
        if count == 3:
            used = engine.signals.kv_usage
            assert engine.abort("c")
            assert engine.signals.kv_usage < used
            assert not engine.abort("c")
        if not engine.has_work:
            break
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
    assert [tokens["a"], tokens["b"]] == expected
    assert len(tokens["c"]) == 3
    assert engine.signals.kv_usage == 0


def test_an_abort_reaches_a_waiting_and_a_half_prefilled_request(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_batched_tokens=16, max_num_seqs=1)
    engine.add(GenerationRequest("half", PROMPT * 20, greedy(5)))
    engine.add(GenerationRequest("waiting", PROMPT, greedy(5)))
    engine.step()
    assert engine.abort("waiting")
    assert engine.abort("half")
    assert not engine.has_work
    assert engine.signals.kv_usage == 0
    engine.check_integrity()


POISON = 77


@pytest.fixture(scope="module")
def poisoned_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in which the embedding of one token is not a number."""
    folder = write_tiny_model(tmp_path_factory.mktemp("poisoned"))
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON, 3] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("budget", [16, 512])
def test_a_nan_ends_its_own_request_but_no_neighbour_and_no_later_owner_of_its_blocks(
    make_engine: MakeEngine, poisoned_model: Path, budget: int
) -> None:
    engine = make_engine(poisoned_model, num_blocks=40, max_num_batched_tokens=budget)
    prompts = [prompt for prompt in random_prompts(12, 512, longest=60) if POISON not in prompt]
    expected = run_prompts(make_engine(), prompts, greedy(12))
    poisoned = GenerationRequest("bad", (10,) * 30 + (POISON,) + (11,) * 30, greedy(12))
    for _ in range(2):
        answers = run_to_end(
            engine, [poisoned, *[GenerationRequest(str(n), p, greedy(12)) for n, p in enumerate(prompts)]]
        )
        bad = answers.pop("bad")
        assert bad.finish_reason is SequenceEnd.ERROR
        assert bad.last is not None
        assert bad.last.error == "nan_output"
        assert bad.token_ids == []
        assert [answer.token_ids for answer in answers.values()] == expected


def test_an_infinite_logit_ends_its_request_alone(
    make_engine: MakeEngine, tmp_path: Path, tiny_model: Path
) -> None:
    folder = write_tiny_model(tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][5, 0] = float("inf")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    answer = run_to_end(make_engine(folder), [GenerationRequest("a", PROMPT, greedy(4))])["a"]
    assert answer.last is not None
    assert (answer.finish_reason, answer.last.error) == (SequenceEnd.ERROR, "nan_output")


def test_a_step_that_runs_out_of_memory_preempts_newer_sequences_and_all_finish() -> None:
    runner = ScriptedRunner([300, 301, 302, 1], max_tokens_per_step=20)
    engine = scripted_engine(runner)
    answers = run_to_end(engine, [GenerationRequest(str(n), PROMPT * 2, greedy(10)) for n in range(8)])
    assert runner.failures > 0
    assert engine.signals.preemptions > 0
    assert all(answer.token_ids == [300, 301, 302, 1] for answer in answers.values())


def test_a_request_too_large_for_memory_by_itself_ends_with_an_error_and_the_others_go_on() -> None:
    engine = scripted_engine(ScriptedRunner([300, 1], max_tokens_per_step=20))
    answers = run_to_end(
        engine,
        [GenerationRequest("big", PROMPT * 6, greedy(5)), GenerationRequest("small", PROMPT, greedy(5))],
    )
    assert answers["big"].last is not None
    assert (answers["big"].finish_reason, answers["big"].last.error) == (SequenceEnd.ERROR, "out_of_memory")
    assert answers["small"].token_ids == [300, 1]


def test_signals_report_running_and_waiting_requests_and_the_use_of_blocks(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=2, num_blocks=100)
    for number, name in enumerate("abc"):
        engine.add(
            GenerationRequest(name, (100 + number, *PROMPT * 6, 7, 8, 9, 10), greedy(3, ignore_eos=True))
        )
    assert engine.signals.waiting == 3
    engine.step()
    signals = engine.signals
    assert (signals.running, signals.waiting, signals.steps) == (2, 1, 1)
    assert (signals.total_blocks, signals.block_size) == (100, 16)
    assert signals.kv_usage == pytest.approx(0.06)
    assert signals.tokens_scheduled == 70


def test_times_and_counts_come_with_the_first_token_and_the_last(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(GenerationRequest("a", PROMPT, greedy(3, ignore_eos=True)))
    first, middle, last = (engine.step()[0] for _ in range(3))
    assert first.queue_wait_s is not None
    assert first.queue_wait_s >= 0
    assert middle.queue_wait_s is None
    assert last.queue_wait_s == first.queue_wait_s
    assert [one.output_tokens for one in (first, middle, last)] == [1, 2, 3]
    assert {one.prompt_tokens for one in (first, middle, last)} == {5}


def test_without_a_seed_two_requests_differ_and_the_engines_seed_repeats_them(
    make_engine: MakeEngine,
) -> None:
    def tokens() -> list[list[int]]:
        return run_prompts(make_engine(seed=11), [PROMPT, PROMPT], SamplingParams(12, ignore_eos=True))

    first = tokens()
    assert first[0] != first[1]
    assert tokens() == first


def test_the_end_tokens_of_the_generation_config_are_used(make_engine: MakeEngine, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 9]}))
    assert make_engine(folder).info.eos_token_ids == (1, 9)


def test_prompts_of_very_different_length_are_padded_apart() -> None:
    contexts = [4000, *[20] * 31]
    groups = group_by_shape([1] * 32, contexts)
    assert sorted(len(group) for group in groups) == [1, 31]
    assert group_by_shape([1] * 32, [20] * 32) == [list(range(32))]
    assert sorted(one for group in groups for one in group) == list(range(32))


def test_the_forward_pass_of_a_mixed_step_is_one_call_of_the_model(make_engine: MakeEngine) -> None:
    """A step of half-prefilled, new and decoding sequences runs as many products as one of two sequences."""

    def products(requests: int) -> int:
        engine = make_engine(max_num_batched_tokens=200)
        for number in range(requests):
            engine.add(GenerationRequest(str(number), PROMPT * (1 + number % 9), greedy(50, ignore_eos=True)))
        engine.step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            engine.step()
        names = [event.name for event in profile.events()]
        return sum(name in ("mkldnn::_linear_pointwise", "aten::linear") for name in names)

    assert products(16) == products(2)
