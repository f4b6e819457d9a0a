"""What is asked: questions with one right answer, greedy, so that answers can be held against it."""

from __future__ import annotations

from dataclasses import dataclass

# The bundled model gives these its longest answers, 37 to 53 tokens: time for something to break in.
TITLES = (
    "20th Century Boys", "One Piece", "Berserk", "Attack on Titan", "Vinland Saga", "Naruto", "Monster",
    "Vagabond", "Fullmetal Alchemist", "Honey and Clover", "Slam Dunk", "Death Note",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ChaosRequest:
    """One request to make.

    Args:
        request_id: the caller's label, unique in a run.
        text: what is asked.
        stream: whether the answer is streamed.
    """

    request_id: str
    text: str
    stream: bool

    def body(self, max_tokens: int, deadline_ms: int | None) -> dict[str, object]:
        """The native request."""
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
    """The question of the client of that number."""
    return f"Tell me about {TITLES[number % len(TITLES)]} and what to read after it"
