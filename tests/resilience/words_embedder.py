"""A scripted embedder: the vector of a question counts its words."""

from __future__ import annotations

import asyncio
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from resilience.response_cache_values import EmbedderError

# With this size no two words of the tests share a position.
SIZE = 211


def vector_of(text: str) -> bytes:
    """Returns word counts, not normalized to length 1; texts that share most words are similar."""
    counts = array("f", [0.0] * SIZE)
    for word in text.lower().rstrip("?.").split():
        counts[zlib.crc32(word.encode()) % SIZE] += 1.0
    return counts.tobytes()


@dataclass
class WordsEmbedder:
    """Embeds at once, unless it is broken or hangs; ``calls`` records the requests."""

    broken: bool = False
    hangs: bool = False
    calls: list[tuple[str, str, tuple[str, ...]]] = field(default_factory=list)

    async def embed(self, tenant: str, model: str, texts: Sequence[str]) -> Sequence[bytes]:
        self.calls.append((tenant, model, tuple(texts)))
        if self.hangs:
            await asyncio.Event().wait()
        if self.broken:
            raise EmbedderError("BackendFailure")
        return [vector_of(one) for one in texts]
