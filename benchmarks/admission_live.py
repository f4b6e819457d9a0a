"""Admission on a real gateway and engine under open-loop overload, next to the simulator's prediction.

    python -m benchmarks.admission_live --engine embedded --markdown FILE.md
    python -m benchmarks.admission_live --engine vllm

A gateway is started as a process of its own, first without admission. Closed loops with more and more callers
measure the highest rate that it serves within the SLO (its capacity) and how long its steps take. Then
requests arrive at 1, 2 and 4 times that rate, whether or not earlier ones were answered. A second gateway
with admission as shipped gets the same load. The SLO is the one that the defaults aim at. The simulator gets
the profile fitted to the closed loops, the same defaults and the same requests.

The requests are rows of the Azure excerpt with scaled lengths; tenants and priorities are drawn by a seed.
Gateway, engine and load generator share the machine, so the figures hold for this machine only. Admission
knows the lengths of the answers: an answer of an exact length needs its ``max_tokens``.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from admission.estimator import PATIENCE_S
from admission.values import AdmissionLimits
from benchmarks.admission_live_load import (
    MACHINES,
    REPOSITORY,
    TENANTS,
    Caller,
    Machine,
    caller,
    closed_loop,
    gateway,
    metric,
    open_loop,
    total,
)  # fmt: skip
from evaluation.simulator.calibration import Fit, MeasuredStep, fit
from evaluation.simulator.experiment import Kind, Setting
from evaluation.simulator.measures import RunSummary, SimulatedSlo, summarize
from evaluation.simulator.run import simulate
from evaluation.simulator.values import Arrival, Profile
from evaluation.simulator.workload import WorkloadShape, paced, rate_of, requests_of
from ops.replay.outcome import ReplayedRequest
from ops.replay.trace import read_trace

TRACE = REPOSITORY / "benchmarks" / "data" / "azure_llm_conv_2023_2000.csv"
SHAPE = WorkloadShape(prompt_scale=0.25, max_prompt=600, max_output=160, tenants=TENANTS)
LOADS = (1.0, 2.0, 4.0)
CALLERS = (1, 2, 4, 8, 16)
# A number of callers counts for capacity while this share of its answers meets the SLO, as in the simulator.
ATTAINMENT = 0.95
SHIPPED = AdmissionLimits()
SLO = SimulatedSlo(PATIENCE_S, SHIPPED.tpot_slo_s or 0.25)
NONE, OURS = "none", "sluice"


@dataclass(frozen=True, slots=True)
class Level:
    """The figures of a closed loop: ``callers`` callers, each of which asks again when it has its answer."""

    callers: int
    rate: float
    ttft_p50_s: float
    tpot_p50_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of a policy at a load, live or simulated.

    Args:
        wait_error_s: absolute error of the predicted time to the first token, median and 90th percentile.
    """

    load: float
    policy: str
    where: str
    summary: RunSummary
    wait_error_s: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """All figures of one engine; rates are in requests per second."""

    engine: str
    cores: int
    slo: SimulatedSlo
    seconds: float
    levels: tuple[Level, ...]
    capacity: float
    fit: Fit
    rows: tuple[Row, ...]


# Figures


def level_of(callers: int, outcomes: Sequence[ReplayedRequest], seconds: float) -> Level:
    """Summarize a closed loop; answers after ``seconds``, when callers begin to stop, are not counted."""
    return Level(
        callers,
        sum(one.done_s <= seconds for one in outcomes) / seconds,
        statistics.median(one.ttft_s or 0.0 for one in outcomes),
        statistics.median(one.tpot_s or 0.0 for one in outcomes if one.tpot_s is not None),
    )


def steps_of(outcomes: Sequence[ReplayedRequest], seconds: float) -> list[MeasuredStep]:
    """Return a closed loop's answers as steps of the average composition.

    A second has as many steps as one answer gets tokens in it; the tokens prefilled and decoded in that
    second are divided evenly among these steps.
    """
    whole = [one for one in outcomes if one.tpot_s and one.done_s <= seconds]
    step_s = statistics.mean(one.tpot_s or 0.0 for one in whole)
    prefill = sum(one.input_tokens - one.cached_tokens for one in whole) / seconds * step_s
    sequences = sum(one.output_tokens for one in whole) / seconds * step_s
    context = sequences * statistics.mean(one.input_tokens + one.output_tokens / 2 for one in outcomes)
    return [MeasuredStep(prefill, sequences, context, one.tpot_s or 0.0) for one in whole]


def firsts_of(outcomes: Sequence[ReplayedRequest]) -> list[MeasuredStep]:
    """Return a single caller's times to the first token, as steps that prefill one prompt."""
    return [
        MeasuredStep(one.input_tokens - one.cached_tokens, 0, 0, one.ttft_s) for one in outcomes if one.ttft_s
    ]


def profile_of(found: Fit, machine: Machine) -> Profile:
    """Return the simulator's profile of the engine."""
    return Profile(
        machine.kind,
        found.base_s,
        found.prefill_s,
        found.sequence_s,
        found.context_s,
        machine.num_blocks,
        machine.block_size,
        machine.max_num_seqs,
        machine.max_num_batched_tokens,
        unit_tokens=machine.block_size,
        reserve_prompt=machine.kind == "embedded",
    )


def predicted(
    requests: Sequence[Arrival], profile: Profile, slo: SimulatedSlo, policy: str, grace_s: float
) -> RunSummary:
    """Simulate the same requests, aborted at the same time, and return the figures."""
    setting = Setting(Kind.NONE if policy == NONE else Kind.SLUICE)
    known = [replace(one, max_tokens=one.output) for one in requests]
    simulated = simulate(known, profile, setting.policy)
    for request in simulated:
        if request.finished_at is not None and request.finished_at > requests[-1].at + grace_s:
            request.first_token_at = request.finished_at = None
            request.computed = 0
    return summarize(simulated, slo)


def wait_error(before: Mapping[float, float], after: Mapping[float, float]) -> tuple[float, float] | None:
    """Return the median and 90th percentile (s) of a histogram's growth, interpolated inside a bucket."""
    grown = sorted((edge, count - before.get(edge, 0.0)) for edge, count in after.items())
    if not grown or not grown[-1][1]:
        return None

    def at(share: float) -> float:
        wanted, lower, below = share * grown[-1][1], 0.0, 0.0
        for edge, count in grown:
            if count >= wanted:
                return (
                    lower
                    if edge == float("inf")
                    else lower + (edge - lower) * (wanted - below) / (count - below)
                )
            lower, below = edge, count
        return lower

    return at(0.5), at(0.9)


def reported_errors(url: str) -> dict[float, float]:
    """Return the histogram of the estimates' errors: counts by upper bound of a bucket."""
    found = metric(url, "sluice_admission_ttft_error_seconds_bucket")
    return {float(labels["le"]): value for labels, value in found}


# The whole run


async def measure(
    one: Caller, pool: Sequence[Arrival], seconds: float
) -> tuple[list[Level], list[list[ReplayedRequest]]]:
    """Run closed loops with more and more callers."""
    requests = _endless(pool)
    await closed_loop(one, requests, 4, 3.0)  # so that what is compiled at first use is not measured
    levels, all_outcomes = [], []
    for callers in CALLERS:
        outcomes = await closed_loop(one, requests, callers, seconds)
        levels.append(level_of(callers, outcomes, seconds))
        all_outcomes.append(outcomes)
    return levels, all_outcomes


def _endless(pool: Sequence[Arrival]) -> Iterator[Arrival]:
    number = 100_000  # part of the text, so that no prompt is sent twice
    while True:
        for arrival in pool:
            number += 1
            yield replace(arrival, number=number)


def capacity_of(
    levels: Sequence[Level], outcomes: Sequence[Sequence[ReplayedRequest]], slo: SimulatedSlo
) -> float:
    """Return the highest rate at which the answers met the SLO."""
    kept = []
    for level, answers in zip(levels, outcomes, strict=True):
        met = sum((one.ttft_s or 0) <= slo.ttft_s and (one.tpot_s or 0) <= slo.tpot_s for one in answers)
        if met >= ATTAINMENT * len(answers):
            kept.append(level.rate)
    return max(kept)


async def loads(
    url: str, one: Caller, pool: Sequence[Arrival], capacity: float, profile: Profile, slo: SimulatedSlo,
    policy: str, seconds: float,
) -> list[Row]:  # fmt: skip
    """Run open loops at all loads, and the simulator on the same requests."""
    rows, start = [], 0
    for load in LOADS:
        rate = load * capacity
        wanted = pool[start : start + max(2, round(rate * seconds))]
        start += len(wanted)
        requests = paced(wanted, rate / rate_of(wanted))
        grace_s = 2 * slo.ttft_s
        before, preempted = reported_errors(url), total(url, "vllm:num_preemptions_total")
        live = summarize(await open_loop(one, requests, grace_s), slo)
        preempted = total(url, "vllm:num_preemptions_total") - preempted
        error = None if policy == NONE else wait_error(before, reported_errors(url))
        rows.append(Row(load, policy, "live", replace(live, preemptions=int(preempted)), error))
        rows.append(Row(load, policy, "simulated", predicted(requests, profile, slo, policy, grace_s)))
        await asyncio.sleep(2.0)  # the aborted requests leave the engine
    return rows


async def examine(machine: Machine, seconds: float, level_s: float) -> Report:
    """Run the whole benchmark on one engine."""
    whole = requests_of(read_trace(TRACE), SHAPE)
    pool, seen = whole[400:], whole[:400]
    route: dict[str, object] = {"backends": [{"name": "local", "weight": 100}], "fallback": ["degraded"]}
    with tempfile.TemporaryDirectory() as folder:
        with gateway(machine, Path(folder), route, is_open=True) as url:
            async with AsyncExitStack() as stack:
                one = await caller(url, stack)
                levels, outcomes = await measure(one, seen, level_s)
                slo = SLO
                capacity = capacity_of(levels, outcomes, slo)
                steps = [step for level in outcomes for step in steps_of(level, level_s)]
                found = fit([*firsts_of(outcomes[0]), *steps])
                profile = profile_of(found, machine)
                # No request is sent twice: a fast engine uses up the trace's sample in less time.
                seconds = min(seconds, len(pool) / (capacity * sum(LOADS)))
                rows = await loads(url, one, pool, capacity, profile, slo, NONE, seconds)
        with gateway(machine, Path(folder), route, is_open=False) as url:
            async with AsyncExitStack() as stack:
                one = await caller(url, stack)
                await closed_loop(one, _endless(seen), machine.max_num_seqs // 2, level_s)
                rows += await loads(url, one, pool, capacity, profile, slo, OURS, seconds)
    return Report(
        machine.kind, os.cpu_count() or 1, slo, seconds, tuple(levels), capacity, found,
        tuple(sorted(rows, key=lambda row: row.load)),
    )  # fmt: skip


def cells_of(row: Row) -> list[str]:
    """Return the cells of a row as text."""
    one = row.summary
    error = (
        "" if row.wait_error_s is None else "{:.0f} / {:.0f}".format(*(1000 * s for s in row.wait_error_s))
    )
    return [
        f"{row.load:g} ×",
        row.policy,
        row.where,
        f"{one.goodput:.2f}",
        " / ".join(f"{100 * one.by_priority.get(rank, 0.0):.1f}" for rank in (1, 0, -1)),
        f"{one.ttft_p50_s:.2f} / {one.ttft_p99_s:.2f}",
        f"{one.preemptions}",
        f"{100 * one.wasted:.2f}",
        f"{one.fairness:.3f}",
        error,
    ]


HEADINGS = (
    "load", "policy", "", "goodput/s", "in SLO: high / normal / low %", "TTFT p50 / p99 s", "preempted",
    "wasted %", "fairness", "estimate off by p50 / p90 ms",
)  # fmt: skip


def markdown_of(report: Report) -> str:
    """Return the table as in the documentation."""
    lines = ["| " + " | ".join(HEADINGS) + " |", "|" + " --- |" * len(HEADINGS)]
    lines += ["| " + " | ".join(cells_of(row)) + " |" for row in report.rows]
    return "\n".join(lines) + "\n"


def said(report: Report) -> str:
    """Return the note below the table: how its figures were measured."""
    found, slo = report.fit, report.slo
    levels = ", ".join(f"{one.callers}: {one.rate:.2f}" for one in report.levels)
    return (
        f"{report.engine}: capacity {report.capacity:.2f} requests/s (by callers {levels}); "
        f"SLO {slo.ttft_s:g} s to the first token, {slo.tpot_s * 1e3:.1f} ms a token; "
        f"a step {found.base_s * 1e3:.2f} ms + {found.prefill_s * 1e6:.0f} µs a prompt token + "
        f"{found.sequence_s * 1e6:.0f} µs a sequence + {found.context_s * 1e9:.0f} ns a token of context "
        f"(median error {found.median_error:.0%}); {report.seconds:g} s a load, {report.cores} cores for all"
    )


def main(
    engine: Annotated[str, typer.Option(help=f"One of {', '.join(MACHINES)}.")] = "embedded",
    seconds: Annotated[float, typer.Option(min=5, help="Of arrivals at each load.")] = 60.0,
    level_seconds: Annotated[float, typer.Option(min=2, help="Of each closed loop.")] = 10.0,
    output: Annotated[Path | None, typer.Option(help="Write the figures as JSON.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the table for the documentation.")] = None,
) -> None:
    """Overload a real gateway and compare with the simulator."""
    if engine not in MACHINES:
        raise typer.BadParameter(f"no engine {engine!r}; one of {', '.join(MACHINES)}")
    report = asyncio.run(examine(MACHINES[engine], seconds, level_seconds))
    if output is not None:
        output.write_text(json.dumps(asdict(report), indent=1) + "\n", encoding="utf-8")
    if markdown is not None:
        markdown.write_text(markdown_of(report), encoding="utf-8")
    console = Console(width=150)
    console.print(said(report))
    table = Table()
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    for row in report.rows:
        table.add_row(*cells_of(row))
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
