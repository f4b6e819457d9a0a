"""Builds the part that mirrors requests to other backends."""

import random
from collections.abc import Mapping

from accounting.shadow_pairs import ShadowPairStore
from accounting.values import DAY_S
from gateway.config.errors import ConfigError
from gateway.keys.ceilings import NANOUSD
from gateway.shadow.asking import Asker
from gateway.shadow.checks import hook, make_checks
from gateway.shadow.comparing import Comparer
from gateway.shadow.judge import Judge
from gateway.shadow.mirror import Shadow
from gateway.shadow.personal import Redactor, redact_personal
from gateway.shadow.sampling import ShadowQueue
from gateway.wiring.core import Core
from resilience.leg_limits import LegLimit, LegLimits

REDACTORS: Mapping[str, Redactor] = {"pii": redact_personal, "none": str}


def make_shadow(core: Core) -> Shadow:
    """Build the part; it is idle if no route shadows. Raises ConfigError for redactor, checks or judge."""
    base, fleet, accounts = core.base, core.backends.fleet, core.accounts
    section = base.settings.shadow
    redact = hook("shadow.redact", section.redact, REDACTORS)
    checks = make_checks(section.checks, section.forbidden)
    judge = section.judge
    if judge is not None and judge.backend not in fleet.backends:
        allowed = ", ".join(sorted(fleet.backends))
        raise ConfigError(
            f"shadow.judge.backend: given {judge.backend!r}; allowed: one of backends: {allowed}"
        )
    spend = section.max_spend_usd_per_minute
    most_nanousd = None if spend is None else max(1, round(spend * NANOUSD))
    costs = {name: accounts.target_cost(name) for name in fleet.backends}
    limits = LegLimits(
        {name: LegLimit(None, most_nanousd, cost) for name, cost in costs.items()},
        clock=base.clock,
        emit=lambda skipped: None,  # the outcome of a mirrored request is counted instead
    )
    asker = Asker(
        backends=fleet.backends,
        admission=core.backends.admission,
        adapters=core.adapters.registry,
        limits=limits,
        accounts=accounts.accounts,
        models=core.model.models,
        redact=redact,
        clock=base.clock,
        unix_time=base.unix_time,
        new_id=lambda: base.new_id("gen"),
        timeout_s=section.deadline_seconds,
        idle_share=section.idle_share,
    )
    return Shadow(
        queue=ShadowQueue(section.queue, section.queue_bytes),
        asker=asker,
        comparer=Comparer(checks, redact, costs, section.keep_texts, base.unix_time),
        pairs=ShadowPairStore(
            base.settings.ledger.url, keep_pairs=section.keep_pairs, keep_s=section.keep_days * DAY_S
        ),
        judge=None
        if judge is None
        else Judge(asker, judge.backend, judge.sample, judge.max_tokens, random.Random()),
        concurrency=section.concurrency,
        deadline_s=section.deadline_seconds,
        clock=base.clock,
        unix_time=base.unix_time,
    )
