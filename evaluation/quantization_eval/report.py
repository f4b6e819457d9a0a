"""An evaluation as JSON and as a table. Neither has prompts or answers."""

from __future__ import annotations

import hashlib
from typing import Any

from rich.table import Table

from evaluation.adapter_regression.findings import finding_as_json, finding_cells
from evaluation.quantization_eval.run import Evaluation


def as_json(done: Evaluation) -> dict[str, Any]:
    """Return the verdict, its subject, and every finding."""
    return {
        "kind": "backend_evaluation",
        "passed": done.passed,
        "base": done.base,
        "candidate": done.candidate,
        "base_digest": done.digests[done.base],
        "candidate_digest": done.digests[done.candidate],
        "prompts": {
            "file": done.prompts.name,
            "sha256": done.prompts.sha256,
            "count": len(done.prompts.cases),
        },
        "thresholds_sha256": hashlib.sha256(done.gate.model_dump_json().encode()).hexdigest(),
        "confidence": done.gate.confidence,
        "seed": done.seed,
        "seconds": round(done.seconds, 1),
        "groups": [
            {
                "group": one.group,
                "prompts": one.prompts,
                "passed": one.passed,
                "judged": one.judged,
                "same_answers": round(one.same, 4),
                "unmeasured": list(one.unmeasured),
                "metrics": [
                    {**finding_as_json(finding, "base"), "at_least": finding.at_least}
                    for finding in one.findings
                ],
            }
            for one in done.groups
        ],
    }


def as_table(done: Evaluation) -> Table:
    """Return the evaluation as a table for a terminal."""
    table = Table(title=f"{done.candidate} against {done.base}: {len(done.prompts.cases)} prompts")
    table.add_column("group")
    table.add_column("metric")
    for name in ("prompts", "base", "candidate", "worse by", "interval", "allowed"):
        table.add_column(name, justify="right")
    table.add_column("")
    for one in done.groups:
        for finding in one.findings:
            table.add_row(one.group, *finding_cells(finding))
        for metric in one.unmeasured:
            table.add_row(one.group, metric, "0", "", "", "", "", "", "[red]not measured[/]")
        table.add_row("", "same answers", str(one.prompts), "", f"{one.same:.1%}")
        table.add_section()
    return table
