"""Each line of the checklist as a function of the facts; no I/O."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from gateway.lora.importer import AUTHOR as FROM_FILE
from ops.rollout.facts import Facts

# Fewer requests say nothing.
LEAST_REQUESTS = 30
LEAST_REPLAYED = 200
# Shares that must meet their target: the TTFT target is a median's, that of the total a 99th percentile's.
WITHIN = {"ttft": 0.5, "total": 0.99}
LEAST_GOODPUT = 0.95
# Of the prefix tokens that the backend had computed before, so many must have been found in its cache.
LEAST_FOUND = 0.8
SOAK_S = 1_800.0
# The startup probe of deploy/k8s allows a container 90 seconds until its health check passes.
READY_WITHIN_S = 90.0
MAX_LEDGER_LAG_S = 5.0
# After the drain: the engine's stop, the last rows (docs/operations.md).
AFTER_DRAIN_S = 30.0


class CheckVerdict(StrEnum):
    """The result of a line."""

    OK = "ok"
    WRONG = "wrong"
    MANUAL = "manual"


@dataclass(frozen=True, slots=True)
class RolloutCheck:
    """One line. ``hint`` says what to do when it is not ok."""

    check: str
    verdict: CheckVerdict
    found: str
    hint: str = ""


Check = Callable[[Facts], RolloutCheck]


def examine(facts: Facts) -> list[RolloutCheck]:
    """Every line, in the order in which an operator would go through them."""
    return [check(facts) for check in CHECKS]


def _judged(check: str, holds: bool, found: str, hint: str) -> RolloutCheck:
    return RolloutCheck(check, CheckVerdict.OK if holds else CheckVerdict.WRONG, found, "" if holds else hint)


def _manual(check: str, found: str, hint: str) -> RolloutCheck:
    return RolloutCheck(check, CheckVerdict.MANUAL, found, hint)


def ready(facts: Facts) -> RolloutCheck:
    """The gateway takes traffic."""
    failing = [name for name, holds in facts.ready.get("checks", {}).items() if not holds]
    found = ", ".join(failing) or str(facts.ready.get("status"))
    return _judged("ready", bool(facts.ready.get("ready")), found, "wait, or see what /ready and the log say")


def ready_in_time(facts: Facts) -> RolloutCheck:
    """It was ready soon enough after its start."""
    check, hint = "ready soon after start", "local weights instead of a download; a longer startup probe"
    found = list(facts.having("sluice_ready_after_seconds"))
    if not found:
        return _manual(check, "it was not ready yet", "ask again once it was")
    took_s = found[0][1]
    return _judged(check, took_s <= READY_WITHIN_S, f"after {took_s:.0f} s (bar {READY_WITHIN_S:.0f})", hint)


def generates(facts: Facts) -> RolloutCheck:
    """Every backend, fallback targets included, has just generated."""
    backends: Mapping[str, Any] = facts.deep.get("backends", {})
    sick = [
        f"{name}: {reported.get('status')}"
        for name, reported in backends.items()
        if reported.get("status") != "healthy"
    ]
    found = ", ".join(sick) or f"{len(backends)} generated: {', '.join(backends)}"
    hint = "`sluice doctor`, and the backend's own log"
    return _judged("every backend generates", bool(backends) and not sick, found, hint)


def workers_fit(facts: Facts) -> RolloutCheck:
    """Every worker serves its model, with the tokenizer and the length that the gateway counts with."""
    workers = [one for found in facts.deep.get("workers", {}).values() for one in found]
    wrong = [f"{one['url']}: {'; '.join(one['faults'])}" for one in workers if one["faults"]]
    found = "; ".join(wrong) or (f"{len(workers)} fit" if workers else "none")
    return _judged("workers fit", not wrong, found, "`sluice doctor` says what to change")


def has_fallback(facts: Facts) -> RolloutCheck:
    """Each route has a fallback besides the degraded text."""
    bare = [
        name
        for name, route in _routes(facts).items()
        if not {*route.get("fallback", ())} - {"degraded"} and len(route["backends"]) < 2
    ]
    hint = "a second backend in the route's `fallback`"
    return _judged("each route has a fallback", not bare, ", ".join(bare) or "all have", hint)


def real_workload(facts: Facts) -> RolloutCheck:
    """Measured on the real workload, not on one prompt."""
    check = "benchmarked on real traffic"
    hint = "sluice replay TRACE --output replay.json, then --replay replay.json"
    if facts.replay is None:
        return _manual(check, "no --replay file", hint)
    requests = facts.replay["requests"]
    share = _goodput(facts.replay)
    found = f"{requests['sent']:,} sent, {requests['errors']} errors, {share:.1%} within the SLO"
    whole = requests["sent"] >= LEAST_REPLAYED and not requests["errors"] and not requests["interrupted"]
    return _judged(
        check, whole and share >= LEAST_GOODPUT, found, f"{hint} (bar {LEAST_GOODPUT:.0%}, no errors)"
    )


def soaked(facts: Facts) -> RolloutCheck:
    """Half an hour with long conversations and changing adapters."""
    check = "soak test"
    if facts.soak is None:
        return _manual(check, "no --soak file", "replay for half an hour, adapters mixed, then --soak FILE")
    requests, wall_s = facts.soak["requests"], float(facts.soak["wall_s"])
    found = f"{wall_s / 60:.0f} min, {requests['errors']} errors, {requests['unfinished']} unfinished"
    held = wall_s >= SOAK_S and not requests["errors"] and not requests["unfinished"]
    return _judged(check, held, found, f"at least {SOAK_S / 60:.0f} min without an error")


def latency(facts: Facts) -> RolloutCheck:
    """First token and whole answer together meet what the routes promise."""
    check, late, seen = "latency within the routes' SLO", [], 0.0
    for labels, asked in facts.having("sluice_slo_requests_total"):
        objective = labels.get("objective", "")
        if asked < LEAST_REQUESTS or objective not in WITHIN:
            continue
        seen = max(seen, asked)
        share = facts.total("sluice_slo_good_total", **labels) / asked
        if share < WITHIN[objective]:
            bar = f"(bar {WITHIN[objective]:.0%})"
            late.append(f"{labels.get('route')} {objective}: {share:.1%} of {asked:,.0f} {bar}")
    if not seen:
        return _manual(check, "too few requests yet", f"send at least {LEAST_REQUESTS} to each route")
    return _judged(
        check, not late, "; ".join(late) or f"held over {seen:,.0f} requests", "docs/runbooks/slo-total.md"
    )


def prefix_hits(facts: Facts) -> RolloutCheck:
    """Prefixes computed before are found in the cache; a prompt change can break that."""
    check = "prefix cache hits as expected"
    expected = facts.total("sluice_prompt_expected_cached_tokens_total")
    if not expected:
        return _manual(check, "no prefix was repeated yet", "send traffic, then ask again")
    share = facts.total("sluice_prompt_cached_tokens_total") / expected
    found = f"{share:.1%} of {expected:,.0f} expected tokens (bar {LEAST_FOUND:.0%})"
    return _judged(check, share >= LEAST_FOUND, found, "docs/prompts.md: what makes a prefix change")


def gated_adapters(facts: Facts) -> RolloutCheck:
    """No adapter serves without an evaluation that it passed.

    Adapters of ``adapters.file`` are active from the start, without an evaluation: a person has to decide.
    Another adapter that was activated without an evaluation, or that failed one, is wrong.
    """
    check, hint = "adapters passed an evaluation", "sluice evaluate adapter NEW --against OLD --post URL"
    serving = [one for one in facts.adapters.get("adapters", ()) if one.get("state") in ("canary", "active")]
    bare = [one for one in serving if not _passed(one.get("evaluation") or {})]
    filed = [one["id"] for one in bare if one.get("author") == FROM_FILE and one.get("evaluation") is None]
    wrong = [one["id"] for one in bare if one["id"] not in filed]
    if filed and not wrong:
        return _manual(check, f"from adapters.file, never evaluated: {', '.join(filed)}", hint)
    found = (
        f"without a passed evaluation: {', '.join(wrong)}" if wrong else f"{len(serving)} serve, all passed"
    )
    return _judged(check, not wrong, found, hint)


def gated_backends(facts: Facts) -> RolloutCheck:
    """On routes that require it, every backend but the largest passed an evaluation."""
    check, hint = (
        "backends passed an evaluation",
        "sluice evaluate variant --base A --candidate B --post",
    )
    faults, wrong, asked = facts.evaluations.get("faults", {}), [], 0
    for route in _routes(facts).values():
        if route.get("requires_evaluation"):
            weighted = sorted(route["backends"], key=lambda one: -one.get("weight", 100))[1:]
            names = [one["name"] for one in weighted if one.get("weight", 100)]
            asked += len(names)
            wrong += [faults[name] for name in names if name in faults]
    found = "; ".join(dict.fromkeys(wrong)) or (f"{asked} did" if asked else "no route requires one")
    return _judged(check, not wrong, found, hint)


def _passed(report: Mapping[str, Any]) -> bool:
    return bool(report.get("passed") and report.get("signed"))


def canary_first(facts: Facts) -> RolloutCheck:
    """The last canary was not rolled back."""
    last = facts.canary.get("canary")
    check, hint = "last canary", "sluice canary status: why it ended, before the next one"
    if last is None:
        return _manual(check, "none yet", "begin with one: sluice canary start ROUTE BACKEND")
    return _judged(check, last.get("phase") != "rolled_back", str(last.get("phase")), hint)


def shadowed(facts: Facts) -> RolloutCheck:
    """The other backend's answers have been compared."""
    check = "shadow comparison"
    if not any(route.get("shadow") for route in _routes(facts).values()):
        return _manual(
            check, "no route has a shadow", "route key `shadow: {backend, sample}`, docs/shadow.md"
        )
    pairs = int(facts.shadow.get("pairs", 0))
    return _judged(
        check, pairs >= LEAST_REPLAYED, f"{pairs:,} pairs", f"let it run to {LEAST_REPLAYED} pairs"
    )


def can_go_back(facts: Facts) -> RolloutCheck:
    """A rollback is possible at the routing layer."""
    if isinstance(facts.rollback, str):
        hint = "the first change makes one: `sluice routes apply`"
        return _manual("rollback possible", facts.rollback, hint)
    changes = len(facts.rollback.get("changes", ()))
    return _judged("rollback possible", True, f"would change {changes} things", "")


def in_force(facts: Facts) -> RolloutCheck:
    """The last revision is what this gateway routes by."""
    behind = facts.routing.get("behind") or facts.total("sluice_routing_behind")
    found = f"revision {facts.routing.get('revision')}" + (f", behind: {behind}" if behind else "")
    return _judged("revision in force", not behind, found, "docs/runbooks, SluiceStateBehind")


def ledger(facts: Facts) -> RolloutCheck:
    """Usage reaches its database in time, and none was lost."""
    lag_s, lost = facts.total("sluice_ledger_lag_seconds"), facts.total("sluice_ledger_rows_lost_total")
    found = f"{lag_s:.1f} s behind, {lost:,.0f} rows lost"
    return _judged(
        "ledger", lag_s <= MAX_LEDGER_LAG_S and not lost, found, "docs/ledger.md; is its database up?"
    )


def keys_on(facts: Facts) -> RolloutCheck:
    """Operators' paths ask for a key."""
    found = "/admin answers without one" if facts.open_admin else "asked for"
    return _judged("keys", not facts.open_admin, found, "auth.enabled: true, and SLUICE_ADMIN_KEY")


def alerts(facts: Facts) -> RolloutCheck:
    """Prometheus has loaded our rules and evaluates them."""
    check, hint = "alert rules loaded", "rule_files of Prometheus: deploy/prometheus/*.yaml"
    if facts.rules is None:
        return _manual(check, "no --prometheus", "--prometheus http://HOST:9090")
    if isinstance(facts.rules, str):
        return _judged(check, False, facts.rules, "is Prometheus there?")
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
    return _judged(
        check, bool(count) and not sick and not firing, found, hint if not firing else "docs/runbooks"
    )


def time_to_drain(facts: Facts) -> RolloutCheck:
    """SIGKILL comes after the end of the drain."""
    check, hint = "time to drain", "terminationGracePeriodSeconds, TimeoutStopSec above it"
    if facts.drain_s is None or facts.grace_s is None:
        return _manual(check, "no --config and --grace", "--config FILE --grace SECONDS")
    needed_s = facts.drain_s + AFTER_DRAIN_S
    found = f"{facts.grace_s:.0f} s for {facts.drain_s:.0f} s and {AFTER_DRAIN_S:.0f} s after it"
    return _judged(check, facts.grace_s >= needed_s, found, hint)


CHECKS: tuple[Check, ...] = (
    ready,
    ready_in_time,
    generates,
    workers_fit,
    has_fallback,
    keys_on,
    in_force,
    can_go_back,
    ledger,
    alerts,
    time_to_drain,
    latency,
    prefix_hits,
    gated_adapters,
    gated_backends,
    canary_first,
    shadowed,
    real_workload,
    soaked,
)


def _routes(facts: Facts) -> Mapping[str, Any]:
    routes: Mapping[str, Any] = facts.routing.get("config", {}).get("routes", {})
    return routes


def _goodput(figures: Mapping[str, Any]) -> float:
    sent = figures["requests"]["sent"]
    return float(figures["goodput"]["within_slo"]) / sent if sent else 0.0
