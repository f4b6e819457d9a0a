"""One comparison from beginning to end: both models answer every prompt, group by group it is judged."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from engine.errors import EngineStartError
from evaluation.adapter_regression.answers import Bench
from evaluation.adapter_regression.checks import AdapterAnswer, score
from evaluation.adapter_regression.losses import Reference, reference_losses
from evaluation.adapter_regression.prompts import Case, PromptSet
from evaluation.adapter_regression.verdict import MetricFinding, Scores, judge, passes
from evaluation.quantization_eval.gate import QuantizationGate

_MODEL = "model"


class EvaluationError(Exception):
    """The evaluation cannot be made; the message says why."""


@dataclass(frozen=True, slots=True)
class GroupResult:
    """One group of prompts.

    Args:
        findings: by metric.
        judged: whether the gate says anything of this group.
        same: share of prompts that both answered with the same text.
    """

    group: str
    prompts: int
    findings: tuple[MetricFinding, ...]
    judged: bool
    same: float

    @property
    def passed(self) -> bool:
        """Whether nothing is worse than allowed or left open."""
        return not self.judged or passes(self.findings)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What was found; ``answers`` by prompt, the base's first."""

    base: Path
    candidate: Path
    prompts: PromptSet
    gate: QuantizationGate
    groups: tuple[GroupResult, ...]
    answers: Mapping[str, tuple[str, str]]
    seed: int
    seconds: float

    @property
    def passed(self) -> bool:
        """The verdict: every group of the gate is there, and has passed."""
        found = {one.group for one in self.groups}
        return found >= set(self.gate.groups) and all(one.passed for one in self.groups)


def evaluate(
    base: Path,
    candidate: Path,
    prompts: PromptSet,
    gate: QuantizationGate,
    *,
    max_tokens: int = 96,
    seed: int = 0,
) -> Evaluation:
    """Run both and judge. Raises EvaluationError."""
    began = time.monotonic()
    missing = sorted(set(gate.groups) - {case.group for case in prompts.cases})
    if missing:
        raise EvaluationError(f"{prompts.name}: no prompts of group {', '.join(missing)}, which are judged")
    try:
        tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (base, candidate)]
        tokens = [_prompt_tokens(one, prompts.cases) for one in tokenizers]
        if tokens[0] != tokens[1]:
            raise EvaluationError(f"{candidate}: another tokenizer or chat template than {base}'s")
        runs = [
            _run(folder, tokenizers[0], tokens[0], prompts.cases, max_tokens=max_tokens)
            for folder in (base, candidate)
        ]
    except (OSError, ValueError, EngineStartError) as error:
        raise EvaluationError(f"cannot be loaded: {str(error).splitlines()[0]}") from None
    groups = dict.fromkeys(case.group for case in prompts.cases)
    return Evaluation(
        base=base,
        candidate=candidate,
        prompts=prompts,
        gate=gate,
        groups=tuple(_judged(group, prompts.cases, gate, runs, seed) for group in groups),
        answers={case.id: (runs[0][0][case.id].text, runs[1][0][case.id].text) for case in prompts.cases},
        seed=seed,
        seconds=time.monotonic() - began,
    )


_Run = tuple[Mapping[str, AdapterAnswer], Mapping[str, float]]


def _run(
    folder: Path,
    tokenizer: Any,
    tokens: Mapping[str, tuple[int, ...]],
    cases: Sequence[Case],
    *,
    max_tokens: int,
) -> _Run:
    """Greedy answers, and the losses on the references."""
    bench = Bench(folder, {_MODEL: None}, max_lora_rank=1, clock=time.perf_counter)
    answers = bench.answer_all(_MODEL, tokens, max_tokens=max_tokens)
    references = [
        Reference(
            case.id,
            tokens[case.id],
            (*tokenizer.encode(case.reference, add_special_tokens=False), tokenizer.eos_token_id),
        )
        for case in cases
        if case.reference is not None
    ]
    losses = reference_losses(folder, {_MODEL: None}, references) if references else {_MODEL: {}}
    return answers, losses[_MODEL]


def _judged(
    group: str, cases: Sequence[Case], gate: QuantizationGate, runs: Sequence[_Run], seed: int
) -> GroupResult:
    thresholds = gate.thresholds(group)
    own = [case for case in cases if case.group == group]
    scores: list[Scores] = []
    for answers, losses in runs:
        found: dict[str, dict[str, float]] = {
            "loss": {case.id: losses[case.id] for case in own if case.id in losses}
        }
        for case in own:
            for metric, value in score(case, answers[case.id], thresholds.refusal_patterns).items():
                found.setdefault(metric, {})[case.id] = value
        scores.append(found)
    same = sum(runs[0][0][case.id].text == runs[1][0][case.id].text for case in own)
    return GroupResult(
        group=group,
        prompts=len(own),
        findings=judge(scores[0], scores[1], thresholds, against_base=False, seed=seed),
        judged=group in gate.groups,
        same=same / len(own),
    )


def _prompt_tokens(tokenizer: Any, cases: Sequence[Case]) -> dict[str, tuple[int, ...]]:
    found = {}
    for case in cases:
        messages = [message.model_dump() for message in case.messages]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        found[case.id] = tuple(tokenizer.encode(text, add_special_tokens=False))
    return found
