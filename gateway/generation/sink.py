"""The interface to which a request's events are sent; JSON, SSE and WebSocket implement it."""

from collections.abc import Awaitable, Callable
from typing import Protocol

from budgeting.values import Plan
from gateway.contracts.answer import Answer
from gateway.contracts.events import Delta
from gateway.errors import PublicError

Accept = Callable[[], None]
"""Is called once a request waits for its backend: all that can refuse it before has been checked."""


def nothing() -> None:
    """Ignore that the request is accepted."""


class Sink(Protocol):
    """Receives an answer and sends it as JSON, server-sent events or WebSocket messages, in one contract.

    Invariants: any number of ``delta`` calls for a stream, none otherwise, then exactly one of ``finish`` and
    ``fail``; no call after a cancellation. Each call waits until the transport has accepted the bytes, so
    that a slow reader slows only its own request.
    """

    @property
    def discarded(self) -> bool:
        """Whether nobody gets what was sent so far, if the request ends now without its end."""

    def planned(self, plan: Plan, model: str) -> None:
        """Take the prompt that a backend gets, and the id of the answering model; before its first ``delta``.

        The last call counts.
        """

    def delta(self, delta: Delta) -> Awaitable[None]:
        """Send a chunk, whose text may be empty. Returns ``TAKEN`` if there is nothing to await."""

    async def finish(self, answer: Answer) -> None:
        """Send the end of a complete answer (``answer.output_text`` is its whole text)."""

    async def fail(self, error: PublicError) -> None:
        """Send an error instead of a (complete) answer; after deltas the answer stays partial."""
