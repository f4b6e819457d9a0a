"""What the backend needs of the engine replicas; Serve's handle is one, tests have another."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from ops.ray.wire import ReplicaPiece, ReplicaSignals, RouterHint


class ReplicaLost(Exception):
    """The replica, or the way to it, went away before the answer was whole; names the error's class."""


class ReplicasFull(Exception):
    """No replica takes a further call now, and as many wait as may."""


class EngineReplicas(Protocol):
    """The engine replicas of one application.

    Invariants: leaving a call's block, in whatever way, ends the call on its replica; nothing but
    ``ReplicaLost`` and ``ReplicasFull`` leaves either method beside cancellation.
    """

    def call(
        self, route: RouterHint, work: bytes
    ) -> AbstractAsyncContextManager[AsyncIterator[ReplicaPiece]]:
        """Ask one of them, which the router chooses, to generate."""

    async def signals(self, teller: str, queued: int, timeout_s: float) -> Sequence[ReplicaSignals]:
        """Tell all of them how many requests wait at this gateway, and hear their figures.

        Those that do not answer in time are left out; none at all means that there is none. ``ReplicaLost``
        says that nobody could be asked, or that all who live were late: a busy machine is no empty one.
        """
