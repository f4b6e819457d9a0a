"""Where a request's events go: JSON, SSE and WebSocket each implement it."""

from collections.abc import Awaitable
from typing import Protocol

from budgeting.values import Plan
from gateway.contracts.events import Delta
from gateway.contracts.values import Answer
from gateway.errors import PublicError


class Sink(Protocol):
    """Where an answer goes: JSON, server-sent events or a WebSocket, in one of the contracts.

    Invariants: any number of ``delta`` of a stream, none of another answer, then exactly one of ``finish``
    and ``fail``; none after a cancellation. Each awaits until the transport has taken the bytes, so that a
    slow reader slows its own request only.
    """

    def planned(self, plan: Plan, model: str) -> None:
        """The prompt that is handed to a backend, and the id of what answers; before its first ``delta``.

        The last call counts.
        """

    def delta(self, delta: Delta) -> Awaitable[None]:
        """A piece of the answer; its text may be empty. ``TAKEN`` where nothing has to be awaited."""

    async def finish(self, answer: Answer) -> None:
        """The answer is whole (``answer.output_text`` holds all of it)."""

    async def fail(self, error: PublicError, *, request_id: str, trace_id: str) -> None:
        """No (whole) answer; when deltas went out before, the answer stays partial."""
