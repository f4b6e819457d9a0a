"""The part of the composition root that makes keys' limits, and what they are shared through."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from accounting.quotas import Quotas
from gateway.config.state import StateConfig
from gateway.keys.rate_limits import KeyLimiter
from gateway.keys.shared_limits import SharedLimits
from gateway.state.url import parse_state_url
from gateway.wiring.state_store import make_limit_store
from observability.quota_metrics import QuotaMetrics


@dataclass(frozen=True, slots=True)
class Limiting:
    """Keys' limits as a gateway holds them.

    Args:
        limiter: for every request.
        shared: what other processes share; ``None``: there are none.
    """

    limiter: KeyLimiter
    shared: SharedLimits | None

    async def run(self) -> None:
        """Keep up with the shared limits until cancelled."""
        if self.shared is None:
            await asyncio.Event().wait()
        else:
            await self.shared.run()

    async def close(self) -> None:
        """Tell the last settlements and let go of connections."""
        if self.shared is not None:
            await self.shared.close()


def make_limiting(
    config: StateConfig,
    *,
    registry: CollectorRegistry,
    clock: Callable[[], float],
    unix_time: Callable[[], float],
    new_id: Callable[[str], str],
) -> Limiting:
    """Build it over what ``state`` of the configuration says.

    Raises:
        ConfigError: the url is not understood, or what it needs is not installed.
    """
    metrics = QuotaMetrics(registry)
    url = (
        parse_state_url(config.url)
        if config.limits_url is None
        else parse_state_url(config.limits_url, key="state.limits_url")
    )
    store = make_limit_store(url, namespace=config.namespace, unix_time=unix_time)
    shared = None
    if store is not None:
        shared = SharedLimits(
            store,
            clock=clock,
            unix_time=unix_time,
            emit=metrics.emit,
            new_holder=lambda: new_id("gw"),
        )
        metrics.read(shared.standing)
    return Limiting(KeyLimiter(Quotas(clock=clock), shared, emit=metrics.emit), shared)
