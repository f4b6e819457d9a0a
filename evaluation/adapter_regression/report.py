"""A comparison as JSON, to store with the version, and as a table. Neither has prompts or answers."""

from __future__ import annotations

import math
from typing import Any

from rich.table import Table

from evaluation.adapter_regression.findings import finding_as_json, finding_cells
from evaluation.adapter_regression.run import BASE, AdapterComparison
from evaluation.adapter_regression.verdict import MetricFinding, MetricVerdict


def as_json(comparison: AdapterComparison) -> dict[str, Any]:
    """Return what the registry stores: the verdict, its subject, and every finding. Times are in seconds."""
    plan = comparison.plan
    return {
        "kind": "adapter_regression",
        "passed": comparison.passed,
        "candidate": plan.candidate.name,
        "candidate_sha256": comparison.candidate_sha256,
        "against": BASE if plan.active is None else plan.active.name,
        "against_sha256": comparison.active_sha256,
        "base_model": plan.model_id,
        "prompts": {
            "file": comparison.prompts.name,
            "sha256": comparison.prompts.sha256,
            "count": len(comparison.prompts.cases),
        },
        "confidence": comparison.thresholds.confidence,
        "seed": plan.seed,
        "seconds": round(comparison.seconds, 1),
        "metrics": [_finding(one) for one in comparison.findings],
        "unmeasured": list(comparison.unmeasured),
    }


def as_table(comparison: AdapterComparison) -> Table:
    """Return the comparison as a table for a terminal."""
    plan = comparison.plan
    active = BASE if plan.active is None else plan.active.name
    table = Table(title=f"{plan.candidate.name} against {active}: {len(comparison.prompts.cases)} prompts")
    table.add_column("metric")
    for name in ("prompts", active, plan.candidate.name, "worse by", "interval", "allowed"):
        table.add_column(name, justify="right")
    table.add_column("")
    for one in comparison.findings:
        table.add_row(*finding_cells(one))
    for metric in comparison.unmeasured:
        table.add_row(metric, "0", "", "", "", "", "", "[red]not measured[/]")
    return table


def explained(comparison: AdapterComparison) -> list[str]:
    """A line for each metric that keeps the candidate from passing."""
    lines = []
    for one in comparison.findings:
        if one.standing is MetricVerdict.WORSE:
            lines.append(f"{one.metric}: worse than allowed; see {', '.join(one.named) or 'the times'}")
        elif one.standing is MetricVerdict.UNSURE:
            lines.append(f"{one.metric}: {one.prompts} prompts cannot tell; more prompts narrow the interval")
    lines += (f"{metric}: has a limit, and no prompt measures it" for metric in comparison.unmeasured)
    return lines


def _finding(one: MetricFinding) -> dict[str, Any]:
    found = finding_as_json(one, "active")
    if one.at_least is not None:
        found["at_least"] = one.at_least
    if one.metric == "loss":
        found |= {
            "active_perplexity": round(math.exp(one.active), 4),
            "candidate_perplexity": round(math.exp(one.candidate), 4),
        }
    return found
