"""One answer as its caller received it, with times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ops.chaos.workload import ChaosRequest


@dataclass(slots=True)
class ObservedAnswer:
    """A request and what was received so far. Times are seconds since the load began.

    Args:
        pieces: of the text, as received; one for an answer that was not streamed.
        answer: the answer's object, or the ``done`` event.
        code: the error code of the gateway or, with ``client_``, of the connection to it.
        partial: whether the stream's error event says that the answer is partial.
        ended: whether an answer or an error was received, rather than a closed connection or nothing.
    """

    question: ChaosRequest
    sent_s: float
    status: int | None = None
    first_s: float | None = None
    ended_s: float | None = None
    pieces: list[str] = field(default_factory=list)
    longest_pause_s: float = 0.0
    answer: Mapping[str, Any] | None = None
    code: str | None = None
    partial: bool = False
    ended: bool = False

    @property
    def text(self) -> str:
        """The whole text received."""
        return "".join(self.pieces)
