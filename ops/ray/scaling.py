"""How many engine replicas are wanted: by the queue and by KV memory, since a full GPU has an idle CPU.

Serve calls the policy in its controller and applies its own delays and bounds to the result.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Pressure:
    """The load of the engine replicas (``sequences`` in their engines) and of the gateways' queues.

    ``kv_usage`` is the sum of the shares of KV memory in use: 1 is a full replica.
    """

    replicas: int
    sequences: float
    queued: float
    kv_usage: float


def wanted(pressure: Pressure, *, target_sequences: float, target_kv: float) -> float:
    """Replicas, before rounding up, that bring both down to their targets."""
    by_sequences = (pressure.sequences + pressure.queued) / target_sequences
    return max(by_sequences, pressure.kv_usage / target_kv)


def pressure_of(metrics: Mapping[str, Mapping[Any, float]]) -> Pressure:
    """The pressure out of ``EngineReplica.record_autoscaling_stats``, by figure and replica."""

    def figures(name: str) -> Iterable[float]:
        return metrics.get(name, {}).values()

    # Every gateway reports its queue to every replica; the reports arrive at slightly different times.
    return Pressure(
        replicas=len(metrics.get("running", {})),
        sequences=sum(figures("running")) + sum(figures("waiting")),
        queued=max(figures("queued"), default=0.0),
        kv_usage=sum(figures("kv_usage")),
    )


class QueueAndMemory:
    """Serve's autoscaling policy for the engine deployment; the targets are of one replica."""

    def __init__(self, target_sequences: float, target_kv: float) -> None:
        self._target_sequences = target_sequences
        self._target_kv = target_kv

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """The replicas wanted now; without figures, as many as there are."""
        pressure = pressure_of(context.aggregated_metrics or {})
        if not pressure.replicas:
            return context.target_num_replicas, {}
        return wanted(pressure, target_sequences=self._target_sequences, target_kv=self._target_kv), {}
