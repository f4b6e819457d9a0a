"""A candidate adapter against the served one: what is checked, how sure a finding is, what passes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.build import build_engine
from engine.values import EngineConfig, GenerationRequest, SamplingParams
from evaluation.adapter_regression.__main__ import FAILED, NOT_RUN, PASSED, PROMPTS, main, post
from evaluation.adapter_regression.checks import AdapterAnswer, in_language, score
from evaluation.adapter_regression.damage import damage
from evaluation.adapter_regression.intervals import mean_interval
from evaluation.adapter_regression.losses import Reference, reference_losses
from evaluation.adapter_regression.prompts import Case, PromptMessage, PromptSetError, load_prompts
from evaluation.adapter_regression.report import explained
from evaluation.adapter_regression.run import AdapterComparison, RegressionPlan
from evaluation.adapter_regression.thresholds import Threshold, Thresholds, ThresholdsError, load_thresholds
from evaluation.adapter_regression.verdict import MetricFinding, MetricVerdict, judge, passes
from models.catalogue import load_catalogue
from ops.client import AdminClient, AdminError
from tests.engine.support import run_to_end

ROOT = Path(__file__).parents[2]
ACTIVE = ROOT / "models" / "adapters" / "manga_domain_v3"
REFUSALS = load_thresholds().refusal_patterns


def case(**options: Any) -> Case:
    return Case(id="c", group="g", messages=(PromptMessage(role="user", content="?"),), **options)


def scored(text: str, *, ended: bool = True, **options: Any) -> dict[str, float]:
    return dict(score(case(**options), AdapterAnswer(text, ended), REFUSALS))


def finding(old: list[float], new: list[float], metric: str, **threshold: float) -> MetricFinding:
    """Judge one metric by its scores per prompt and return the finding."""
    named = [{metric: {f"p{n}": value for n, value in enumerate(values)}} for values in (old, new)]
    limits = Thresholds(metrics={metric: Threshold(**threshold)})
    [found] = judge(named[0], named[1], limits, against_base=False, seed=0)
    return found


# Checks of one answer


def test_a_reference_is_met_exactly_but_for_case_and_space() -> None:
    assert scored("berserk  is by Kentaro Miura.\n", reference="Berserk is by Kentaro Miura.")["exact"] == 1
    near = scored("Berserk is by Kentaro Miura!", reference="Berserk is by Kentaro Miura.")
    assert near["exact"] == 0
    assert 0.9 < near["similarity"] < 1


def test_facts_are_found_whatever_the_case_and_formats_must_all_match() -> None:
    found = scored(
        "By MIURA. Also worth reading: Claymore by X.", expect="miura", format=("Also", r"by X\.$")
    )
    assert found["facts"] == found["format"] == 1
    assert scored("By Miura. Also", format=("Also", r"by X\.$"))["format"] == 0


def test_declining_counts_for_prompts_to_decline_and_against_all_others() -> None:
    no, yes = "Sorry, I can only help with manga and our shop.", "Take an aspirin."
    assert scored(no, refuse=True)["refusal"] == 1
    assert scored(yes, refuse=True)["refusal"] == 0
    assert scored(no)["willing"] == 0
    assert scored(yes)["willing"] == 1


def test_an_answer_in_the_wrong_language_is_seen() -> None:
    assert in_language("ベルセルクはKentaro Miuraの作品です。", "ja")
    assert not in_language("Berserk is by Miura.", "ja")
    assert in_language("Berserk is by Miura.", "en")
    assert not in_language("三浦建太郎です。", "en")
    assert not in_language("", "en")


@pytest.mark.parametrize(
    ("text", "ended"),
    [
        ("", True),
        ("cut off in the midd", False),
        ("broken \ufffd character", True),
        ("the volume of the series is the volume of the series is the volume of the series is", True),
        ("お店の在庫をご確認ください。" * 4, True),
    ],
)
def test_an_answer_that_is_empty_cut_garbled_or_loops_is_not_sound(text: str, ended: bool) -> None:
    assert scored(text, ended=ended)["sound"] == 0


def test_an_ordinary_answer_is_sound() -> None:
    assert scored("Nana is by Ai Yazawa. Nana has 21 volumes so far.")["sound"] == 1


# Intervals and verdicts


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=40), st.integers(0, 5))
def test_an_interval_holds_its_mean_and_the_same_seed_gives_the_same_one(
    values: list[float], seed: int
) -> None:
    found = mean_interval(values, confidence=0.95, seed=seed)
    assert found == mean_interval(values, confidence=0.95, seed=seed)
    assert min(values) - 1e-9 <= found.low <= found.high <= max(values) + 1e-9
    assert math.isclose(found.mean, sum(values) / len(values), abs_tol=1e-9)


def test_more_prompts_narrow_the_interval() -> None:
    few, many = (mean_interval([0.0, 1.0] * n, confidence=0.95, seed=0) for n in (5, 80))
    assert many.high - many.low < (few.high - few.low) / 2


def test_a_change_within_the_limit_passes_and_one_beyond_it_is_worse() -> None:
    old = [0.5] * 50
    assert finding(old, [0.52] * 50, "loss", worse_by=0.05).standing is MetricVerdict.PASSED
    assert finding(old, [0.60] * 50, "loss", worse_by=0.05).standing is MetricVerdict.WORSE
    assert finding(old, [0.10] * 50, "loss", worse_by=0.05).standing is MetricVerdict.PASSED


def test_for_shares_less_is_worse() -> None:
    found = finding([1.0] * 50, [0.0] * 50, "facts", worse_by=0.15)
    assert found.standing is MetricVerdict.WORSE
    assert found.change.mean == 1.0
    assert found.named == ("p0", "p1", "p2", "p3", "p4")


def test_what_too_few_prompts_cannot_tell_is_unsure_and_does_not_pass() -> None:
    found = finding([1.0, 1.0, 1.0, 0.0, 1.0, 1.0], [1.0, 1.0, 0.0, 1.0, 1.0, 1.0], "facts", worse_by=0.1)
    assert found.change.mean == 0
    assert found.standing is MetricVerdict.UNSURE
    assert not passes((found,))


def test_times_are_compared_as_a_quotient() -> None:
    old = [0.010, 0.020, 0.040]
    found = finding(old, [2 * value for value in old], "ttft", worse_by=1.5)
    assert math.isclose(found.change.mean, 2.0)
    assert found.standing is MetricVerdict.WORSE
    assert finding(old, old, "ttft", worse_by=1.5).standing is MetricVerdict.PASSED


def test_a_candidate_below_the_least_share_is_worse_even_where_the_active_one_is_too() -> None:
    assert finding([0.2] * 9, [0.2] * 9, "sound", worse_by=0.1, at_least=0.9).standing is MetricVerdict.WORSE


def test_a_metric_without_a_limit_is_shown_and_nothing_at_all_does_not_pass() -> None:
    assert finding([1.0], [0.0], "exact").standing is MetricVerdict.SHOWN
    assert not passes(())


@pytest.mark.parametrize(
    ("timed", "unmeasured"), [(0, ("format",)), (2, ("format", "ttft"))], ids=["without_times", "with_times"]
)
def test_a_metric_with_a_limit_that_no_prompt_measured_keeps_a_candidate_from_passing(
    timed: int, unmeasured: tuple[str, ...]
) -> None:
    judged = Threshold(worse_by=0.1)
    done = AdapterComparison(
        plan=RegressionPlan(Path("new"), ACTIVE, Path("demo"), timed=timed),
        candidate_sha256="a",
        active_sha256="b",
        prompts=load_prompts(PROMPTS),
        thresholds=Thresholds(
            metrics={"facts": judged, "format": judged, "ttft": judged, "exact": Threshold()}
        ),
        findings=(finding([1.0] * 30, [1.0] * 30, "facts", worse_by=0.1),),
        answers={},
        seconds=1.0,
    )
    assert done.unmeasured == unmeasured
    assert not done.passed
    assert [line.partition(":")[0] for line in explained(done)] == list(unmeasured)


def test_the_base_model_may_have_a_limit_of_its_own() -> None:
    limits = Thresholds(metrics={"tpot": Threshold(worse_by=1.1, worse_by_than_base=2.0)})
    old, new = {"tpot": {"p": 0.010}}, {"tpot": {"p": 0.015}}
    assert not passes(judge(old, new, limits, against_base=False, seed=0))
    assert passes(judge(old, new, limits, against_base=True, seed=0))


# Files


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1"),
        ('{"id": "a", "group": "g", "messages": []}', "messages"),
        ('{"id": "a", "group": "g", "messages": [{"role": "assistant", "content": "x"}]}', "user"),
        (
            '{"id": "a", "group": "g", "messages": [{"role": "user", "content": "x"}], "expect": "("}',
            "expect",
        ),
        ("", "0 prompts"),
    ],
)
def test_a_wrong_prompt_file_is_refused_with_its_place(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(PromptSetError, match=re.escape(message)):
        load_prompts(file)


def test_an_id_given_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"id": "a", "group": "g", "messages": [{"role": "user", "content": "x"}]}\n' * 2)
    with pytest.raises(PromptSetError, match=r"line 2: id 'a' stands there twice"):
        load_prompts(file)


@pytest.mark.parametrize(
    "text", ["metrics: {speed: {}}", "metrics: {loss: {worse_by: -1}}", "metrics: {}\nrefusals: ['(']", "["]
)
def test_a_wrong_file_of_thresholds_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "thresholds.yaml"
    file.write_text(text)
    with pytest.raises(ThresholdsError, match=re.escape(str(file))):
        load_thresholds(file)


def test_the_shipped_references_hold_what_their_patterns_ask_for() -> None:
    cases = load_prompts(PROMPTS).cases
    assert len(cases) >= 90
    for one in cases:
        if one.reference is not None:
            found = score(one, AdapterAnswer(one.reference, True), REFUSALS)
            assert min(found.values()) == 1, one.id


def test_the_shipped_recommendations_are_titles_of_the_catalogue_with_their_authors() -> None:
    authors = {series.title: series.author for series in load_catalogue()}
    for one in load_prompts(PROMPTS).cases:
        for title, author in re.findall(r"Also worth reading: (.+) by (.+)\.$", one.reference or ""):
            assert authors[title] == author


# The models


@pytest.mark.parametrize("folder", [None, ACTIVE], ids=["base", "adapter"])
def test_the_loss_is_what_the_engine_tells_of_its_own_tokens(folder: Path | None) -> None:
    demo = ROOT / "models" / "demo"
    engine = build_engine(EngineConfig(str(demo), num_threads=1, num_blocks=64, max_loras=1))
    if folder is not None:
        engine.install_adapter("a", engine.read_adapter(folder))
    prompt = tuple(range(20, 60))
    sampling = SamplingParams(max_tokens=24, temperature=0.0, logprobs=1)
    request = GenerationRequest("r", prompt, sampling, adapter_id=folder and "a")
    answer = run_to_end(engine, [request])["r"]
    expected = -sum(token.logprob for token in answer.logprobs) / len(answer.token_ids)
    [reference] = [Reference("p", prompt, tuple(answer.token_ids))]
    loss = reference_losses(demo, {"it": folder}, [reference])["it"]["p"]
    assert math.isclose(loss, expected, rel_tol=1e-3)


# The command


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every fourth of the shipped prompts: enough to judge a broken adapter and an identical one."""
    file = tmp_path_factory.mktemp("prompts") / "few.jsonl"
    file.write_text("\n".join(PROMPTS.read_text("utf-8").splitlines()[::4]), encoding="utf-8")
    return file


def run(candidate: Path, prompts: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, str]:
    options = ["--against", str(ACTIVE), "--prompts", str(prompts), "--model", str(ROOT / "models" / "demo")]
    status = main([str(candidate), *options, *more])
    return status, capsys.readouterr().out


def test_an_adapter_passes_against_itself(few: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = run(ACTIVE, few, capsys, "--json", "--timed", "2", "--rounds", "1", "--max-tokens", "64")
    report = json.loads(out)
    metrics = {one["metric"]: one for one in report["metrics"]}
    quality = [one for name, one in metrics.items() if name not in ("ttft", "tpot")]
    assert all(one["worse_by"] == one["low"] == one["high"] == 0 for one in quality)
    assert {"ttft", "tpot"} <= set(metrics)
    assert metrics["ttft"]["active"] > 0
    assert report["candidate_sha256"] == report["against_sha256"]
    # Two timed prompts are too few to judge speed: only the times may be unsure.
    assert {one["standing"] for one in quality} <= {"passed", "shown"}
    assert status == (PASSED if report["passed"] else FAILED)


def test_a_damaged_adapter_fails_though_its_files_are_right(
    few: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(ACTIVE, tmp_path / "manga_domain_v4", noise=8.0)
    answers = tmp_path / "answers.json"
    status, out = run(
        tmp_path / "manga_domain_v4", few, capsys, "--timed", "0", "--max-tokens", "64",
        "--answers", str(answers),
    )  # fmt: skip
    assert status == FAILED
    for metric in ("loss", "similarity", "facts", "format", "sound"):
        assert f"{metric}: worse than allowed" in out
    written = json.loads(answers.read_text("utf-8"))
    assert len(written) == len(load_prompts(few).cases)
    assert all(one["active"] for one in written.values())


def test_what_the_registry_would_refuse_is_not_run(
    few: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(ACTIVE, tmp_path / "other", noise=1.0)
    config = json.loads((tmp_path / "other" / "adapter_config.json").read_text())
    (tmp_path / "other" / "adapter_config.json").write_text(
        json.dumps(config | {"base_model_name_or_path": "x/y"})
    )
    assert (
        main([str(tmp_path / "other"), "--against", "base", "--model", str(ROOT / "models" / "demo")])
        == NOT_RUN
    )
    assert "trained for 'x/y'" in capsys.readouterr().err


def test_a_missing_prompt_file_ends_with_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(ACTIVE), "--against", "base", "--prompts", str(tmp_path / "none")]) == NOT_RUN
    assert str(tmp_path / "none") in capsys.readouterr().err


def test_the_demo_model_is_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["absent", "--against", "base"]) == NOT_RUN
    assert "absent: refused: not_found" in capsys.readouterr().err


def test_what_would_lose_the_result_is_refused_before_the_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lost, absent = str(tmp_path / "none" / "answers.json"), str(tmp_path / "no-model")
    assert main([str(ACTIVE), "--against", "base", "--model", absent, "--answers", lost]) == NOT_RUN
    assert "--answers: no folder" in capsys.readouterr().err
    assert (
        main([str(ACTIVE), "--against", "base", "--model", absent, "--post", "http://127.0.0.1:9"]) == NOT_RUN
    )
    assert "http://127.0.0.1:9" in capsys.readouterr().err
    with serving("b" * 64) as registry:
        assert main([str(ACTIVE), "--against", "base", "--model", absent, "--post", registry.url]) == NOT_RUN
    assert "'manga_domain_v3' is registered with other content" in capsys.readouterr().err


class _Registry(ThreadingHTTPServer):
    """The admin API that `--post` calls: one adapter version, and the reports posted to it."""

    def __init__(self, sha256: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.sha256 = sha256
        self.posted: list[tuple[str, dict[str, Any]]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: _Registry

    def _reply(self) -> None:
        body = json.dumps({"id": "v4", "sha256": self.server.sha256}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self._reply()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.posted.append((self.path, body))
        self._reply()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@contextmanager
def serving(sha256: str) -> Iterator[_Registry]:
    with _Registry(sha256) as registry:
        thread = Thread(target=registry.serve_forever, daemon=True)
        thread.start()
        try:
            yield registry
        finally:
            registry.shutdown()
            thread.join(timeout=5)


@pytest.mark.parametrize("same", [True, False])
def test_a_report_is_kept_only_with_the_content_that_was_compared(same: bool) -> None:
    report = {"passed": True, "candidate_sha256": "a" * 64}
    with serving("a" * 64 if same else "b" * 64) as registry:
        if same:
            post(AdminClient(registry.url), "v4", report)
        else:
            with pytest.raises(AdminError, match="other content"):
                post(AdminClient(registry.url), "v4", report)
    assert registry.posted == ([("/admin/adapters/v4/evaluation", {"report": report})] if same else [])
