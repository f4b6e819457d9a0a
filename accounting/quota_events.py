"""What keys' limits tell: frozen facts for metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QuotaDecided:
    """A limited key asked.

    Args:
        kind: ``request`` or ``tokens``.
        refused_by: the limit's name; ``None``: it may pass.
        shared: for all processes; else by this one alone, as the store did not answer or there is none.
    """

    kind: str
    refused_by: str | None
    shared: bool


@dataclass(frozen=True, slots=True)
class QuotaSettled:
    """A request of a limited key has ended: tokens that were held for it, and that it used."""

    held: int
    used: int


@dataclass(frozen=True, slots=True)
class LimitStoreAnswered:
    """The shared store decided within ``took_s`` seconds."""

    took_s: float


@dataclass(frozen=True, slots=True)
class LimitStoreMissed:
    """The shared store did not decide: ``timeout`` or ``unavailable``."""

    reason: str


@dataclass(frozen=True, slots=True)
class SettlementsLost:
    """Settlements that the shared store will never hear of: too many waited for it."""

    count: int


QuotaEvent = QuotaDecided | QuotaSettled | LimitStoreAnswered | LimitStoreMissed | SettlementsLost
