"""The engine's load and counters between its steps."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from gateway.backends.vllm.compat.signals import SignalBoard
from gateway.backends.vllm.values import EngineShape
from observability.engine_metrics import engine_families
from observability.metrics import Metrics
from observability.scrape import ScrapeCollector

SHAPE = EngineShape(max_model_len=4096, block_size=32, total_blocks=100, max_num_seqs=8, max_loras=2)


def report_step(
    board: SignalBoard,
    running: int,
    waiting: int,
    kv_usage: float,
    running_loras: Sequence[str] = (),
    waiting_loras: Sequence[str] = (),
    *,
    queries: int = 10,
) -> None:
    """A report as vLLM's scheduler makes it; some of the waiting requests were skipped in its step."""
    stats = SimpleNamespace(
        num_running_reqs=running,
        num_waiting_reqs=waiting - waiting // 2,
        num_skipped_waiting_reqs=waiting // 2,
        kv_cache_usage=kv_usage,
        prefix_cache_stats=SimpleNamespace(queries=queries, hits=4),
        running_lora_adapters=dict.fromkeys(running_loras, 1),
        waiting_lora_adapters=dict.fromkeys(waiting_loras, 1),
    )
    board.scheduled(stats, 0)


def report_tokens(board: SignalBoard, *, preemptions: int, first_token_s: float) -> None:
    ended = SimpleNamespace(queued_time=0.1, prefill_time=0.2)
    stats = SimpleNamespace(
        num_preempted_reqs=preemptions,
        num_prompt_tokens=5,
        num_generation_tokens=2,
        time_to_first_tokens_iter=[first_token_s],
        finished_requests=[ended],
    )
    board.generated(stats)


def test_the_load_is_what_the_engine_reported_last() -> None:
    board = SignalBoard()
    with board.sequences(5):
        report_step(board, 2, 3, 0.5)
        load = board.load(SHAPE)
    assert (load.running, load.waiting, load.kv_usage) == (2, 3, 0.5)
    assert (load.total_blocks, load.block_size, load.max_running) == (100, 32, 8)


def test_the_load_of_data_parallel_engines_has_the_places_and_blocks_of_all() -> None:
    load = SignalBoard().load(replace(SHAPE, engines=2))
    assert (load.total_blocks, load.max_running, load.workers) == (200, 16, 2)


def test_after_the_last_abort_the_load_is_zero_without_another_step() -> None:
    board = SignalBoard()
    with board.sequences(4):
        report_step(board, 4, 0, 0.7)
    load = board.load(SHAPE)
    assert (load.running, load.waiting, load.kv_usage) == (0, 0, 0.0)


@given(
    steps=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.floats(0, 1))),
    held=st.lists(st.integers(1, 8), max_size=6),
)
def test_the_load_never_exceeds_the_sequences_in_flight(
    steps: list[tuple[int, int, float]], held: list[int]
) -> None:
    board = SignalBoard()
    with ExitStack() as stack:
        for count in held:
            stack.enter_context(board.sequences(count))
        for running, waiting, kv_usage in steps:
            report_step(board, running, waiting, kv_usage)
            load = board.load(SHAPE)
            assert load.running + load.waiting <= sum(held) == board.in_flight
            assert load.running >= 0 <= load.waiting
            assert 0 <= load.kv_usage <= 1
    assert board.in_flight == 0


def test_counters_add_up_over_the_steps_and_start_anew_after_the_warm_up() -> None:
    board = SignalBoard()
    report_step(board, 1, 0, 0.1)
    report_tokens(board, preemptions=1, first_token_s=0.2)
    board.forget()
    for _ in range(3):
        report_step(board, 1, 0, 0.1)
        report_tokens(board, preemptions=1, first_token_s=0.03)
    figures = board.figures("base", SHAPE)
    assert (figures.prefix_queries, figures.prefix_hits, figures.preemptions) == (30, 12, 3)
    assert (figures.prompt_tokens, figures.generation_tokens) == (15, 6)
    assert [sum(kept.counts) for kept in figures.distributions] == [3, 3, 3]


def test_a_step_is_said_to_compute_no_more_of_a_long_prompt_than_a_step_holds() -> None:
    board = SignalBoard()
    board.step_tokens = 2048
    report_step(board, 1, 0, 0.1, queries=16_000)
    assert board.computed_tokens == 2048
    board.decoded(1)
    report_step(board, 1, 0, 0.1, queries=1_000)
    assert board.computed_tokens == 996, "the cached ones are not computed"


def scrape(board: SignalBoard) -> str:
    metrics = Metrics(version="0")
    metrics.registry.register(
        ScrapeCollector(engine_families, lambda: {"local": board.figures("base", SHAPE)})
    )
    return metrics.render().decode()


def test_a_scrape_shows_vllms_current_names() -> None:
    board = SignalBoard()
    with board.sequences(3):
        report_step(board, 2, 1, 0.25)
        report_tokens(board, preemptions=0, first_token_s=0.03)
        text = scrape(board)
    labels = '{engine="0",model_name="base"}'
    for line in (
        f"vllm:num_requests_running{labels} 2.0",
        f"vllm:num_requests_waiting{labels} 1.0",
        f"vllm:kv_cache_usage_perc{labels} 0.25",
        f"vllm:prefix_cache_queries_total{labels} 10.0",
        f"vllm:prefix_cache_hits_total{labels} 4.0",
        f"vllm:num_preemptions_total{labels} 0.0",
        f"vllm:prompt_tokens_total{labels} 5.0",
        f"vllm:generation_tokens_total{labels} 2.0",
        f"vllm:time_to_first_token_seconds_count{labels} 1.0",
        'vllm:time_to_first_token_seconds_bucket{engine="0",le="0.04",model_name="base"} 1.0',
        'vllm:time_to_first_token_seconds_bucket{engine="0",le="0.02",model_name="base"} 0.0',
        'vllm:cache_config_info{block_size="32",engine="0",model_name="base",num_gpu_blocks="100"} 1.0',
    ):
        assert line in text, line


def test_the_adapter_metric_appears_with_the_first_use_and_names_only_busy_adapters() -> None:
    board = SignalBoard()
    assert "lora_requests_info" not in scrape(board)
    with board.sequences(2):
        report_step(board, 1, 1, 0.1, running_loras=["a#1", "b#2"], waiting_loras=["c#3"])
        busy = scrape(board)
    expected = 'vllm:lora_requests_info{max_lora="2",running_lora_adapters="a,b",waiting_lora_adapters="c"} '
    assert expected in busy
    value = float(busy.split(expected)[1].split("\n")[0])
    assert value > 1.7e9, "seconds since 1970"
    assert 'running_lora_adapters="",waiting_lora_adapters=""' in scrape(board)
