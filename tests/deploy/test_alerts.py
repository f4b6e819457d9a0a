"""Prometheus' own tool tests the rules: they are valid, and each alert fires only when it should."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from ops.cli.main import app
from tests.observability.families import known_samples

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy/prometheus"
CASES = sorted((Path(__file__).parent / "alerts").glob("*.yaml"))
SECTIONS = ("What it means", "First look", "What to do", "How to know it is over")


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((RULES / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def promtool(*arguments: str | Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed")
    ran = subprocess.run(
        ["promtool", *map(str, arguments)],
        # 20 % less CPU than with Go's default of 100, for 60 MB of memory; and 25 % less without threads that wait.
        env={**os.environ, "GOGC": "400", "GOMAXPROCS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_rules_and_the_scrape_configuration_are_valid() -> None:
    promtool("check", "rules", RULES / "recording.yaml", RULES / "alerts.yaml")
    promtool("check", "config", RULES / "prometheus.yaml")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)
def test_alerts_fire_and_stay_quiet_as_they_should(case: Path) -> None:
    promtool("test", "rules", case)


def test_each_alert_is_shown_to_fire_and_to_stay_quiet() -> None:
    fired, quiet = set(), set()
    for case in CASES:
        for group in yaml.safe_load(case.read_text())["tests"]:
            for asked in group["promql_expr_test"]:
                [name] = re.findall(r'alertname="(\w+)"', asked["expr"])
                (fired if asked["exp_samples"] else quiet).add(name)
    names = {alert["alert"] for alert in alerts()}
    assert len(names) == len(alerts()) and len(names) > 20
    assert names - fired == set(), "never shown to fire"
    assert names - quiet == set(), "never shown to stay quiet"
    assert (fired | quiet) - names == set(), "no alert of that name"


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: str(alert["alert"]))
def test_each_alert_says_how_urgent_it_is_and_has_a_runbook(alert: dict[str, Any]) -> None:
    assert alert["labels"]["severity"] in {"page", "ticket"}
    notes = alert["annotations"]
    assert notes["summary"] and notes["description"]
    runbook = ROOT / notes["runbook_url"]
    assert runbook.parent == ROOT / "docs/runbooks"
    text = runbook.read_text()
    assert f"`{alert['alert']}`" in text
    assert [line[3:] for line in text.splitlines() if line.startswith("## ")] == list(SECTIONS)
    assert "```sh" in text, "the first look is a command"


def test_the_runbook_of_a_long_queue_has_the_wait_of_its_alert() -> None:
    [alert] = [one for one in alerts() if one["alert"] == "SluiceQueueLong"]
    (wait,) = re.findall(r"> ([\d.]+)", alert["expr"])
    page = (ROOT / alert["annotations"]["runbook_url"]).read_text(encoding="utf-8")
    assert f"waits more than {wait} seconds" in page and f"p95_rate5m` is below {wait}" in page


def test_no_runbook_is_without_its_alert() -> None:
    linked = {alert["annotations"]["runbook_url"] for alert in alerts()}
    there = {f"docs/runbooks/{path.name}" for path in (ROOT / "docs/runbooks").glob("*.md")}
    assert there - linked == {"docs/runbooks/README.md"}
    readme = (ROOT / "docs/runbooks/README.md").read_text()
    assert {link for link in linked if Path(link).name not in readme} == set()


def words() -> set[tuple[str, ...]]:
    """Every command of `sluice`."""

    def below(group: Any, before: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        for name, command in getattr(group, "commands", {}).items():
            yield (*before, name)
            yield from below(command, (*before, name))

    return set(below(typer.main.get_command(app), ()))


def test_runbooks_name_only_metrics_commands_and_settings_that_there_are() -> None:
    recorded = set(re.findall(r"record: (\S+)", (RULES / "recording.yaml").read_text()))
    configuration = (ROOT / "docs/configuration.md").read_text()
    sections = "admission|engine|resilience|ledger|state|tracing|server|backends|fallback"
    for path in sorted((ROOT / "docs/runbooks").glob("*.md")):
        text = path.read_text()
        metrics = re.findall(r"\b(?:sluice_[a-z0-9_]+[a-z0-9]|sluice:[a-z0-9_:]+|vllm:[a-z0-9_]+)\b", text)
        assert set(metrics) - known_samples() - recorded == set(), path.name
        for key in re.findall(rf"`((?:{sections})\.[a-z_.<>]+)`", text):
            assert f"`{key}`" in configuration, f"{path.name}: {key}"
        for word, further in re.findall(r"(?:`|^)sluice ([a-z]+)(?: ([a-z][a-z-]+))?", text, re.MULTILINE):
            assert ((word, further) if further else (word,)) in words(), f"{path.name}: {word} {further}"
        for link in re.findall(r"\]\(([a-z-]+\.md)\)", text):
            assert (path.parent / link).exists(), f"{path.name}: {link}"
