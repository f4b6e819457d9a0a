"""The port of embedders, which find similar questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a question means, as far as an embedder can tell.

    Args:
        facts: what a similar question must contain too, word by word.
        vector: of length 1; empty when nothing of the text is known.
        threshold: least similarity at which a question with these facts counts as the same.
    """

    facts: tuple[str, ...]
    vector: tuple[float, ...]
    threshold: float

    def similarity(self, other: Sequence[float]) -> float:
        """The cosine with the other vector; 1 when both are empty, 0 when one is."""
        if not self.vector or not other:
            return 1.0 if not self.vector and not other else 0.0
        return float(sum(map(mul, self.vector, other)))


class Embedder(Protocol):
    """Embeds texts.

    Invariants: thread-safe; equal texts have equal meanings; a text is similar to itself; blocking and
    called from a thread; raises nothing.
    """

    @property
    def fingerprint(self) -> str:
        """Identifies the model: vectors of two models are never compared."""

    def meaning(self, text: str) -> Meaning | None:
        """What ``text`` means; ``None`` when that cannot be said."""
