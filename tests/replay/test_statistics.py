from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.replay.contract import Native, OpenAI, ReplayContract
from ops.replay.load import ReplayRun
from ops.replay.options import ReplaySlo
from ops.replay.outcome import ReplayedRequest, spread
from ops.replay.plot import in_flight_over_time
from ops.replay.report import ReplayReport, figures_of

values = st.lists(st.floats(0, 1e6), min_size=1, max_size=200)


def outcome(index: int = 0, **changes: object) -> ReplayedRequest:
    fields: dict[str, object] = {
        "index": index, "due_s": 1.0, "sent_s": 1.0, "asked_input": 100, "asked_output": 11, "total_s": 1.0,
        "ttft_s": 0.1, "last_token_s": 0.9, "finish_reason": "length", "input_tokens": 98,
        "output_tokens": 9, "cached_tokens": 49,
    }  # fmt: skip
    return ReplayedRequest(**{**fields, **changes})  # type: ignore[arg-type]


@given(values)
def test_percentiles_are_those_of_numpy(sample: list[float]) -> None:
    found, expected = spread(sample), numpy.percentile(sample, (50, 90, 99))
    assert [found.p50, found.p90, found.p99] == pytest.approx(list(expected), rel=1e-9, abs=1e-9)
    assert found.mean == pytest.approx(numpy.mean(sample), rel=1e-9, abs=1e-9)


@given(values)
def test_percentiles_rise_and_stay_inside_the_sample(sample: list[float]) -> None:
    found = spread(sample)
    assert found.p50 is not None and found.p90 is not None and found.p99 is not None and found.max is not None
    assert min(sample) <= found.p50 <= found.p90 <= found.p99 <= found.max == max(sample)


def test_no_values_have_no_percentiles() -> None:
    assert (spread([]).count, spread([]).p50) == (0, None)


@pytest.mark.parametrize(
    ("contract", "event"),
    [
        (Native(), {"type": "reasoning", "delta": "Hm"}),
        (OpenAI("qwen3"), {"choices": [{"delta": {"reasoning": "Hm"}}]}),
        (OpenAI("qwen3"), {"choices": [{"delta": {"reasoning_content": "Hm"}}]}),
    ],
)
def test_the_first_token_of_a_model_that_reasons_is_one_of_its_reasoning(
    contract: ReplayContract, event: dict[str, Any]
) -> None:
    reading = ReplayedRequest(0, 0.0, 0.0, 1, 1)
    contract.read(event, reading)
    assert reading.texts == 1


def test_time_per_token_counts_from_the_first_to_the_last_text() -> None:
    assert outcome().tpot_s == pytest.approx(0.1)
    assert outcome(output_tokens=1).tpot_s is None
    assert outcome(ttft_s=None).tpot_s is None


def test_goodput_wants_a_whole_undegraded_answer_inside_both_limits() -> None:
    limits = {"ttft_s": 0.2, "total_s": 1.4}
    assert outcome().within(**limits)
    assert not outcome(ttft_s=0.3).within(**limits)
    assert not outcome(total_s=1.5).within(**limits)
    assert not outcome(code="queue_full").within(**limits)
    assert not outcome(finish_reason="degraded").within(**limits)
    assert not outcome(ttft_s=None).within(**limits)


def test_a_report_counts_errors_by_code_and_leaves_them_out_of_the_latencies() -> None:
    run = ReplayRun(
        outcomes=[
            outcome(0), outcome(1), outcome(2, total_s=9.0, sent_s=3.0),
            outcome(3, code="queue_full", total_s=50.0),
            outcome(4, code="queue_full"), outcome(5, code="client_timeout"),
            outcome(6, fallback="bedrock:queue_full"),
        ],
        sent=8, wall_s=10.0,
    )  # fmt: skip
    found = ReplayReport(run, ReplaySlo(200, 1400))
    assert found.counts["errors"] == {"queue_full": 2, "client_timeout": 1}
    assert (len(found.whole), found.error_count, found.run.unfinished) == (4, 3, 1)
    assert found.counts["fallbacks"] == {"bedrock:queue_full": 1}
    assert found.latency_ms["total"].max == 9000
    assert found.latency_ms["client_delay"].max == 2000
    assert found.within_slo == 3
    assert found.tokens.cached_share == 0.5


def test_the_json_form_has_its_declared_fields() -> None:
    figures = figures_of(
        ReplayReport(ReplayRun(outcomes=[outcome()], sent=1, wall_s=2.0), ReplaySlo(200, 1400)), {"trace": {}}
    )
    assert figures["schema"] == 1
    assert list(figures) == [
        "schema", "trace", "requests", "wall_s", "latency_ms", "throughput_per_s", "tokens", "goodput",
        "errors", "fallbacks", "finish_reasons", "backends",
    ]  # fmt: skip
    latency = figures["latency_ms"]
    assert isinstance(latency, dict)
    assert list(latency) == ["ttft", "tpot", "total", "client_delay"]
    assert set(latency["ttft"]) == {"count", "mean", "p50", "p90", "p99", "max"}
    assert figures["throughput_per_s"] == {"requests": 0.5, "input_tokens": 49.0, "output_tokens": 4.5}
    assert figures["goodput"] == {
        "ttft_ms": 200, "total_ms": 1400, "within_slo": 1, "share": 1.0, "requests_per_s": 0.5,
    }  # fmt: skip


def test_a_run_in_which_nothing_ended_still_reports() -> None:
    figures = figures_of(ReplayReport(ReplayRun(), ReplaySlo(200, 1400)), {})
    assert figures["goodput"] == {
        "ttft_ms": 200, "total_ms": 1400, "within_slo": 0, "share": None, "requests_per_s": None,
    }  # fmt: skip


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0.001, 50)), max_size=50))
def test_in_flight_over_time_ends_at_zero_and_is_never_negative(spans: list[tuple[float, float]]) -> None:
    times, counts = in_flight_over_time([outcome(sent_s=sent, total_s=took) for sent, took in spans])
    assert counts[-1] == 0
    assert min(counts) >= 0
    assert times == sorted(times)
