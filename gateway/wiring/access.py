"""The layer of access: API keys, and their limits."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass

from accounting.keys import KeyLimits, KeyRing
from accounting.quotas import Quotas
from gateway.config.errors import ConfigError
from gateway.config.settings import FRONT_KEY, Settings
from gateway.keys.authenticate import Keys
from gateway.keys.ceilings import NANOUSD, Ceilings
from gateway.keys.last_used import STREAM as USE_STREAM
from gateway.keys.last_used import KeyUse
from gateway.keys.rate_limits import KeyLimiter, budget_of
from gateway.keys.records import STREAM
from gateway.keys.registry import KeyProjection
from gateway.keys.sessions import ConsoleSessions
from gateway.keys.shared_limits import SharedLimits
from gateway.state.url import parse_state_url
from gateway.wiring.foundation import Foundation
from gateway.wiring.state import StateParts
from gateway.wiring.state_store import make_limit_store

MIN_KEY_CHARS = 32  # the shortest first key, in characters: 128 random bits as hexadecimal digits


@dataclass(frozen=True, slots=True)
class KeyParts:
    """API keys; ``projection`` updates the ring from the state store."""

    ring: KeyRing
    authority: Keys
    projection: KeyProjection
    use: KeyUse


@dataclass(frozen=True, slots=True)
class AccessParts:
    """Keys and their limits; without ``shared``, each process counts on its own."""

    keys: KeyParts
    limiter: KeyLimiter
    shared: SharedLimits | None
    sessions: ConsoleSessions

    async def run(self) -> None:
        """Run the loops that store key use and pending revocations, and that sync the shared limits."""
        async with asyncio.TaskGroup() as loops:
            loops.create_task(self.keys.use.run(), name="keys-used")
            loops.create_task(self.keys.projection.revocations.run(), name="revocations")
            if self.shared is not None:
                loops.create_task(self.shared.run(), name="limits")

    async def close(self) -> None:
        if self.shared is not None:
            await self.shared.close()


def require_first_key(settings: Settings, admin_key: str | None) -> None:
    """Raise ConfigError if keys are required and there is no first key, or none that a caller can send."""
    if not settings.auth.enabled:
        return
    first = {"SLUICE_ADMIN_KEY": admin_key, FRONT_KEY: os.environ.get(FRONT_KEY)}
    for name, key in first.items():
        if key and len(key) < MIN_KEY_CHARS:
            raise ConfigError(
                f"{name} has {len(key)} characters; allowed: {MIN_KEY_CHARS} or more;"
                " make one with: openssl rand -hex 32"
            )
        if key and (key != key.strip() or not (key.isascii() and key.isprintable())):
            raise ConfigError(
                f"{name} has white space at an end, or a character that is not printable ASCII (a line end?)"
            )
    if admin_key and admin_key == first[FRONT_KEY]:
        raise ConfigError(f"{FRONT_KEY} is SLUICE_ADMIN_KEY; allowed: another key, for another role")
    if not any(first.values()):
        raise ConfigError(
            "auth.enabled is true but there is no key: set SLUICE_ADMIN_KEY, or auth.enabled: false"
        )


def make_access(base: Foundation, admin_key: str | None) -> AccessParts:
    """Build the layer; ``admin_key`` is the first admin's key. Raises ConfigError for the limits' store."""
    config = base.settings.state
    key = "state.url" if config.limits_url is None else "state.limits_url"
    url = parse_state_url(config.limits_url or config.url, key=key)
    store = make_limit_store(url, namespace=config.namespace, unix_time=base.unix_time)
    shared = None
    if store is not None:
        shared = SharedLimits(
            store,
            clock=base.clock,
            unix_time=base.unix_time,
            emit=base.events.emit,
            new_holder=lambda: base.new_id("gw"),
        )
    auth, front_key = base.settings.auth, os.environ.get(FRONT_KEY)
    ring = KeyRing(admin_key, enabled=auth.enabled, front_key=front_key, unix_time=base.unix_time)
    keys = make_keys(ring, base.state, unix_time=base.unix_time)
    usd = auth.default_usd_per_minute if base.settings.priced else None
    limiter = KeyLimiter(
        Quotas(clock=base.clock),
        shared,
        tenant_budgets={
            tenant: budget_of(one.usd_per_day, one.usd_per_month)
            for tenant, one in auth.tenant_budgets.items()
        },
        unix_time=base.unix_time,
        emit=base.events.emit,
        ceilings=Ceilings(
            KeyLimits(auth.default_requests_per_minute, auth.default_tokens_per_minute),
            auth.default_concurrent_requests,
            clock=base.clock,
            nanousd_per_minute=None if usd is None else round(usd * NANOUSD),
        ),
    )
    secret = admin_key.encode() if admin_key else os.urandom(32)
    sessions = ConsoleSessions(secret, keys.authority.by_id, base.unix_time)
    return AccessParts(keys, limiter, shared, sessions)


def make_keys(ring: KeyRing, state: StateParts, *, unix_time: Callable[[], float]) -> KeyParts:
    use = KeyUse(state.store, unix_time=unix_time)
    state.follow(USE_STREAM, use.take, informational=True)
    projection = KeyProjection(state.store, ring, use, state.copies)
    projection.follow(state.follow(STREAM, projection.take))
    return KeyParts(ring, Keys(ring, use.record), projection, use)
