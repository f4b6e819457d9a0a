"""The lines of the rollout checklist, each a function of the facts; no I/O."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from gateway.lora.importer import AUTHOR as FROM_FILE
from ops.rollout.facts import Facts

# Fewer requests prove nothing.
LEAST_REQUESTS = 30
LEAST_REPLAYED = 200
# Shares of requests that must meet their target: the TTFT target is for the median, the total for P99.
WITHIN = {"ttft": 0.5, "total": 0.99}
LEAST_GOODPUT = 0.95
# Least share of prefix tokens, computed before by the backend, that must have been found in its cache.
LEAST_FOUND = 0.8
SOAK_S = 1_800.0
# The startup probe of deploy/k8s allows a container 90 seconds until its health check passes.
READY_WITHIN_S = 90.0
MAX_LEDGER_LAG_S = 5.0
AFTER_DRAIN_S = 30.0  # time after the drain for the engine's stop and the last rows (docs/operations.md)


class CheckVerdict(StrEnum):
    """The result of a line."""

    OK = "ok"
    WRONG = "wrong"
    MANUAL = "manual"


@dataclass(frozen=True, slots=True)
class RolloutCheck:
    """One line of the checklist. ``hint`` says what to do if it is not ok."""

    check: str
    verdict: CheckVerdict
    found: str
    hint: str = ""


# Whether the line holds (``None``: the facts do not say), what was found, and what to do if it does not hold.
Judgement = tuple[bool | None, str, str]
VERDICTS = {True: CheckVerdict.OK, False: CheckVerdict.WRONG, None: CheckVerdict.MANUAL}


def examine(facts: Facts) -> list[RolloutCheck]:
    """All lines, in the order in which an operator checks them."""
    findings = []
    for name, check in CHECKS.items():
        holds, found, hint = check(facts)
        findings.append(RolloutCheck(name, VERDICTS[holds], found, "" if holds else hint))
    return findings


def ready(facts: Facts) -> Judgement:
    failing = [name for name, holds in facts.ready.get("checks", {}).items() if not holds]
    found = ", ".join(failing) or str(facts.ready.get("status"))
    return (bool(facts.ready.get("ready")), found, "wait, or read /ready and the log")


def ready_in_time(facts: Facts) -> Judgement:
    """The gateway was ready soon enough after its start."""
    hint = "use local weights instead of a download, or a longer startup probe"
    took = next(facts.having("sluice_ready_after_seconds"), None)
    if took is None:
        return (None, "it has not been ready yet", "run the check again when it is ready")
    return (took.value <= READY_WITHIN_S, f"after {took.value:.0f} s (limit {READY_WITHIN_S:.0f})", hint)


def generates(facts: Facts) -> Judgement:
    """Every backend, fallback targets included, has just generated."""
    backends: Mapping[str, Any] = facts.deep.get("backends", {})
    states = {name: reported.get("status") for name, reported in backends.items()}
    sick = [f"{name}: {state}" for name, state in states.items() if state != "healthy"]
    found = ", ".join(sick) or f"{len(backends)} generated: {', '.join(backends)}"
    return (bool(backends) and not sick, found, "run `sluice doctor`, and read the backend's log")


def workers_fit(facts: Facts) -> Judgement:
    """Every worker serves its model, with the tokenizer and the length that the gateway assumes."""
    workers = [one for found in facts.deep.get("workers", {}).values() for one in found]
    wrong = [f"{one['url']}: {'; '.join(one['faults'])}" for one in workers if one["faults"]]
    found = "; ".join(wrong) or (f"{len(workers)} compatible" if workers else "none")
    return (not wrong, found, "`sluice doctor` shows what to change")


def _weighted(route: Mapping[str, Any]) -> list[str]:
    """The route's backends with a weight; the others get no request, also when these fail."""
    return [one["name"] for one in route["backends"] if one.get("weight", 100)]


def has_fallback(facts: Facts) -> Judgement:
    """Each route has a fallback besides the degraded text."""
    bare = [
        name
        for name, route in _routes(facts).items()
        if not {*route.get("fallback", ())} - {"degraded"} and len(_weighted(route)) < 2
    ]
    return (not bare, ", ".join(bare) or "all have one", "add a second backend to the route's `fallback`")


def real_workload(facts: Facts) -> Judgement:
    """A replay of the real workload, not of one prompt, met the SLO."""
    hint = "run sluice replay TRACE --output replay.json, then give --replay replay.json"
    if facts.replay is None:
        return (None, "no --replay file", hint)
    requests = facts.replay["requests"]
    sent, within = requests["sent"], facts.replay["goodput"]["within_slo"]
    share = within / sent if sent else 0.0
    found = f"{sent:,} sent, {requests['errors']} errors, {share:.1%} within the SLO"
    whole = sent >= LEAST_REPLAYED and not requests["errors"] and not requests["interrupted"]
    return (whole and share >= LEAST_GOODPUT, found, f"{hint} (at least {LEAST_GOODPUT:.0%}, no errors)")


def soaked(facts: Facts) -> Judgement:
    """A replay of at least half an hour ended without errors."""
    if facts.soak is None:
        hint = "replay for half an hour with several adapters, then give --soak FILE"
        return (None, "no --soak file", hint)
    requests, wall_s = facts.soak["requests"], float(facts.soak["wall_s"])
    found = f"{wall_s / 60:.0f} min, {requests['errors']} errors, {requests['unfinished']} unfinished"
    held = wall_s >= SOAK_S and not requests["errors"] and not requests["unfinished"]
    return (held, found, f"at least {SOAK_S / 60:.0f} min without an error")


def latency(facts: Facts) -> Judgement:
    """The times of first token and whole answer meet the SLO of the routes."""
    late, seen = [], 0.0
    for sample in facts.having("sluice_slo_requests_total"):
        labels, asked = sample.labels, sample.value
        objective = labels.get("objective", "")
        if asked < LEAST_REQUESTS or objective not in WITHIN:
            continue
        seen = max(seen, asked)
        share = facts.total("sluice_slo_good_total", **labels) / asked
        if share < WITHIN[objective]:
            bar = f"(at least {WITHIN[objective]:.0%})"
            late.append(f"{labels.get('route')} {objective}: {share:.1%} of {asked:,.0f} {bar}")
    if not seen:
        return (None, "too few requests yet", f"send at least {LEAST_REQUESTS} to each route")
    return (not late, "; ".join(late) or f"met over {seen:,.0f} requests", "see docs/runbooks/slo-total.md")


def prefix_hits(facts: Facts) -> Judgement:
    """Prefixes computed before are found in the cache; a change of the prompt can break that."""
    expected = facts.total("sluice_prompt_expected_cached_tokens_total")
    if not expected:
        return (None, "no prefix was repeated yet", "send requests, then run the check again")
    share = facts.total("sluice_prompt_cached_tokens_total") / expected
    found = f"{share:.1%} of {expected:,.0f} expected tokens (at least {LEAST_FOUND:.0%})"
    return (share >= LEAST_FOUND, found, "see docs/prompts.md: what changes a prefix")


def gated_adapters(facts: Facts) -> Judgement:
    """Every serving adapter has passed an evaluation.

    Adapters of ``adapters.file`` are active from the start, without an evaluation: the operator must decide.
    Any other serving adapter without a passed and signed evaluation, or one that failed, is wrong.
    """
    hint = "sluice evaluate adapter NEW --against OLD --post URL"
    serving = [one for one in facts.adapters.get("adapters", ()) if one.get("state") in ("canary", "active")]
    reports = [one.get("evaluation") or {} for one in serving]
    passed = [bool(report.get("passed") and report.get("signed")) for report in reports]
    bare = [one for one, good in zip(serving, passed, strict=True) if not good]
    filed = [one["id"] for one in bare if one.get("author") == FROM_FILE and one.get("evaluation") is None]
    wrong = [one["id"] for one in bare if one["id"] not in filed]
    if filed and not wrong:
        return (None, f"from adapters.file, never evaluated: {', '.join(filed)}", hint)
    if wrong:
        return (False, f"without a passed evaluation: {', '.join(wrong)}", hint)
    return (True, f"{len(serving)} in service, all passed", hint)


def gated_backends(facts: Facts) -> Judgement:
    """On routes that require it, every backend but the one with the largest weight passed an evaluation."""
    hint = "sluice evaluate variant --base A --candidate B --post"
    faults, wrong, asked = facts.evaluations.get("faults", {}), [], 0
    gated = [route for route in _routes(facts).values() if route.get("requires_evaluation")]
    for route in gated:
        weighted = sorted(route["backends"], key=lambda one: -one.get("weight", 100))[1:]
        names = [one["name"] for one in weighted if one.get("weight", 100)]
        asked += len(names)
        wrong += [faults[name] for name in names if name in faults]
    if not gated:
        return (True, "no route requires one", hint)
    all_passed = f"{asked} beside the largest of each route, all passed"
    return (not wrong, "; ".join(dict.fromkeys(wrong)) or all_passed, hint)


def canary_first(facts: Facts) -> Judgement:
    """The last canary was not rolled back."""
    last = facts.canary.get("canary")
    hint = "find out why with sluice canary status, before the next one"
    if last is None:
        return (None, "none yet", "start one: sluice canary start ROUTE BACKEND")
    return (last.get("phase") != "rolled_back", str(last.get("phase")), hint)


def shadowed(facts: Facts) -> Judgement:
    """The other backend's answers have been compared."""
    if not any(route.get("shadow") for route in _routes(facts).values()):
        return (None, "no route has a shadow", "set `shadow: {backend, sample}` in a route: docs/shadow.md")
    pairs = int(facts.shadow.get("pairs", 0))
    hint = f"let the shadow run until there are {LEAST_REPLAYED} pairs"
    return (pairs >= LEAST_REPLAYED, f"{pairs:,} pairs", hint)


def can_go_back(facts: Facts) -> Judgement:
    if isinstance(facts.rollback, str):
        return (None, facts.rollback, "make a first change with `sluice routes apply`")
    changes = len(facts.rollback.get("changes", ()))
    return (True, f"a rollback would change {changes} settings", "")


def in_force(facts: Facts) -> Judgement:
    behind = facts.routing.get("behind") or facts.total("sluice_routing_behind")
    found = f"revision {facts.routing.get('revision')}" + (f", behind: {behind}" if behind else "")
    return (not behind, found, "see docs/runbooks/state-behind.md")


def ledger(facts: Facts) -> Judgement:
    """Usage rows reach the database in time, and none was lost."""
    lag_s, lost = facts.total("sluice_ledger_lag_seconds"), facts.total("sluice_ledger_rows_lost_total")
    found = f"{lag_s:.1f} s behind, {lost:,.0f} rows lost"
    return (lag_s <= MAX_LEDGER_LAG_S and not lost, found, "check that its database is up: docs/ledger.md")


def keys_on(facts: Facts) -> Judgement:
    """The operator API requires a key."""
    found = "/admin answers without a key" if facts.open_admin else "required"
    return (not facts.open_admin, found, "set auth.enabled: true and SLUICE_ADMIN_KEY")


def alerts(facts: Facts) -> Judgement:
    """Prometheus has loaded Sluice's rules, can evaluate them, and none fires."""
    hint = "add deploy/prometheus/*.yaml to rule_files of Prometheus"
    if facts.rules is None:
        return (None, "no --prometheus", "give --prometheus http://HOST:9090")
    if isinstance(facts.rules, str):
        return (False, facts.rules, "check that Prometheus can be reached")
    groups: Sequence[Mapping[str, Any]] = facts.rules.get("data", {}).get("groups", ())
    ours = [rule for group in groups if str(group["name"]).startswith("sluice") for rule in group["rules"]]
    sick = [str(rule["name"]) for rule in ours if rule.get("health") == "err"]
    firing = [str(rule["name"]) for rule in ours if rule.get("state") == "firing"]
    count = sum(rule.get("type") == "alerting" for rule in ours)
    found = f"{count} alerts"
    if sick:
        found += f"; cannot be evaluated: {', '.join(sick)}"
    if firing:
        found += f"; firing: {', '.join(firing)}"
    return (bool(count) and not sick and not firing, found, hint if not firing else "see docs/runbooks")


def time_to_drain(facts: Facts) -> Judgement:
    """SIGKILL comes after the drain and the time that the stop needs after it."""
    hint = "raise terminationGracePeriodSeconds or TimeoutStopSec above it"
    if facts.drain_s is None or facts.grace_s is None:
        return (None, "no --config and --grace", "give --config FILE and --grace SECONDS")
    needed_s = facts.drain_s + AFTER_DRAIN_S
    found = f"{facts.grace_s:.0f} s, for a drain of {facts.drain_s:.0f} s and {AFTER_DRAIN_S:.0f} s after it"
    return (facts.grace_s >= needed_s, found, hint)


CHECKS: Mapping[str, Callable[[Facts], Judgement]] = {
    "ready": ready,
    "ready soon after start": ready_in_time,
    "every backend generates": generates,
    "workers fit": workers_fit,
    "each route has a fallback": has_fallback,
    "keys": keys_on,
    "revision in force": in_force,
    "rollback possible": can_go_back,
    "ledger": ledger,
    "alert rules loaded": alerts,
    "time to drain": time_to_drain,
    "latency within the routes' SLO": latency,
    "prefix cache hits as expected": prefix_hits,
    "adapters passed an evaluation": gated_adapters,
    "backends passed an evaluation": gated_backends,
    "last canary": canary_first,
    "shadow comparison": shadowed,
    "benchmarked on real traffic": real_workload,
    "soak test": soaked,
}


def _routes(facts: Facts) -> Mapping[str, Any]:
    routes: Mapping[str, Any] = facts.routing.get("config", {}).get("routes", {})
    return routes
