"""Two backends are judged by their answers through the gateway; the report is signed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from evaluation.adapter_regression.prompts import load_prompts
from evaluation.adapter_regression.thresholds import ThresholdsError
from evaluation.quantization_eval.__main__ import PROMPTS, main
from evaluation.quantization_eval.gate import load_gate
from evaluation.quantization_eval.make_variant import make_variant, rounded
from gateway.contracts.evaluation_report import is_signed

BASE = Path(__file__).parents[2] / "models" / "demo"


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_rounded_weight_has_few_values_a_row_and_errs_by_half_a_step(bits: int) -> None:
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    made, most = rounded(weight, bits), 2 ** (bits - 1) - 1
    step = weight.abs().amax(dim=1) / most
    assert all(len(row.unique()) <= 2 * most + 1 for row in made)
    assert bool(((made - weight).abs().amax(dim=1) <= step / 2 + 1e-6).all())
    assert torch.equal(made.abs().amax(dim=1), weight.abs().amax(dim=1)) or bits == 8


def test_a_row_of_zeros_stays_zero() -> None:
    assert torch.equal(rounded(torch.zeros(2, 4), 8), torch.zeros(2, 4))


def test_only_a_new_folder_of_a_models_weights_is_made(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="2 to 8"):
        make_variant(BASE, tmp_path / "a", bits=9)
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        make_variant(tmp_path, tmp_path / "a", bits=8)
    assert make_variant(BASE, tmp_path / "a", bits=8) == 35
    with pytest.raises(FileExistsError):
        make_variant(BASE, tmp_path / "a", bits=8)


DIGESTS = {"bf16": "a" * 64, "awq": "b" * 64}
KEY = "admin-key"


class Gateway:
    """A fake gateway: lists backends, stores reports, runs batches, and answers correctly unless ``wrong(model)``."""

    def __init__(self, wrong: Callable[[str], bool] = lambda model: False, **sluice: Any) -> None:
        self.cases = {one.messages[-1].content: one for one in load_prompts(PROMPTS).cases}
        self.wrong = wrong
        self.sluice = sluice
        self.posted: list[dict[str, Any]] = []
        self.lines: list[dict[str, Any]] = []
        self.batch_ends = "completed"

    def get(self, *path: str) -> Any:
        if path[:2] == ("v1", "batches"):
            done = len(self.lines) if self.batch_ends == "completed" else 1
            counts = {"completed": done, "failed": len(self.lines) - done}
            return {"id": "b", "status": self.batch_ends, "request_counts": counts, "output_file_id": "f2"}
        assert path == ("admin", "evaluations")
        return {"backends": DIGESTS}

    def upload(self, *path: str, file: Path, fields: Any) -> Any:
        assert (path, fields) == (("v1", "files"), {"purpose": "batch"})
        self.lines = [json.loads(line) for line in file.read_text().splitlines()]
        return {"id": "f1"}

    def pieces(self, *path: str) -> Iterator[bytes]:
        assert path == ("v1", "files", "f2", "content")
        for line in reversed(self.lines):  # results come in any order
            body = self.post("v1", "chat", "completions", body=line["body"])
            row = {"custom_id": line["custom_id"], "response": {"body": body}}
            yield json.dumps(row).encode() + b"\n"

    def post(self, *path: str, body: dict[str, Any]) -> Any:
        if path == ("v1", "batches"):
            assert body["input_file_id"] == "f1"
            return {"id": "b"}
        if path == ("admin", "evaluations"):
            self.posted.append(body["report"])
            return {}
        case = self.cases[body["messages"][-1]["content"]]
        text = case.reference or ("I can only help with manga." if case.refuse else _matching(case.expect))
        if self.wrong(body["model"]):
            text = "..."
        message = {"message": {"content": text}, "finish_reason": "stop"}
        return {
            "choices": [message],
            "sluice": {"fallback": None, "backend_name": body["model"], **self.sluice},
        }


def _matching(pattern: str | None) -> str:
    """Return a text with every word of the pattern."""
    return "It is " + re.sub(r"[^\w ,.$¥-]", " ", (pattern or "good").replace("\\", ""))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    monkeypatch.setenv("SLUICE_ADMIN_KEY", KEY)
    monkeypatch.delenv("SLUICE_EVALUATION_KEY", raising=False)

    def run(gateway: Gateway, *words: str) -> int:
        connect: Any = lambda *_: gateway  # noqa: E731
        return main(["--base", "bf16", "--candidate", "awq", *words], connect)

    return run


def test_the_same_answers_pass_and_the_stored_report_is_signed_with_both_digests(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    gateway = Gateway()
    gate = load_gate()
    assert run(gateway, "--json", "--post") in (0, 1)
    report = json.loads(capsys.readouterr().out)
    assert gateway.posted == [report] and is_signed(report, KEY.encode())
    assert (report["base_digest"], report["candidate_digest"]) == (DIGESTS["bf16"], DIGESTS["awq"])
    assert [one["group"] for one in report["groups"]] == list(gate.groups)
    assert all(one["same_answers"] == 1.0 for one in report["groups"])
    worse = [m for one in report["groups"] for m in one["metrics"] if m["worse_by"] > 0]
    assert worse == []
    assert "catalog" not in json.dumps(report), "no prompt is in it"


def test_a_variant_that_answers_worse_fails(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(Gateway(wrong=lambda model: model == "awq"), "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] is False
    assert {m["standing"] for one in report["groups"] for m in one["metrics"]} >= {"worse"}


def test_a_batch_gives_the_same_verdict_and_one_that_fails_gives_none(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    reports = []
    for more in ((), ("--batch",)):
        assert run(Gateway(wrong=lambda model: model == "awq"), "--json", *more) == 1
        reports.append(json.loads(capsys.readouterr().out))
    first, second = reports
    assert first["groups"] == second["groups"]

    gateway = Gateway()
    gateway.batch_ends = "expired"
    assert run(gateway, "--batch") == 2
    assert "batch b is expired" in capsys.readouterr().err


def test_a_metric_that_is_judged_and_not_measured_does_not_pass(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gate = tmp_path / "gate.yaml"
    gate.write_text("groups:\n  safety: {loss: {worse_by: 0.1}}\n")
    assert run(Gateway(), "--thresholds", str(gate), "--json") == 1
    [group] = [one for one in json.loads(capsys.readouterr().out)["groups"] if one["group"] == "safety"]
    assert (group["unmeasured"], group["passed"]) == (["loss"], False)


def test_what_cannot_be_judged_is_not_passed(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    only = tmp_path / "only.jsonl"
    only.write_text(PROMPTS.read_text().splitlines()[0] + "\n")
    assert run(Gateway(), "--prompts", str(only)) == 2
    assert "no prompts of group grounding, safety" in capsys.readouterr().err
    assert run(Gateway(), "--prompts", str(tmp_path / "none.jsonl")) == 2
    assert run(Gateway(), "--candidate", "gone") == 2
    assert "'gone' is no backend of the gateway; allowed: bf16, awq" in capsys.readouterr().err
    assert run(Gateway(backend_name="other")) == 2
    assert "another backend answered" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("groups: {}", "groups"),
        ("groups: {language: {lost: {}}}", "no metric 'lost'"),
        ("groups: {language: {loss: {worse: 1}}}", "worse"),
        ("groups: {language: {}}\nrefusals: ['(']", "regular expression"),
        ("- 1", "cannot be read|the file"),
    ],
)
def test_a_wrong_gate_is_refused_by_key(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "gate.yaml"
    file.write_text(text)
    with pytest.raises(ThresholdsError, match=message):
        load_gate(file)


def test_the_shipped_prompts_cover_what_the_shipped_gate_judges() -> None:
    groups = {case.group for case in load_prompts(PROMPTS).cases}
    assert groups == set(load_gate().groups) == {"language", "grounding", "safety"}
