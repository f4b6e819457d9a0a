"""The engine replicas as the backend needs them, and where they find their configuration."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from ops.ray.wire import ReplicaPiece, ReplicaSignals, RouterHint


@dataclass(frozen=True, slots=True)
class ClusterPlace:
    """Paths of the configuration and of the working folder on every node, and the Serve application's name.

    Each replica reads the file and its own environment, so no password or key is in the cluster's store.
    """

    config: str
    folder: str
    application: str


class ReplicaLost(Exception):
    """The replica, or the connection to it, was lost before the answer's end; names the error's class."""


class ReplicasFull(Exception):
    """No replica takes a further call now, and the queue in front of them is full."""


class EngineReplicas(Protocol):
    """The engine replicas of one application.

    Invariants: leaving a call's block, in whatever way, ends the call on its replica; either method raises
    nothing but ``ReplicaLost`` and ``ReplicasFull``, cancellation aside.
    """

    def call(
        self, route: RouterHint, work: bytes
    ) -> AbstractAsyncContextManager[AsyncIterator[ReplicaPiece]]:
        """Ask one of them, which the router chooses, to generate."""

    async def signals(self, teller: str, queued: int, timeout_s: float) -> Sequence[ReplicaSignals]:
        """Send all of them this gateway's queue length; their figures.

        Replicas that do not answer in time are left out; an empty list means that there are none.
        ``ReplicaLost``: none could be asked, or all were late, as on a busy machine.
        """
