"""The pools' hedging as metrics."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.backends.port import Backend
from gateway.backends.workers.backend import WorkersBackend
from observability.hedging_metrics import HedgeCollector


def hedge_collector(backends: Mapping[str, Backend]) -> HedgeCollector:
    """Reads the pools that hedge."""
    pools = {name: one for name, one in backends.items() if isinstance(one, WorkersBackend)}

    def read() -> Mapping[str, tuple[int, int, int]]:
        told = {name: pool.hedged for name, pool in pools.items()}
        return {
            name: (counts.won, counts.sent - counts.won, counts.refused)
            for name, counts in told.items()
            if counts is not None
        }

    return HedgeCollector(read)
