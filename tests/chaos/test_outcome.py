"""Verdicts: from what a caller observed, what it should have observed, and what it was billed."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.chaos.figures import grown, read_ledger, read_metrics, read_seams
from ops.chaos.report import ChaosReport
from ops.chaos.request_outcome import (
    AppliedFault,
    ExpectedAnswers,
    RequestOutcome,
    differing,
    outcome_of,
)
from ops.chaos.scenario import Scenario, Verdict
from ops.chaos.workload import ChaosRequest, ObservedAnswer

QUESTION = ChaosRequest("r-1", "What?", stream=True)
WANTED, OTHER = "The answer is here.", "Vinland Saga is."
KNOWN = ExpectedAnswers({"What?": WANTED}, OTHER)
KILL = AppliedFault(1.0, "kill engine", "engine")


def observed(text: str, **changes: Any) -> ObservedAnswer:
    answer = {"backend": "embedded", "fallback": None, "finish_reason": "stop", "usage": {"output_tokens": 5}}
    one = ObservedAnswer(QUESTION, 0.0, first_s=0.5, ended_s=2.0, pieces=[text], ended=True, answer=answer)
    for name, value in changes.items():
        setattr(one, name, value)
    return one


def answer_from(kind: str, finish: str = "stop") -> dict[str, Any]:
    usage = {"output_tokens": 5}
    return {
        "backend": kind,
        "fallback": {"kind": kind, "reason": "engine_dead"},
        "finish_reason": finish,
        "usage": usage,
    }


def verdict(one: ObservedAnswer, *injected: AppliedFault, **more: Any) -> Verdict:
    return outcome_of(one, KNOWN, injected, **more).verdict


def test_the_undisturbed_answer_is_whole() -> None:
    assert verdict(observed(WANTED)) is Verdict.WHOLE


def test_an_equal_answer_that_was_resumed_has_the_verdict_resumed() -> None:
    assert verdict(observed(WANTED), KILL) is Verdict.RESUMED
    assert verdict(observed(WANTED), seams=("local→local exact at 8",)) is Verdict.RESUMED


def test_an_answer_without_a_seam_is_whole_whatever_happened_meanwhile() -> None:
    assert verdict(observed(WANTED), KILL, seams=()) is Verdict.WHOLE
    assert verdict(observed(WANTED), AppliedFault(1.0, "kill worker:1", "worker:1")) is Verdict.WHOLE
    assert verdict(observed(WANTED), AppliedFault(0.2, "kill engine", "engine")) is Verdict.WHOLE


def test_another_legs_own_answer_is_a_fallback() -> None:
    assert verdict(observed(OTHER, answer=answer_from("bedrock"))) is Verdict.FALLBACK
    assert verdict(observed(WANTED, answer=answer_from("response_cache"))) is Verdict.FALLBACK
    assert verdict(observed("Sorry.", answer=answer_from("degraded_response"))) is Verdict.DEGRADED


@given(cut=st.integers(1, len(WANTED)), rest=st.integers(0, len(OTHER) - 1))
def test_an_answer_that_another_model_resumes_is_resumed_or_a_fallback(cut: int, rest: int) -> None:
    one = observed(WANTED[:cut] + OTHER[rest:], answer=answer_from("bedrock"))
    assert verdict(one) in (Verdict.RESUMED, Verdict.FALLBACK)


@pytest.mark.parametrize(
    "text",
    [WANTED[:-3], WANTED + " here.", WANTED[:4] + WANTED, "", OTHER, WANTED.replace("answer", "question")],
)
def test_a_text_that_is_not_what_it_should_be_is_wrong(text: str) -> None:
    assert verdict(observed(text)) is Verdict.WRONG


def test_a_clean_end_is_distinguished_from_a_lost_answer() -> None:
    beginning = WANTED[:7]
    assert verdict(observed(beginning, answer=None, code="engine_dead", partial=True)) is Verdict.PARTIAL
    assert verdict(observed("", answer=None, code="draining")) is Verdict.ERROR
    assert verdict(observed(beginning, answer=None, code="client_cut_off", ended=False)) is Verdict.LOST
    assert verdict(observed("Another", answer=None, code="x", partial=True)) is Verdict.WRONG
    deadline = {**answer_from("x", "deadline"), "fallback": None}
    assert verdict(observed(beginning, answer=deadline)) is Verdict.PARTIAL


def test_the_bill_must_be_the_reported_usage_and_exist_once() -> None:
    good = 5
    assert verdict(observed(WANTED), rows=[good]) is Verdict.WHOLE
    twice = outcome_of(observed(WANTED), KNOWN, (), rows=[good, good])
    assert (twice.verdict, twice.billed, twice.rows) == (Verdict.WRONG, 10, 2)
    assert "2 rows" in twice.why
    assert verdict(observed(WANTED), rows=[9]) is Verdict.WRONG
    assert verdict(observed(WANTED), rows=[]) is Verdict.WRONG


@given(st.text(max_size=20), st.text(max_size=20))
def test_characters_too_many_and_too_few_account_for_the_lengths(wanted: str, text: str) -> None:
    duplicated, missing = differing(wanted, text)
    assert duplicated >= 0 and missing >= 0
    assert len(text) - duplicated == len(wanted) - missing
    assert (duplicated, missing) == (0, 0) or wanted != text


def outcome(verdict: Verdict) -> RequestOutcome:
    return RequestOutcome("r", True, 0.0, 0.1, 0.2, 0.0, verdict, ())


def report(*verdicts: Verdict, **keys: Any) -> ChaosReport:
    made = ChaosReport(Scenario.model_validate({"about": "x", **keys}))
    made.outcomes = [outcome(one) for one in verdicts]
    made.at_rest = True
    return made


def test_a_run_fails_on_what_is_lost_wrong_not_allowed_or_left_over() -> None:
    good = report(Verdict.WHOLE, Verdict.PARTIAL)
    good.judge(ready=True)
    assert good.ok
    for one in (Verdict.LOST, Verdict.WRONG):
        bad = report(Verdict.WHOLE, one)
        bad.judge(ready=True)
        assert not bad.ok and one in bad.problems[0]
    strict = report(Verdict.PARTIAL, allow=["whole"])
    strict.judge(ready=True)
    assert not strict.ok
    busy = report(Verdict.WHOLE)
    busy.at_rest = False
    busy.judge(ready=False)
    assert len(busy.problems) == 2


def test_a_run_that_broke_nothing_under_way_shows_nothing_and_fails() -> None:
    idle = report(Verdict.WHOLE)
    idle.injected = [KILL]
    idle.judge(ready=True)
    assert idle.problems == ["kill engine: no request was under way, so nothing is shown"]
    late = report(Verdict.WHOLE)
    late.never_done = ["kill engine"]
    late.judge(ready=True)
    assert late.problems == ["kill engine: the load was over before its time"]
    by_chance = report(Verdict.WHOLE, random={"choices": [{"do": {"kill": "engine"}}]})
    by_chance.injected = [KILL]
    by_chance.judge(ready=True)
    assert by_chance.ok, "a pause between two requests may meet it"


def test_recovery_times_are_read_from_the_readiness_samples() -> None:
    made = report(Verdict.WHOLE)
    made.injected = [KILL]
    made.readiness = [
        (0.0, frozenset()),
        (1.2, frozenset({"workers_ready", "model_loaded"})),
        (3.0, frozenset({"error_rate_ok"})),
        (9.0, frozenset()),
    ]
    found = made.recoveries()[KILL]
    assert (found.down_s, found.back_s, found.ready_s) == pytest.approx((0.2, 2.0, 8.0))
    assert found.checks == {"workers_ready", "model_loaded", "error_rate_ok"}


def test_the_growth_of_counters_and_what_is_under_way_are_read_from_the_metrics() -> None:
    before = read_metrics("# TYPE sluice_retries_total counter\nsluice_retries_total 1.0\n")
    after = read_metrics(
        "# TYPE sluice_retries_total counter\nsluice_retries_total 4.0\n"
        '# TYPE sluice_backend_failures_total counter\nsluice_backend_failures_total{backend="a",kind="b"} 2.0\n'
        "# TYPE sluice_requests_in_flight gauge\nsluice_requests_in_flight 3.0\n"
    )
    assert grown(before, after) == {"sluice_retries{}": 3.0, "sluice_backend_failures{backend=a,kind=b}": 2.0}
    assert before.at_rest and not after.at_rest


def test_a_half_written_line_of_the_log_is_left_out(tmp_path: Path) -> None:
    log = tmp_path / "gateway.log"
    seam = '{"source": "a", "target": "b", "mode": "tokens", "tokens": 4}'
    whole = '{"event": "request", "request_id": "chaos-1", "seams": [' + seam + "]}\n"
    log.write_text(whole + "chaos- as plain text\n" + whole.replace("chaos-1", "chaos-2")[:60])
    assert read_seams(log, "chaos-") == {"chaos-1": ("a→b tokens at 4",)}


def test_a_ledger_whose_path_has_signs_of_an_address_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "run #1, 50%25?"
    folder.mkdir()
    with closing(sqlite3.connect(folder / "ledger.db")) as ledger, ledger:
        ledger.execute("create table generations (request_id, output_tokens)")
        ledger.execute("insert into generations values ('chaos-1', 3), ('chaos-1', 4), ('other', 5)")
    assert read_ledger(folder / "ledger.db", "chaos-") == {"chaos-1": [3, 4]}
