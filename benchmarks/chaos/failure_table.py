"""Every kind of failure, before the first token and after it: the answer, the retries, the billed tokens.

Each kind of failure gets its own gateway: the embedded engine, then Bedrock's stand-in, then the degraded
answer. The failure is injected into the engine's backend (`chaos`), once or in every call. One greedy stream
is requested over HTTP and compared with a run without failures.

::

    python -m benchmarks.chaos.failure_table [--write docs/resilience.md]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from ops.chaos.request_outcome import RequestOutcome
from ops.chaos.run import ChaosRun
from ops.chaos.scenario import Scenario, ScenarioStart, Verdict
from ops.chaos.testbed import started
from resilience.failures import FailureKind

# Caused by the caller, not by a backend.
LEFT_OUT = frozenset({"cancelled_by_client"})
AFTER_TOKENS = 8
BEGIN, END = "<!-- failure table: begin -->", "<!-- failure table: end -->"
HEAD = ("failure", "when", "the caller saw", "retries, resumptions", "tokens billed / in usage")
SAW: Mapping[Verdict, str] = {
    Verdict.WHOLE: "the undisturbed answer",
    Verdict.RESUMED: "a whole answer, resumed",
    Verdict.FALLBACK: "a whole answer of a fallback target",
    Verdict.DEGRADED: "the degraded answer",
    Verdict.PARTIAL: "part of an answer, reported as incomplete",
    Verdict.ERROR: "an error",
    Verdict.LOST: "NO END",
    Verdict.WRONG: "A WRONG ANSWER",
}


async def measure(kinds: Sequence[str]) -> list[tuple[str, ...]]:
    """The table's rows."""
    rows = []
    for kind in kinds:
        with tempfile.TemporaryDirectory(prefix="sluice-chaos-") as folder:
            async with started(ScenarioStart(bedrock=True), Path(folder)) as testbed:
                for after in (0, AFTER_TOKENS):
                    for often in ("once", "always"):
                        rule = {"backend": "local", "kind": kind, "after_tokens": after, "delay_ms": 50}
                        if often == "once":
                            rule["times"] = 1
                        scenario = Scenario.model_validate(
                            {
                                "about": f"{kind}, {often}",
                                "load": {"streams": 1, "whole": 0, "deadline_ms": 20_000},
                                "faults": [
                                    {"at_s": 0, "do": {"inject": [rule]}},
                                    {"at_s": 3600, "do": {"inject": []}},
                                ],
                                "settle_s": 60,
                            }
                        )
                        report = await ChaosRun(scenario, testbed).go()
                        rows.append(_row(kind, after, often, report.outcomes[0], report.reported))
                        print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
    return rows


def _row(
    kind: str, after: int, often: str, outcome: RequestOutcome, reported: Mapping[str, float]
) -> tuple[str, ...]:
    when = f"{often}, {f'after {after} tokens' if after else 'before the first token'}"
    saw = SAW[outcome.verdict]
    if outcome.code:
        saw += f" (`{outcome.code}`)"
    if outcome.fallback:
        saw += f", `{outcome.fallback}`"
    if outcome.finish not in (None, "stop", "degraded"):
        saw += f", `{outcome.finish}`"
    retries = sum(count for name, count in reported.items() if name.startswith("sluice_retries{"))
    tried = [f"{retries:g} {'retry' if retries == 1 else 'retries'}"] if retries else []
    tried += list(outcome.seams or ())
    reported_tokens = outcome.tokens if outcome.tokens is not None else "–"
    billed = f"{outcome.billed if outcome.billed is not None else '–'} / {reported_tokens}"
    return (f"`{kind}`", when, saw, "; ".join(tried) or "–", billed)


def shown(rows: Sequence[Sequence[str]]) -> str:
    """The rows as Markdown."""
    lines = ["| " + " | ".join(HEAD) + " |", "| " + " | ".join("---" for _ in HEAD) + " |"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def written(text: str, table: str) -> str:
    """``text`` with the table between its marks, or appended if it has none."""
    block = f"{BEGIN}\n{table}\n{END}"
    if BEGIN in text and END in text:
        before, rest = text.split(BEGIN, 1)
        return before + block + rest.split(END, 1)[1]
    return f"{text.rstrip()}\n\n## Failures, as callers see them\n\n{block}\n"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="What callers see of every kind of failure.")
    parser.add_argument("--kinds", nargs="*", help="only these")
    parser.add_argument("--write", type=Path, help="put the table into this file")
    given = parser.parse_args()
    every = [kind.value for kind in FailureKind if kind.value not in LEFT_OUT] + ["slow", "hang"]
    table = shown(asyncio.run(measure(given.kinds or every)))
    print(table)
    if given.write is not None:
        given.write.write_text(written(given.write.read_text(encoding="utf-8"), table), encoding="utf-8")


if __name__ == "__main__":
    main()
