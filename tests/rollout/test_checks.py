"""The rollout checklist: each check passes for good facts and fails for bad ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ops.rollout.checks import CHECKS, CheckVerdict, RolloutCheck, examine
from ops.rollout.facts import Facts

PROMOTED = [{"name": "local", "weight": 100}, {"name": "pool", "weight": 0}]
ROUTE = {"backends": [{"name": "local", "weight": 100}], "fallback": ["bedrock", "degraded"]}
SHADOWED = {**ROUTE, "shadow": {"backend": "bedrock", "sample": 0.05}}


# Samples of a metric: labels and value.
Samples = list[tuple[dict[str, str], float]]


def page(samples: dict[str, Samples]) -> str:
    """The samples as the text of ``/metrics``."""
    lines = []
    for name, found in samples.items():
        for labels, value in found:
            shown = ",".join(f'{key}="{text}"' for key, text in labels.items())
            lines.append(f"{name}{{{shown}}} {value}\n")
    return "".join(lines)


def slo(objective: str, asked: float, good: float) -> dict[str, Samples]:
    labels = {"route": "chat", "objective": objective}
    return {"sluice_slo_requests_total": [(labels, asked)], "sluice_slo_good_total": [(labels, good)]}


def replayed(**changed: Any) -> dict[str, Any]:
    requests = {"sent": 1_000, "errors": 0, "unfinished": 0, "interrupted": False, **changed}
    return {"requests": requests, "goodput": {"within_slo": 990}, "wall_s": 3_600.0}


def rules(**changed: Any) -> dict[str, Any]:
    rule = {"name": "SluiceDown", "type": "alerting", "health": "ok", "state": "inactive", **changed}
    return {
        "data": {"groups": [{"name": "sluice-gateway", "rules": [rule]}, {"name": "others", "rules": []}]}
    }


SAMPLES: dict[str, Samples] = {
    **slo("total", 1_000, 995),
    "sluice_ready_after_seconds": [({}, 41.0)],
    "sluice_prompt_expected_cached_tokens_total": [({}, 1_000.0)],
    "sluice_prompt_cached_tokens_total": [({}, 950.0)],
    "sluice_ledger_lag_seconds": [({}, 0.2)],
}
GOOD = Facts(
    ready={"ready": True, "status": "ready", "checks": {"workers_ready": True}},
    deep={"backends": {"local": {"status": "healthy"}, "bedrock": {"status": "healthy"}}},
    routing={"revision": 7, "behind": None, "config": {"routes": {"chat": SHADOWED}}},
    rollback={"changes": [{"path": "routes.chat"}]},
    adapters={"adapters": [{"id": "a", "state": "active", "evaluation": {"passed": True, "signed": True}}]},
    canary={"canary": {"phase": "done"}},
    shadow={"pairs": 500},
    metrics=page(SAMPLES),
    rules=rules(),
    replay=replayed(),
    soak=replayed(),
    drain_s=120.0,
    grace_s=180.0,
)


def having(**samples: Samples) -> Facts:
    return replace(GOOD, metrics=page({**SAMPLES, **samples}))


def of(facts: Facts, check: str) -> RolloutCheck:
    return next(finding for finding in examine(facts) if finding.check == check)


def test_a_gateway_that_meets_every_line_passes_every_line() -> None:
    findings = examine(GOOD)
    assert [finding for finding in findings if finding.verdict is not CheckVerdict.OK] == []
    assert len({finding.check for finding in findings}) == len(CHECKS)


@pytest.mark.parametrize(
    ("check", "facts"),
    [
        ("ready", replace(GOOD, ready={"ready": False, "checks": {"model_loaded": False}})),
        ("ready soon after start", having(sluice_ready_after_seconds=[({}, 91.0)])),
        ("every backend generates", replace(GOOD, deep={"backends": {"local": {"status": "unhealthy"}}})),
        ("every backend generates", replace(GOOD, deep={"backends": {}})),
        (
            "each route has a fallback",
            replace(GOOD, routing={"config": {"routes": {"chat": {**ROUTE, "fallback": ["degraded"]}}}}),
        ),
        (
            "each route has a fallback",
            replace(GOOD, routing={"config": {"routes": {"chat": {"backends": PROMOTED}}}}),
        ),
        (
            "workers fit",
            replace(
                GOOD, deep={**GOOD.deep, "workers": {"pool": [{"url": "http://w", "faults": ["differs"]}]}}
            ),
        ),
        (
            "adapters passed an evaluation",
            replace(
                GOOD, adapters={"adapters": [{"id": "a", "state": "active", "evaluation": {"passed": True}}]}
            ),
        ),
        ("keys", replace(GOOD, open_admin=True)),
        ("revision in force", replace(GOOD, routing={**GOOD.routing, "behind": 8})),
        ("ledger", having(sluice_ledger_lag_seconds=[({}, 9.0)])),
        ("ledger", having(sluice_ledger_rows_lost_total=[({}, 1.0)])),
        ("alert rules loaded", replace(GOOD, rules="no answer")),
        ("alert rules loaded", replace(GOOD, rules={"data": {"groups": []}})),
        ("alert rules loaded", replace(GOOD, rules=rules(health="err"))),
        ("alert rules loaded", replace(GOOD, rules=rules(state="firing"))),
        ("time to drain", replace(GOOD, grace_s=130.0)),
        ("latency within the routes' SLO", having(**slo("total", 1_000, 980))),
        ("latency within the routes' SLO", having(**slo("ttft", 1_000, 499))),
        ("prefix cache hits as expected", having(sluice_prompt_cached_tokens_total=[({}, 700.0)])),
        (
            "adapters passed an evaluation",
            replace(GOOD, adapters={"adapters": [{"id": "a", "state": "active", "author": "key_1"}]}),
        ),
        ("last canary", replace(GOOD, canary={"canary": {"phase": "rolled_back"}})),
        ("shadow comparison", replace(GOOD, shadow={"pairs": 3})),
        ("benchmarked on real traffic", replace(GOOD, replay=replayed(errors=1))),
        ("benchmarked on real traffic", replace(GOOD, replay=replayed(sent=20))),
        ("soak test", replace(GOOD, soak={**replayed(), "wall_s": 600.0})),
        ("soak test", replace(GOOD, soak=replayed(unfinished=2))),
    ],
)
def test_a_line_that_does_not_hold_is_wrong_and_says_what_to_do(check: str, facts: Facts) -> None:
    finding = of(facts, check)
    assert finding.verdict is CheckVerdict.WRONG
    assert finding.found
    assert finding.hint
    assert sum(one.verdict is CheckVerdict.WRONG for one in examine(facts)) == 1


def test_what_a_gateway_cannot_tell_is_asked_of_the_operator() -> None:
    bare = replace(
        GOOD, metrics="", rules=None, replay=None, soak=None, drain_s=None, rollback="no earlier revision",
        canary={"canary": None}, routing={"revision": 1, "config": {"routes": {"chat": ROUTE}}},
    )  # fmt: skip
    by_hand = [finding for finding in examine(bare) if finding.verdict is CheckVerdict.MANUAL]
    assert len(by_hand) == 10
    assert all(finding.hint for finding in by_hand)
    assert CheckVerdict.WRONG not in {finding.verdict for finding in examine(bare)}


def test_few_requests_prove_nothing() -> None:
    assert of(having(**slo("total", 29, 0)), "latency within the routes' SLO").verdict is CheckVerdict.MANUAL


def adapters(*versions: dict[str, Any]) -> RolloutCheck:
    serving = [{"state": "active", "evaluation": None, **version} for version in versions]
    return of(replace(GOOD, adapters={"adapters": serving}), "adapters passed an evaluation")


def test_adapters_that_came_with_the_file_are_the_operators_to_answer_for() -> None:
    filed, passed = (
        {"id": "a", "author": "adapters.file"},
        {"id": "b", "evaluation": {"passed": True, "signed": True}},
    )
    check = adapters(filed, passed)
    assert (check.verdict, check.found) == (CheckVerdict.MANUAL, "from adapters.file, never evaluated: a")


def test_adapters_of_the_file_that_failed_and_those_forced_past_it_are_wrong() -> None:
    failed = {"id": "a", "author": "adapters.file", "evaluation": {"passed": False}}
    forced, filed = {"id": "b", "author": "key_1"}, {"id": "c", "author": "adapters.file"}
    check = adapters(failed, forced, filed)
    assert (check.verdict, check.found) == (CheckVerdict.WRONG, "without a passed evaluation: a, b")


def test_backends_of_routes_that_require_an_evaluation_are_named_if_they_have_none() -> None:
    def backends(*shares: float, **route: Any) -> RolloutCheck:
        names = ["local", "bedrock"][: len(shares)]
        weighted = [{"name": name, "weight": share} for name, share in zip(names, shares, strict=True)]
        config = {"routes": {"chat": {**SHADOWED, "backends": weighted, **route}}}
        faults = {"faults": {"bedrock": "bedrock has none", "local": "local has none"}}
        return of(
            replace(GOOD, routing={**GOOD.routing, "config": config}, evaluations=faults),
            "backends passed an evaluation",
        )

    assert backends(90, 10).found == "no route requires one"
    wrong = backends(90, 10, requires_evaluation=True)
    assert (wrong.verdict, wrong.found) == (CheckVerdict.WRONG, "bedrock has none")
    for shares in ((100,), (100, 0)):
        alone = backends(*shares, requires_evaluation=True)
        assert alone.verdict is CheckVerdict.OK
        assert alone.found == "0 beside the largest of each route, all passed"
