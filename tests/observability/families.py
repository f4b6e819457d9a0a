"""Every metric family that the gateway can show, with its labels: those of a wired gateway, and those that
appear only once there is something to report."""

from __future__ import annotations

import ast
import asyncio
import re
import tempfile
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from gateway.backends.vllm.compat.signals import SignalBoard
from gateway.backends.vllm.values import EngineShape
from gateway.config.settings import load_settings
from gateway.wiring.build import build
from observability.collectors import CanaryFigures, canary_families, plain
from observability.engine_metrics import engine_families
from observability.events import LoraFigures
from observability.scrape import ScrapeCollector

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| `(?P<name>[a-z:_0-9]+)` \| (?P<type>\w+) \| (?P<labels>[^|]*) \|")
# Metrics of the process, which the client library names.
PROCESS = re.compile(r"^process_\w+$")


@dataclass(frozen=True)
class Family:
    """A metric's type and labels."""

    type: str
    labels: tuple[str, ...]


def _of(registry: CollectorRegistry) -> dict[str, Family]:
    found: dict[str, Family] = {}
    for collector in list(registry._collector_to_names):
        for metric in collector.collect():
            labels = getattr(metric, "_labelnames", None) or getattr(collector, "_labelnames", ())
            if metric.type == "info":
                labels = metric.samples[0].labels
            suffix, kind = {"counter": ("_total", "counter"), "info": ("_info", "gauge")}.get(
                metric.type, ("", metric.type)
            )
            found[metric.name + suffix] = Family(kind, tuple(labels))
    return found


async def _wired(folder: Path) -> dict[str, Family]:
    """The families of a gateway with its routing, but without its engine."""
    settings = load_settings(
        ROOT / "sluice.yaml",
        {
            "SLUICE_STATE__URL": f"sqlite:///{folder}/state.db",
            "SLUICE_LEDGER__URL": f"sqlite+aiosqlite:///{folder}/ledger.db",
        },
    )
    gateway = build(settings, admin_key="a-key-for-tests-0123456789abcdef0123456789abcdef")
    await gateway.core.base.state.open()
    try:
        async with asyncio.TaskGroup() as loops:
            state = loops.create_task(gateway.core.base.state.run())
            await gateway.core.control.routing.start()
            metrics: Any = gateway.services.metrics
            found = _of(metrics.__self__.registry)
            state.cancel()
    finally:
        await gateway.core.base.state.close()
    return found


@cache
def families() -> dict[str, Family]:
    """All families, by the name after ``# TYPE`` in a scrape."""
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(_wired(Path(folder)))
    shape = EngineShape(max_model_len=1, block_size=1, total_blocks=1, max_num_seqs=1)
    rare = CollectorRegistry()
    figures = replace(SignalBoard().figures("demo", shape), loras=LoraFigures(1))
    rare.register(ScrapeCollector(engine_families, lambda: {"local": figures}))
    rare.register(
        ScrapeCollector(
            canary_families, lambda: CanaryFigures("r", "b", "running", 5, 1, {"errors": 0.1}, 1.0)
        )
    )
    rare.register(plain("sluice_chaos_faults", dict))
    rare.register(plain("sluice_log_lines_dropped", lambda: 0))
    return found | _of(rare)


def known_samples() -> set[str]:
    """The names of samples that a query may use."""
    names = set()
    for name, family in families().items():
        names.add(name)
        if family.type == "histogram":
            names |= {f"{name}_{part}" for part in ("bucket", "sum", "count")}
    return names


def named_in_the_code() -> set[str]:
    """Every string in the code of observability/ that is the name of a metric."""
    found = set()
    for path in (ROOT / "observability").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and re.fullmatch(r"(sluice_|vllm:)[a-z0-9_:]+", text):
                found.add(text)
    return found


def documented() -> dict[str, Family]:
    """The rows of ``docs/metrics.md``."""
    rows = {}
    for line in (ROOT / "docs/metrics.md").read_text().splitlines():
        row = ROW.match(line)
        if row is not None:
            rows[row["name"]] = Family(row["type"], tuple(re.findall(r"`(\w+)`", row["labels"])))
    return rows
