"""The questions, each with one correct greedy answer, and an answer as its caller received it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# The bundled model's longest answers, 37 to 53 tokens, which leave time for a fault.
TITLES = (
    "20th Century Boys", "One Piece", "Berserk", "Attack on Titan", "Vinland Saga", "Naruto", "Monster",
    "Vagabond", "Fullmetal Alchemist", "Honey and Clover", "Slam Dunk", "Death Note",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ChaosRequest:
    """One request to send; ``request_id`` is unique in a run."""

    request_id: str
    text: str
    stream: bool

    def body(self, max_tokens: int, deadline_ms: int | None) -> dict[str, object]:
        body: dict[str, object] = {
            "request_id": self.request_id,
            "messages": [{"role": "user", "content": self.text}],
            "sampling": {"max_tokens": max_tokens, "temperature": 0},
            "stream": self.stream,
        }
        if deadline_ms is not None:
            body["deadline_ms"] = deadline_ms
        return body


def text_of(number: int) -> str:
    return f"Tell me about {TITLES[number % len(TITLES)]} and what to read after it"


@dataclass(slots=True)
class ObservedAnswer:
    """A request and the answer received so far. Times are seconds since the load's start.

    Args:
        answer: the whole answer's object, or the ``done`` event.
        code: the gateway's error code or, with the prefix ``client_``, a failure of the connection.
        partial: whether the stream's error event reports a partial answer.
        ended: whether an answer or an error was received; false for a cut connection or a timeout.
    """

    question: ChaosRequest
    sent_s: float
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
        return "".join(self.pieces)
