"""What the checklist looks at; ``gather`` fills it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# Labels and value of one sample of a metric family.
Sample = tuple[Mapping[str, str], float]


@dataclass(frozen=True, slots=True)
class Facts:
    """Answers of one gateway, and what the operator brought along.

    Args:
        ready: ``GET /ready``.
        deep: ``GET /health/deep``.
        routing: ``GET /admin/routing``.
        rollback: what a rollback would do now; the gateway's own words when it would refuse.
        adapters: ``GET /admin/adapters``.
        canary: ``GET /admin/canary``.
        shadow: ``GET /admin/shadow``.
        samples: of ``/metrics``, by sample name.
        open_admin: whether ``/admin`` answers without a key.
        rules: ``GET /api/v1/rules`` of a Prometheus, or why it could not be had; None when none was named.
        replay: figures of ``sluice replay --output`` over a trace of the real workload.
        soak: the same of a long one.
        drain_s: ``server.drain_seconds`` of the configuration.
        grace_s: how long the machine's keeper waits between SIGTERM and SIGKILL.
    """

    ready: Mapping[str, Any]
    deep: Mapping[str, Any]
    routing: Mapping[str, Any]
    rollback: Mapping[str, Any] | str
    adapters: Mapping[str, Any]
    canary: Mapping[str, Any]
    shadow: Mapping[str, Any]
    samples: Mapping[str, Sequence[Sample]] = field(default_factory=dict)
    open_admin: bool = False
    rules: Mapping[str, Any] | str | None = None
    replay: Mapping[str, Any] | None = None
    soak: Mapping[str, Any] | None = None
    drain_s: float | None = None
    grace_s: float | None = None

    def total(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples that carry these labels."""
        return sum(value for _, value in self.having(name, **labels))

    def having(self, name: str, **labels: str) -> Iterator[Sample]:
        """A metric's samples that carry these labels."""
        for found, value in self.samples.get(name, ()):
            if all(found.get(key) == wanted for key, wanted in labels.items()):
                yield found, value
