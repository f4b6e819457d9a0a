"""Decides how many engine replicas are wanted: by queue and KV memory, since a full GPU has an idle CPU.

Serve calls the policy in its controller and applies its own delays and bounds to the result.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


def wanted(metrics: Mapping[str, Mapping[Any, float]], *, target_sequences: float, target_kv: float) -> float:
    """Replicas, before rounding up, that bring sequences and KV memory down to their targets.

    ``metrics``: values of ``EngineReplica.record_autoscaling_stats``, by figure and replica.
    """

    def figures(name: str) -> Iterable[float]:
        return metrics.get(name, {}).values()

    # Every gateway reports its queue to every replica; the reports arrive at slightly different times.
    sequences = sum(figures("running")) + sum(figures("waiting")) + max(figures("queued"), default=0.0)
    return max(sequences / target_sequences, sum(figures("kv_usage")) / target_kv)


@dataclass(frozen=True, slots=True)
class QueueAndMemory:
    """Serve's autoscaling policy for the engine deployment; the targets are per replica."""

    target_sequences: float
    target_kv: float

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """The wanted number of replicas; without figures, the current number."""
        metrics = context.aggregated_metrics or {}
        if not metrics.get("running"):
            return context.target_num_replicas, {}
        return wanted(metrics, target_sequences=self.target_sequences, target_kv=self.target_kv), {}
