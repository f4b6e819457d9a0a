"""Decides how many engine replicas are wanted: by queue and KV memory, since a full GPU has an idle CPU.

Serve calls the policy in its controller and applies its own delays and bounds to the result.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class QueueAndMemory:
    """Serve's autoscaling policy for the engine deployment; the targets are per replica."""

    target_sequences: float
    target_kv: float

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """Replicas, before rounding up, that bring sequences and KV memory down to their targets.

        ``context.aggregated_metrics`` has the values of ``EngineReplica.record_autoscaling_stats``, by figure
        and replica; without them, it is the current number.
        """
        metrics = context.aggregated_metrics or {}
        if not metrics.get("running"):
            return context.target_num_replicas, {}

        def figures(name: str) -> Iterable[float]:
            found: Iterable[float] = metrics.get(name, {}).values()
            return found

        # Every gateway reports its queue to every replica; the reports arrive at slightly different times.
        sequences = sum(figures("running")) + sum(figures("waiting")) + max(figures("queued"), default=0.0)
        return max(sequences / self.target_sequences, sum(figures("kv_usage")) / self.target_kv), {}
