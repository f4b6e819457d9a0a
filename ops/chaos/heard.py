"""What one caller got, as bytes and times have it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ops.chaos.workload import ChaosRequest


@dataclass(slots=True)
class Heard:
    """One request on its way, and then its end. Times are seconds since the load began.

    Args:
        pieces: of the text, as they came; one for an answer that was not streamed.
        answer: the answer's object, or the ``done`` event.
        code: the error's, of the gateway or, with ``client_``, of the way to it.
        partial: whether the stream said that it breaks off.
        ended: whether an answer or an error came, and not just silence or a closed connection.
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
        """All of it."""
        return "".join(self.pieces)
