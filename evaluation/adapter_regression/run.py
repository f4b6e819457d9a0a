"""One comparison from start to end: check both folders, run both adapters, judge."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from adapters.base_model import base_model
from adapters.errors import AdapterRejected
from adapters.verify import verify
from evaluation.adapter_regression.answers import Bench, Timing
from evaluation.adapter_regression.checks import AdapterAnswer, score
from evaluation.adapter_regression.losses import Reference, reference_losses
from evaluation.adapter_regression.prompts import Case, PromptSet
from evaluation.adapter_regression.thresholds import RATIOS, Threshold, Thresholds
from evaluation.adapter_regression.verdict import MetricFinding, Scores, judge, passes

BASE = "base"
_ACTIVE, _CANDIDATE = "active", "candidate"


class ComparisonError(Exception):
    """The comparison cannot be made; the message says why."""


@dataclass(frozen=True, slots=True)
class RegressionPlan:
    """What to compare, and how.

    Args:
        candidate: the new version's folder.
        active: the served version's folder; ``None`` compares with the base model.
        model: the base model's folder.
        model_id: the public id of the served base model.
        max_lora_rank: the same as of the gateway's engine.
        max_tokens: longest answer.
        timed: number of prompts that are timed; 0: no times.
        rounds: how often each is timed; the best time counts.
        seed: of the resampling.
    """

    candidate: Path
    active: Path | None
    model: Path
    model_id: str = "demo"
    max_lora_rank: int = 64
    max_tokens: int = 128
    timed: int = 20
    rounds: int = 3
    seed: int = 0


@dataclass(frozen=True, slots=True)
class AdapterComparison:
    """The result; ``answers`` are by prompt, the active version's first."""

    plan: RegressionPlan
    candidate_sha256: str
    active_sha256: str | None
    prompts: PromptSet
    thresholds: Thresholds
    findings: tuple[MetricFinding, ...]
    answers: Mapping[str, tuple[str, str]]
    seconds: float

    @property
    def passed(self) -> bool:
        """Return whether the candidate passes."""
        return passes(self.findings) and not self.unmeasured

    @property
    def unmeasured(self) -> tuple[str, ...]:
        """Return the metrics that have a limit but that no prompt measured; times may be left out."""
        limits = self.thresholds.metrics
        limited = {name for name, one in limits.items() if one != Threshold()}
        found = {one.metric for one in self.findings}
        return tuple(sorted(limited - found - (frozenset() if self.plan.timed else RATIOS)))


def compare(plan: RegressionPlan, prompts: PromptSet, thresholds: Thresholds) -> AdapterComparison:
    """Run both adapters and judge; it takes minutes for a large model. Raises ComparisonError."""
    began = time.monotonic()
    candidate_sha256 = _checked(plan, plan.candidate)
    active_sha256 = None if plan.active is None else _checked(plan, plan.active)
    folders = {_ACTIVE: plan.active, _CANDIDATE: plan.candidate}
    tokenizer = AutoTokenizer.from_pretrained(plan.model)
    tokens = {case.id: _prompt_tokens(tokenizer, case) for case in prompts.cases}
    references = [
        Reference(case.id, tokens[case.id], _answer_tokens(tokenizer, case.reference))
        for case in prompts.cases
        if case.reference is not None
    ]
    losses = reference_losses(plan.model, folders, references)
    bench = Bench(plan.model, folders, max_lora_rank=plan.max_lora_rank, clock=time.perf_counter)
    answers = {name: bench.answer_all(name, tokens, max_tokens=plan.max_tokens) for name in folders}
    few = dict(islice(tokens.items(), plan.timed))
    times = bench.time_all(list(folders), few, rounds=plan.rounds) if few else {}
    scores = {
        name: _scores(prompts.cases, thresholds, losses[name], answers[name], times.get(name, {}))
        for name in folders
    }
    return AdapterComparison(
        plan=plan,
        candidate_sha256=candidate_sha256,
        active_sha256=active_sha256,
        prompts=prompts,
        thresholds=thresholds,
        findings=judge(
            scores[_ACTIVE],
            scores[_CANDIDATE],
            thresholds,
            against_base=plan.active is None,
            seed=plan.seed,
        ),
        answers={
            case.id: (answers[_ACTIVE][case.id].text, answers[_CANDIDATE][case.id].text)
            for case in prompts.cases
        },
        seconds=time.monotonic() - began,
    )


def _checked(plan: RegressionPlan, folder: Path) -> str:
    """Return the folder's SHA-256 after checking that it fits: what the registry would refuse is not run."""
    try:
        config = json.loads((plan.model / "config.json").read_text(encoding="utf-8"))
        fits = base_model(plan.model_id, config, max_lora_rank=plan.max_lora_rank, embedded=True)
        return verify(folder, fits).sha256
    except AdapterRejected as error:
        raise ComparisonError(f"{folder}: refused: {error}") from None
    except (OSError, ValueError) as error:
        raise ComparisonError(f"{plan.model}: no model that can be read: {error}") from None


def _prompt_tokens(tokenizer: Any, case: Case) -> tuple[int, ...]:
    messages = [message.model_dump() for message in case.messages]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def _answer_tokens(tokenizer: Any, text: str) -> tuple[int, ...]:
    return (*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id)


def _scores(
    cases: Sequence[Case],
    thresholds: Thresholds,
    losses: Mapping[str, float],
    answers: Mapping[str, AdapterAnswer],
    times: Mapping[str, Timing],
) -> Scores:
    found: dict[str, dict[str, float]] = {
        "loss": dict(losses),
        "ttft": {case: timing.ttft_s for case, timing in times.items()},
        "tpot": {case: timing.tpot_s for case, timing in times.items()},
    }
    refusals = thresholds.refusal_patterns
    for case in cases:
        for metric, value in score(case, answers[case.id], refusals).items():
            found.setdefault(metric, {})[case.id] = value
    return found
