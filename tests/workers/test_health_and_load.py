"""A worker's health and load: its state of service, and how far an ageing scrape is trusted."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from admission.values import BackendLoad
from gateway.backends.workers.health import FIRST_WEIGHT, WorkerHealth, WorkerState
from gateway.backends.workers.load import DOUBTED_KV_USAGE, WorkerFigures, WorkerLoad, pool_load, read_figures
from gateway.config.backends import OpenAIBackend

RULES = OpenAIBackend(
    kind="openai",
    base_urls=["http://worker:8000/v1"],
    eject_after_failures=3,
    eject_error_share=0.5,
    eject_seconds=2,
    eject_max_seconds=16,
    slow_start_seconds=10,
)


def in_service(rules: OpenAIBackend = RULES) -> WorkerHealth:
    health = WorkerHealth(rules)
    assert health.probe_succeeded(0)
    return health


def test_a_new_worker_serves_after_its_first_good_probe_at_full_weight() -> None:
    health = WorkerHealth(RULES)
    assert not health.in_service and health.weight(0) == 0
    health.probe_succeeded(1)
    assert health.in_service and health.weight(1) == 1


def test_failures_in_a_row_eject_and_a_success_between_them_does_not() -> None:
    health = in_service()
    for now in range(2):
        assert not health.failed(now)
    health.succeeded(2)
    for now in range(3, 5):
        assert not health.failed(now)
    assert health.failed(5)
    assert health.state is WorkerState.EJECTED and health.returns_in(6) == 1


def test_a_high_share_of_failures_ejects_without_a_row_of_them() -> None:
    health = in_service()
    ejected = False
    for now in range(20):
        health.succeeded(now)
        ejected = ejected or health.failed(now)
    assert ejected


def test_old_outcomes_do_not_count() -> None:
    health = in_service()
    for number in range(5):
        health.succeeded(number)
        health.failed(number)
    for now in range(100, 110):
        health.succeeded(now)
    assert not health.failed(111)


def test_an_ejected_worker_comes_back_after_its_time_with_a_probe_and_slowly() -> None:
    health = in_service()
    for now in range(3):
        health.failed(now)
    assert not health.probe_succeeded(3), "not before its time"
    assert health.probe_succeeded(4.5)
    assert health.weight(4.5) == FIRST_WEIGHT
    assert health.weight(9.5) == pytest.approx(0.5)
    assert health.weight(20) == 1


def test_each_further_ejection_is_longer_up_to_a_bound() -> None:
    health, now, waits = in_service(), 0.0, []
    for _ in range(6):
        for _ in range(3):
            health.failed(now)
        waits.append(health.returns_in(now))
        now += waits[-1]
        assert health.probe_succeeded(now)
    assert waits == [2, 4, 8, 16, 16, 16]


def test_an_ejection_is_forgotten_after_a_long_time_without_failures() -> None:
    health = in_service()
    for _ in range(3):
        health.failed(0)
    health.probe_succeeded(2)
    health.succeeded(302)
    assert health.strikes == 0


def test_two_bad_probes_eject_and_one_does_not() -> None:
    health = in_service()
    assert not health.probe_failed(1)
    health.probe_succeeded(2)
    assert not health.probe_failed(3)
    assert health.probe_failed(4)


def test_a_bad_probe_once_the_time_is_up_keeps_it_out_for_longer_and_is_no_further_ejection() -> None:
    health = in_service()
    health.probe_failed(0), health.probe_failed(0)
    health.probe_failed(1)
    assert health.returns_in(1) == 1
    assert not health.probe_failed(2)
    assert health.returns_in(2) == 4 and health.ejections == 1
    assert health.returns_in(2) == 4


def test_the_last_worker_is_not_ejected_for_failures_while_its_probes_answer() -> None:
    health = in_service()
    assert not any(health.failed(now, last=True) for now in range(20))
    health.probe_failed(20)
    assert health.failed(21, last=True)


events = st.lists(st.tuples(st.sampled_from(["good", "bad", "probe", "no probe"]), st.floats(0, 5)))


@settings(deadline=None)
@given(events, st.booleans())
def test_health_holds_its_bounds_whatever_happens(history: list[tuple[str, float]], last: bool) -> None:
    health, now = WorkerHealth(RULES), 0.0
    for what, wait_s in history:
        now += wait_s
        match what:
            case "good":
                health.succeeded(now)
            case "bad":
                health.failed(now, last=last)
            case "probe":
                health.probe_succeeded(now)
            case _:
                health.probe_failed(now)
        assert 0 <= health.weight(now) <= 1
        assert (health.weight(now) > 0) == health.in_service
        assert 0 <= health.returns_in(now) <= RULES.eject_max_seconds + 1e-9, "clocks are floats"
    if not health.in_service:
        health.probe_succeeded(now + RULES.eject_max_seconds)
    assert health.in_service, "a worker whose probes answer is back after the longest ejection"


FIGURES = WorkerFigures(BackendLoad(running=6, waiting=2, kv_usage=0.5, total_blocks=100, block_size=16))


def test_a_burst_between_two_scrapes_counts_at_once() -> None:
    load = WorkerLoad(interval_s=1)
    load.scraped(FIGURES, 0)
    tickets = [load.sent(160) for _ in range(5)]
    assert load.requests_and_kv_usage(0.5)[0] == 13
    current = load.current(0.5)
    assert current is not None and current.running + current.waiting == 13
    assert current.kv_usage == pytest.approx(0.5 + 5 * 160 / 1600)
    for ticket in tickets:
        load.ended(ticket)
    assert load.requests_and_kv_usage(0.6)[0] == 8


def test_the_reported_load_follows_every_change() -> None:
    load = WorkerLoad(interval_s=1)
    load.scraped(FIGURES, 0)
    seen = [load.current(0), load.current(0.1)]
    ticket = load.sent(160)
    seen += [load.current(0.2), load.current(0.3)]
    load.ended(ticket)
    seen += [load.current(0.4)]
    load.scraped(WorkerFigures(BackendLoad(0, 0, 0.1, 100, 16)), 1)
    seen += [load.current(1), load.current(4), load.current(20)]
    quiet, busy, rest = (
        BackendLoad(6, 2, 0.5, 100, 16, 0),
        BackendLoad(7, 2, 0.6, 100, 16, 0),
        BackendLoad(0, 0, 0.1, 100, 16, 0),
    )
    assert seen[:6] == [quiet, quiet, busy, busy, quiet, rest]
    assert seen[6] is not None and seen[6].kv_usage > 0.1  # assumed, because the scrape is old
    assert seen[7] is None


def test_our_own_requests_in_a_scrape_are_not_counted_twice() -> None:
    load = WorkerLoad(interval_s=1)
    for _ in range(5):
        load.sent(16)
    load.scraped(FIGURES, 0)
    assert load.requests_and_kv_usage(0)[0] == 8
    current = load.current(0)
    assert current == BackendLoad(6, 2, 0.5, 100, 16, 0)


def test_others_requests_are_doubted_as_the_scrape_ages_and_then_forgotten() -> None:
    load = WorkerLoad(interval_s=1)
    load.scraped(FIGURES, 0)
    load.sent(16)
    seen = [load.requests_and_kv_usage(now)[0] for now in (0, 2, 4, 6, 8, 9.9)]
    assert seen == sorted(seen) and seen[0] == 9 and seen[-1] < 1 + 2 * 8
    assert load.requests_and_kv_usage(10)[0] == 1
    assert load.current(10) is None and load.requests_and_kv_usage(10) == (1, 0)


def test_a_doubted_scrape_alone_does_not_stop_traffic() -> None:
    load = WorkerLoad(interval_s=1)
    load.scraped(WorkerFigures(BackendLoad(1, 0, 0.7, 100, 16)), 0)
    assert all(load.requests_and_kv_usage(now / 10)[1] <= DOUBTED_KV_USAGE for now in range(100))


def test_a_known_batch_size_tells_running_from_waiting() -> None:
    load = WorkerLoad(interval_s=1, max_running=4)
    load.scraped(WorkerFigures(BackendLoad(4, 0)), 0)
    load.sent(1), load.sent(1)
    current = load.current(0)
    assert current is not None and (current.running, current.waiting) == (4, 2)


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(["sent", "ended", "scraped"])),
    st.integers(0, 20),
    st.floats(0, 1),
    st.floats(0, 30),
    st.integers(0, 8),
)
def test_load_is_never_less_than_what_is_in_flight_nor_out_of_range(
    history: list[str], running: int, kv_usage: float, age: float, max_running: int
) -> None:
    load, tickets = WorkerLoad(interval_s=1, max_running=max_running), []
    for what in history:
        if what == "sent":
            tickets.append(load.sent(100))
        elif what == "ended" and tickets:
            load.ended(tickets.pop())
        else:
            load.scraped(WorkerFigures(BackendLoad(running, 1, kv_usage, 10, 16)), 0)
        assert load.in_flight == len(tickets) <= load.requests_and_kv_usage(age)[0]
        current = load.current(age)
        if current is not None:
            assert current.running + current.waiting >= len(tickets)
            assert current.waiting >= 0 and 0 <= current.kv_usage <= 1


def test_the_pools_load_is_the_sum_and_unknown_workers_count_what_is_in_flight() -> None:
    one = BackendLoad(3, 1, 0.5, 100, 16, 8)
    two = BackendLoad(1, 0, 0.2, 300, 16, 8)
    assert pool_load([one, two], [3, 1], 8) == BackendLoad(4, 1, pytest.approx(0.275), 400, 16, 16, 2)
    assert pool_load([one, None], [3, 2], 0) == BackendLoad(5, 1, 0.5, 0, 0, 0, 2)
    assert pool_load([None, None], [2, 0], 0) is None


VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="base"} 3.0
vllm:num_requests_waiting{engine="0",model_name="base"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="base",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="base"} 0.25
vllm:lora_requests_info{max_lora="2",running_lora_adapters="old",waiting_lora_adapters=""} 1.7e+09
vllm:lora_requests_info{max_lora="2",running_lora_adapters="a, b",waiting_lora_adapters="c"} 1.8e+09
vllm:cache_config_info{block_size="32",cache_dtype="auto",num_gpu_blocks="512"} 1.0
"""


def test_a_workers_figures_are_read_by_vllms_names() -> None:
    assert read_figures(VLLM) == WorkerFigures(BackendLoad(3, 2, 0.25, 512, 32), frozenset("abc"))


def test_several_engines_behind_one_server_count_together() -> None:
    second = VLLM.replace('engine="0"', 'engine="1"').replace("} 0.25", "} 0.75")
    assert read_figures(VLLM + second) == WorkerFigures(BackendLoad(6, 4, 0.5, 1024, 32), frozenset("abc"))


def test_a_vllm_of_one_block_has_no_kv_cache_that_prompts_could_fill() -> None:
    encoder = VLLM.replace('"512"', '"1"')
    assert read_figures(encoder) == WorkerFigures(BackendLoad(3, 2, 0.25, 0, 32), frozenset("abc"))


@pytest.mark.parametrize(
    "text",
    ["", "<html>", "vllm:num_requests_running NaN", "vllm:num_requests_running +Inf", "other_metric 1"],
)
def test_metrics_of_another_kind_are_none(text: str) -> None:
    assert read_figures(text) is None


@settings(deadline=None)
@given(st.text())
def test_no_text_breaks_the_reading(text: str) -> None:
    read_figures(text)


@given(
    st.sampled_from(["vllm:num_requests_running", "vllm:lora_requests_info"]),
    st.text('{}",=\\ #0123456789.eE+-NaInf_:'),
)
def test_no_line_of_a_wanted_name_breaks_the_reading(name: str, rest: str) -> None:
    assert read_figures(f"vllm:num_requests_waiting 2\n{name}{rest}\n") is not None
