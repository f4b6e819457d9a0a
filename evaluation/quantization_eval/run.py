"""One comparison from start to end: both backends answer every prompt, and each group is judged."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from evaluation.adapter_regression.checks import AdapterAnswer, score
from evaluation.adapter_regression.prompts import Case, PromptSet
from evaluation.adapter_regression.verdict import MetricFinding, Scores, judge, passes
from evaluation.quantization_eval.gate import QuantizationGate
from ops.client import AdminClient, AdminError

BATCH_ENDED: Final = ("completed", "failed", "expired", "cancelled")
LOOK_S: Final = 1.0


class EvaluationError(Exception):
    """The evaluation is impossible; the message says why."""


@dataclass(frozen=True, slots=True)
class GroupResult:
    """One group of prompts.

    Args:
        judged: whether the gate has thresholds for this group.
        same: share of prompts to which both gave the same text.
        unmeasured: metrics that the gate judges but no prompt of the group measures.
    """

    group: str
    prompts: int
    findings: tuple[MetricFinding, ...]
    judged: bool
    same: float
    unmeasured: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Return whether no judged metric is worse than allowed, unsure or unmeasured."""
        return not self.judged or (passes(self.findings) and not self.unmeasured)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result; ``digests`` are of the backends' configurations, ``answers`` have the base's first."""

    base: str
    candidate: str
    digests: Mapping[str, str]
    prompts: PromptSet
    gate: QuantizationGate
    groups: tuple[GroupResult, ...]
    answers: Mapping[str, tuple[str, str]]
    seed: int
    seconds: float

    @property
    def passed(self) -> bool:
        """Return the verdict: every group of the gate has prompts, and all groups passed."""
        found = {one.group for one in self.groups}
        return found >= set(self.gate.groups) and all(one.passed for one in self.groups)


def evaluate(
    client: AdminClient,
    base: str,
    candidate: str,
    prompts: PromptSet,
    gate: QuantizationGate,
    *,
    max_tokens: int = 96,
    parallel: int = 4,
    seed: int = 0,
    as_batch: bool = False,
) -> Evaluation:
    """Ask both backends and judge; ``as_batch`` uses idle capacity only. Raises EvaluationError."""
    began = time.monotonic()
    missing = sorted(set(gate.groups) - {case.group for case in prompts.cases})
    if missing:
        raise EvaluationError(f"{prompts.name}: no prompts of group {', '.join(missing)}, which are judged")
    try:
        digests: Mapping[str, str] = client.get("admin", "evaluations")["backends"]
        for name in (base, candidate):
            if name not in digests:
                raise EvaluationError(f"{name!r} is no backend of the gateway; allowed: {', '.join(digests)}")
        asked = [(name, case) for name in (base, candidate) for case in prompts.cases]
        if as_batch:
            answers = _batch(client, asked, max_tokens)
        else:
            with ThreadPoolExecutor(parallel) as threads:
                answers = list(threads.map(lambda one: _ask(client, one[0], one[1], max_tokens), asked))
        given = {(name, case.id): answer for (name, case), answer in zip(asked, answers, strict=True)}
        runs = [{case.id: given[name, case.id] for case in prompts.cases} for name in (base, candidate)]
    except AdminError as error:
        raise EvaluationError(str(error)) from None
    groups = dict.fromkeys(case.group for case in prompts.cases)
    return Evaluation(
        base=base,
        candidate=candidate,
        digests=digests,
        prompts=prompts,
        gate=gate,
        groups=tuple(_judged(group, prompts.cases, gate, runs, seed) for group in groups),
        answers={case.id: (runs[0][case.id].text, runs[1][case.id].text) for case in prompts.cases},
        seed=seed,
        seconds=time.monotonic() - began,
    )


_Run = Mapping[str, AdapterAnswer]


def _body(backend: str, case: Case, max_tokens: int) -> dict[str, Any]:
    """Return the request body for a greedy answer."""
    return {
        "model": backend,
        "messages": [message.model_dump() for message in case.messages],
        "max_tokens": max_tokens,
        "temperature": 0,
    }


def _ask(client: AdminClient, backend: str, case: Case, max_tokens: int) -> AdapterAnswer:
    body = _body(backend, case, max_tokens)
    return _answer(backend, case, client.post("v1", "chat", "completions", body=body))


def _answer(backend: str, case: Case, found: dict[str, Any]) -> AdapterAnswer:
    sluice = found["sluice"]
    if sluice["fallback"] is not None or sluice.get("backend_name", backend) != backend:
        raise EvaluationError(f"{backend}: another backend answered {case.id!r}; is it up?")
    [choice] = found["choices"]
    return AdapterAnswer(choice["message"]["content"] or "", choice["finish_reason"] == "stop")


def _batch(
    client: AdminClient, asked: Sequence[tuple[str, Case]], max_tokens: int
) -> Sequence[AdapterAnswer]:
    """Return the answers of one batch, in the order of ``asked``; a line's id is its index there."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "evaluation.jsonl"
        lines = (
            {
                "custom_id": str(place),
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": _body(backend, case, max_tokens),
            }
            for place, (backend, case) in enumerate(asked)
        )
        file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        stored = client.upload("v1", "files", file=file, fields={"purpose": "batch"})
    begun = {
        "input_file_id": stored["id"],
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    }
    batch = client.post("v1", "batches", body=begun)
    while (batch := client.get("v1", "batches", batch["id"]))["status"] not in BATCH_ENDED:
        time.sleep(LOOK_S)
    if batch["status"] != "completed" or batch["request_counts"]["completed"] != len(asked):
        raise EvaluationError(
            f"batch {batch['id']} is {batch['status']} with {batch['request_counts']['failed']} failed lines;"
            f" sluice batch results {batch['id']} --errors shows them"
        )
    results = b"".join(client.pieces("v1", "files", batch["output_file_id"], "content"))
    rows = sorted(map(json.loads, results.splitlines()), key=lambda row: int(row["custom_id"]))
    return [_answer(*one, row["response"]["body"]) for one, row in zip(asked, rows, strict=True)]


def _judged(
    group: str, cases: Sequence[Case], gate: QuantizationGate, runs: Sequence[_Run], seed: int
) -> GroupResult:
    thresholds = gate.thresholds(group)
    own = [case for case in cases if case.group == group]
    scores: list[Scores] = []
    for answers in runs:
        found: dict[str, dict[str, float]] = {}
        for case in own:
            for metric, value in score(case, answers[case.id], thresholds.refusal_patterns).items():
                found.setdefault(metric, {})[case.id] = value
        scores.append(found)
    findings = judge(scores[0], scores[1], thresholds, against_base=False, seed=seed)
    return GroupResult(
        group=group,
        prompts=len(own),
        findings=findings,
        judged=group in gate.groups,
        same=sum(runs[0][case.id].text == runs[1][case.id].text for case in own) / len(own),
        unmeasured=tuple(sorted(set(thresholds.metrics) - {one.metric for one in findings})),
    )
