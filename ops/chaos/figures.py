"""Reads the gateway's metrics, ledger and log, and the resources of its process."""

import json
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import psutil

from observability.metrics_text import samples_of

# Counters whose growth the report shows, series by series.
REPORTED = (
    "sluice_backend_failures", "sluice_retries", "sluice_retries_refused", "sluice_recovered",
    "sluice_resumed_streams", "sluice_fallbacks", "sluice_oom_contained", "sluice_engine_restarts",
    "sluice_fallback_leg_skipped", "sluice_chaos_faults", "sluice_hedged_requests", "sluice_worker_ejections",
)  # fmt: skip
# Gauges that must be 0 when all requests have ended.
IDLE = (
    "sluice_requests_in_flight", "sluice_admission_in_flight", "vllm:num_requests_running",
    "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scrape:
    """One scrape of ``/metrics``: counters by series, and the sum of each of :data:`IDLE`."""

    counters: Mapping[str, float]
    idle: Mapping[str, float]

    @property
    def at_rest(self) -> bool:
        return not any(self.idle.values())


def read_metrics(text: str) -> Scrape:
    counters: dict[str, float] = {}
    idle = dict.fromkeys(IDLE, 0.0)
    for sample in samples_of(text, *IDLE, *(f"{name}_total" for name in REPORTED)):
        if sample.name in idle:
            idle[sample.name] += sample.value
        else:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            counters[f"{sample.name.removesuffix('_total')}{{{labels}}}"] = sample.value
    return Scrape(counters, idle)


def grown(before: Scrape, after: Scrape) -> dict[str, float]:
    reported = {name: value - before.counters.get(name, 0.0) for name, value in after.counters.items()}
    return {name: value for name, value in reported.items() if value}


@dataclass(frozen=True, slots=True)
class Holdings:
    """Resources of a process: numbers of threads, file descriptors and children, and memory in MiB."""

    threads: int
    descriptors: int
    children: int
    rss_mib: float


def holdings_of(pid: int) -> Holdings:
    """The current resources of a process. Raises psutil.Error when it has ended."""
    process = psutil.Process(pid)
    return Holdings(
        process.num_threads(),
        process.num_fds(),
        len(process.children(recursive=True)),
        process.memory_info().rss / 2**20,
    )


def read_ledger(path: Path, prefix: str) -> dict[str, list[int]]:
    """Output tokens of each ledger row, by request id, for ids that begin with ``prefix``; read-only."""
    found: dict[str, list[int]] = {}
    query = "select request_id, output_tokens from generations where substr(request_id, 1, ?) = ?"
    place = f"{path.absolute().as_uri()}?mode=ro"
    with closing(sqlite3.connect(place, uri=True, timeout=10)) as connection:
        for request_id, tokens in connection.execute(query, (len(prefix), prefix)):
            found.setdefault(request_id, []).append(tokens)
    return found


def read_seams(log: Path, prefix: str) -> dict[str, tuple[str, ...]]:
    """From the log, where answers were resumed, by request id; for ids that begin with ``prefix``."""
    found = {}
    with log.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            # The last line may be half written.
            if prefix not in line or not line.startswith("{") or not line.endswith("\n"):
                continue
            reported = json.loads(line)
            if reported.get("event") == "request":
                seams = reported.get("seams") or ()
                found[reported["request_id"]] = tuple(
                    f"{seam['source']}→{seam['target']} {seam['mode']} at {seam['tokens']}" for seam in seams
                )
    return found
