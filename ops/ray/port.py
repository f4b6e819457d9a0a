"""The port through which the backend calls engine replicas, and the location of their configuration."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from ops.ray.wire import ReplicaPiece, ReplicaSignals, RouterHint


@dataclass(frozen=True, slots=True)
class ClusterPlace:
    """Paths, valid on every node, of the configuration and working folder, and the Serve application's name.

    Each replica reads the file and its own environment, so no password or key is in the cluster's store.
    """

    config: str
    folder: str
    application: str


class ReplicaLost(Exception):
    """The replica or the connection to it was lost before the answer's end; the message says how."""


class ReplicasFull(Exception):
    """No replica accepts another call now, and the queue in front of the replicas is full."""


class EngineReplicas(Protocol):
    """The engine replicas of one application.

    Invariants: leaving the block of a call in any way ends the call on its replica; apart from cancellation,
    both methods raise only ``ReplicaLost`` and ``ReplicasFull``.
    """

    def call(
        self, route: RouterHint, work: bytes
    ) -> AbstractAsyncContextManager[AsyncIterator[ReplicaPiece]]:
        """Let a replica, which the router chooses, generate; yields its pieces."""

    async def signals(self, reporter_name: str, queued: int, timeout_s: float) -> Sequence[ReplicaSignals]:
        """Send this gateway's queue length to all replicas; returns their figures.

        Replicas that do not answer in time are omitted; an empty list means that there are no replicas.
        Raises ``ReplicaLost`` if none could be reached, or if some were late, as on a busy machine, and no
        other one is ready.
        """
