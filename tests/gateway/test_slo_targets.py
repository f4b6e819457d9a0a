"""The SLO targets are those of the routing revision in force."""

from __future__ import annotations

from pathlib import Path

import yaml

from gateway.routing.check import KnownNames
from gateway.routing.revision import make_revision
from observability.slo_metrics import SloTargets

ROOT = Path(__file__).parents[2]
KNOWN = KnownNames(["local"], ["chat-manga-2.1"], None)


def test_targets_are_those_of_the_revision_in_force_and_are_made_once_a_revision() -> None:
    shipped = yaml.safe_load((ROOT / "routing.yaml").read_text())
    route = shipped["routes"]["self_hosted_generation"]
    revision = make_revision(1, shipped, KNOWN)
    assert revision.targets == {"self_hosted_generation": SloTargets(ttft_ms=200, total_ms=1400)}
    assert revision.targets is revision.targets
    route["slo"] = {"ttft_ms": 300, "total_ms": 2000}
    later = make_revision(2, shipped, KNOWN)
    assert later.targets == {"self_hosted_generation": SloTargets(ttft_ms=300, total_ms=2000)}
