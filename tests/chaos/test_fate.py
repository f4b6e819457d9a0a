"""Verdicts: from what a caller heard, what it should have heard, and what it was billed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.chaos.figures import grown, read_metrics
from ops.chaos.heard import Heard
from ops.chaos.report import ChaosReport
from ops.chaos.request_fate import Billed, ExpectedAnswers, Happened, RequestFate, differing, fate_of
from ops.chaos.scenario import FateVerdict, Scenario
from ops.chaos.workload import ChaosRequest

QUESTION = ChaosRequest("r-1", "What?", stream=True)
WANTED, OTHER = "The answer is here.", "Vinland Saga is."
KNOWN = ExpectedAnswers({"What?": WANTED}, {"What?": 5}, OTHER)
KILL = Happened(1.0, "kill engine", "engine")


def heard(text: str, **changes: Any) -> Heard:
    answer = {"backend": "embedded", "fallback": None, "finish_reason": "stop", "usage": {"output_tokens": 5}}
    one = Heard(QUESTION, 0.0, 200, first_s=0.5, ended_s=2.0, pieces=[text], ended=True, answer=answer)
    for name, value in changes.items():
        setattr(one, name, value)
    return one


def told(kind: str, finish: str = "stop") -> dict[str, Any]:
    usage = {"output_tokens": 5}
    return {
        "backend": kind,
        "fallback": {"kind": kind, "reason": "engine_dead"},
        "finish_reason": finish,
        "usage": usage,
    }


def verdict(one: Heard, *happened: Happened, **more: Any) -> FateVerdict:
    return fate_of(one, KNOWN, happened, **more).verdict


def test_the_undisturbed_answer_is_whole() -> None:
    assert verdict(heard(WANTED)) is FateVerdict.WHOLE


def test_an_answer_that_was_gone_on_with_and_is_the_same_is_resumed() -> None:
    assert verdict(heard(WANTED), KILL) is FateVerdict.RESUMED
    assert verdict(heard(WANTED), seams=("local→local exact at 8",)) is FateVerdict.RESUMED


def test_an_answer_without_a_seam_is_whole_whatever_happened_meanwhile() -> None:
    assert verdict(heard(WANTED), KILL, seams=()) is FateVerdict.WHOLE
    assert verdict(heard(WANTED), Happened(1.0, "kill worker:1", "worker:1")) is FateVerdict.WHOLE
    assert verdict(heard(WANTED), Happened(0.2, "kill engine", "engine")) is FateVerdict.WHOLE


def test_another_legs_own_answer_is_a_fallback() -> None:
    assert verdict(heard(OTHER, answer=told("bedrock"))) is FateVerdict.FALLBACK
    assert verdict(heard(WANTED, answer=told("response_cache"))) is FateVerdict.FALLBACK
    assert verdict(heard("Sorry.", answer=told("degraded_response"))) is FateVerdict.DEGRADED


@given(cut=st.integers(1, len(WANTED)), rest=st.integers(0, len(OTHER) - 1))
def test_a_beginning_that_another_model_goes_on_with_is_resumed(cut: int, rest: int) -> None:
    one = heard(WANTED[:cut] + OTHER[rest:], answer=told("bedrock"))
    assert verdict(one) in (FateVerdict.RESUMED, FateVerdict.FALLBACK)


@pytest.mark.parametrize(
    "text",
    [WANTED[:-3], WANTED + " here.", WANTED[:4] + WANTED, "", OTHER, WANTED.replace("answer", "question")],
)
def test_a_text_that_is_not_what_it_should_be_is_wrong(text: str) -> None:
    assert verdict(heard(text)) is FateVerdict.WRONG


def test_a_clean_end_is_told_from_none() -> None:
    beginning = WANTED[:7]
    assert verdict(heard(beginning, answer=None, code="engine_dead", partial=True)) is FateVerdict.PARTIAL
    assert verdict(heard("", answer=None, code="draining")) is FateVerdict.ERROR
    assert verdict(heard(beginning, answer=None, code="client_cut_off", ended=False)) is FateVerdict.LOST
    assert verdict(heard("Another", answer=None, code="x", partial=True)) is FateVerdict.WRONG
    deadline = {**told("x", "deadline"), "fallback": None}
    assert verdict(heard(beginning, answer=deadline)) is FateVerdict.PARTIAL


def test_what_was_billed_must_be_what_was_told_and_once() -> None:
    good = Billed(5, "local", None)
    assert verdict(heard(WANTED), rows=[good]) is FateVerdict.WHOLE
    twice = fate_of(heard(WANTED), KNOWN, (), rows=[good, good])
    assert (twice.verdict, twice.billed, twice.rows) == (FateVerdict.WRONG, 10, 2)
    assert "2 rows" in twice.why
    assert verdict(heard(WANTED), rows=[Billed(9, "local", None)]) is FateVerdict.WRONG
    assert verdict(heard(WANTED), rows=[]) is FateVerdict.WRONG


@given(st.text(max_size=20), st.text(max_size=20))
def test_characters_too_many_and_too_few_account_for_the_lengths(wanted: str, text: str) -> None:
    duplicated, missing = differing(wanted, text)
    assert duplicated >= 0 and missing >= 0
    assert len(text) - duplicated == len(wanted) - missing
    assert (duplicated, missing) == (0, 0) or wanted != text


def fate(verdict: FateVerdict) -> RequestFate:
    return RequestFate("r", True, 0.0, 0.1, 0.2, 0.0, verdict, ())


def report(*verdicts: FateVerdict, **keys: Any) -> ChaosReport:
    made = ChaosReport(Scenario.model_validate({"about": "x", **keys}))
    made.fates = [fate(one) for one in verdicts]
    made.at_rest = True
    return made


def test_a_run_fails_on_what_is_lost_wrong_not_allowed_or_left_over() -> None:
    good = report(FateVerdict.WHOLE, FateVerdict.PARTIAL)
    good.judge(ready=True)
    assert good.ok
    for one in (FateVerdict.LOST, FateVerdict.WRONG):
        bad = report(FateVerdict.WHOLE, one)
        bad.judge(ready=True)
        assert not bad.ok and one in bad.problems[0]
    strict = report(FateVerdict.PARTIAL, allow=["whole"])
    strict.judge(ready=True)
    assert not strict.ok
    busy = report(FateVerdict.WHOLE)
    busy.at_rest = False
    busy.judge(ready=False)
    assert len(busy.problems) == 2


def test_a_run_that_broke_nothing_under_way_shows_nothing_and_fails() -> None:
    idle = report(FateVerdict.WHOLE)
    idle.happened = [KILL]
    idle.judge(ready=True)
    assert idle.problems == ["kill engine: no request was under way, so nothing is shown"]
    late = report(FateVerdict.WHOLE)
    late.never_done = ["kill engine"]
    late.judge(ready=True)
    assert late.problems == ["kill engine: the load was over before its time"]
    by_chance = report(FateVerdict.WHOLE, random={"choices": [{"do": {"kill": "engine"}}]})
    by_chance.happened = [KILL]
    by_chance.judge(ready=True)
    assert by_chance.ok, "a pause between two requests may meet it"


def test_a_recovery_is_told_from_what_ready_said() -> None:
    made = report(FateVerdict.WHOLE)
    made.happened = [KILL]
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
