"""The part of the composition root that makes the shadow."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from accounting.account import Accounts
from accounting.shadow_pairs import ShadowPairStore
from adapters.registry import AdapterRegistry
from admission.controller import AdmissionController
from gateway.admin.shadow import ShadowAdmin
from gateway.backends.port import Backend
from gateway.config.errors import ConfigError
from gateway.config.settings import Settings
from gateway.generation.resume import Spelling
from gateway.prompts.text_port import TextService
from gateway.shadow.asking import Asker
from gateway.shadow.checks import make_checks
from gateway.shadow.comparing import Comparer
from gateway.shadow.hooks import HookError, load_hook
from gateway.shadow.judge import Judge
from gateway.shadow.mirror import Shadow
from gateway.shadow.personal import Redactor, keep_all, redact_personal
from gateway.shadow.sampling import ShadowQueue
from gateway.wiring.cache import NANOUSD, shipped_embedder
from observability.shadow_metrics import ShadowCollector, ShadowShown
from resilience.leg_limits import LegLimit, LegLimits, LegPrice

DAY_S = 86_400.0
REDACTORS: Mapping[str, Redactor] = {"pii": redact_personal, "none": keep_all}


@dataclass(frozen=True, slots=True)
class Shadows:
    """The shadow as a gateway holds it.

    Args:
        shadow: takes copies, and works on them while it runs.
        desk: for operators.
        limits: what shadows spend.
    """

    shadow: Shadow
    desk: ShadowAdmin
    limits: LegLimits

    def collector(self) -> ShadowCollector:
        """For the metrics."""

        def read() -> ShadowShown:
            figures = self.shadow.figures()
            spent = sum(one.spent_nanousd + one.reserved_nanousd for one in self.limits.figures().values())
            return ShadowShown(
                {outcome.value: count for outcome, count in figures.outcomes.items()},
                figures.waiting,
                figures.waiting_bytes,
                figures.active,
                figures.written,
                figures.lost,
                spent,
            )

        return ShadowCollector(read)


def make_shadow(
    settings: Settings,
    *,
    backends: Mapping[str, Backend],
    admission: AdmissionController,
    adapters: AdapterRegistry,
    accounts: Accounts,
    spelling: Spelling,
    text: Callable[[], TextService],
    price: Callable[[str], LegPrice],
    clock: Callable[[], float],
    unix_time: Callable[[], float],
    new_id: Callable[[str], str],
) -> Shadows:
    """Construct it; a gateway whose routes shadow nothing has one that sleeps.

    Raises:
        ConfigError: a redactor, a check or the judge's backend cannot be used.
    """
    section = settings.shadow
    redact = _redactor(section.redact)
    try:
        checks = make_checks(section.checks, section.forbidden)
    except HookError as error:
        raise ConfigError(f"shadow.checks: {error}") from None
    if section.judge is not None and section.judge.backend not in backends:
        allowed = ", ".join(sorted(backends))
        raise ConfigError(
            f"shadow.judge.backend: given {section.judge.backend!r}; allowed: one of backends: {allowed}"
        )
    spend = section.max_spend_usd_per_minute
    prices = {name: price(name) for name in backends}
    limits = LegLimits(
        {
            name: LegLimit(None, None if spend is None else max(1, round(spend * NANOUSD)), price)
            for name, price in prices.items()
        },
        clock=clock,
        emit=lambda skipped: None,  # the copy's outcome is counted
    )
    asker = Asker(
        backends=backends,
        admission=admission,
        adapters=adapters,
        limits=limits,
        accounts=accounts,
        spelling=spelling,
        encode=lambda messages: text().encode_chat(messages),
        redact=redact,
        clock=clock,
        unix_time=unix_time,
        new_id=lambda: new_id("gen"),
        timeout_s=section.deadline_seconds,
        idle_share=section.idle_share,
    )
    judge = None
    if section.judge is not None:
        judge = Judge(
            asker,
            section.judge.backend,
            section.judge.sample,
            section.judge.max_tokens,
            lambda messages: text().encode_chat(messages),
            random.Random(),
        )
    pairs = ShadowPairStore(
        settings.ledger.url, keep_pairs=section.keep_pairs, keep_s=section.keep_days * DAY_S
    )
    shadow = Shadow(
        queue=ShadowQueue(section.queue, section.queue_bytes),
        asker=asker,
        comparer=Comparer(checks, redact, shipped_embedder(), prices, section.keep_texts, unix_time),
        pairs=pairs,
        judge=judge,
        concurrency=section.concurrency,
        deadline_s=section.deadline_seconds,
        clock=clock,
        unix_time=unix_time,
    )
    return Shadows(shadow, ShadowAdmin(pairs), limits)


def _redactor(name: str) -> Redactor:
    if name in REDACTORS:
        return REDACTORS[name]
    try:
        return load_hook(name, built_in=", ".join(sorted(REDACTORS)))
    except HookError as error:
        raise ConfigError(f"shadow.redact: {error}") from None
