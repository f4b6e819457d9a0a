"""Evidence without duplicates: chunks with one id, with one text (case, width and spaces aside), or whose
text is contained in another's, are sent once, as the longer text in the better rank."""

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import Struct

from budgeting.values import EvidenceChunk

# Shorter texts ("in stock") occur inside many others and have a meaning of their own.
MIN_CONTAINED_CHARS = 24
# Containment is looked for among this many of the best chunks: the work grows with their number's square.
MAX_COMPARED = 64


class MergedChunks(Struct, frozen=True):
    """Evidence without duplicates: the ``kept`` chunks in the caller's order, their positions ``ranked`` best
    first, and for each kept chunk the ``ids`` of all chunks merged into it, its own first."""

    kept: tuple[EvidenceChunk, ...]
    ranked: tuple[int, ...]
    ids: tuple[tuple[str, ...], ...]


NO_CHUNKS = MergedChunks((), (), ())


@dataclass(slots=True)
class _Group:
    """Chunks that are sent as one; ``shown`` is the caller's index of the chunk whose text is sent."""

    shown: int
    text: str
    ids: list[str]


def merge_chunks(chunks: Sequence[EvidenceChunk]) -> MergedChunks:
    """Merge duplicates into the best of them.

    The best has the highest score, then the lowest index; no score (or NaN) is below every score.
    """
    ranked = sorted(range(len(chunks)), key=lambda index: (-_score(chunks[index]), index))
    groups: list[_Group] = []
    by_id: dict[str, _Group] = {}
    by_text: dict[str, _Group] = {}
    for index in ranked:
        chunk = chunks[index]
        text = same_text(chunk.text)
        group = by_id.get(chunk.chunk_id) or by_text.get(text)
        if group is None:
            group = _holder(groups, text)
            if group is not None and len(text) > len(group.text):
                group.shown, group.text = index, text
        if group is None:
            group = _Group(index, text, [])
            groups.append(group)
        by_id.setdefault(chunk.chunk_id, group)
        if text in group.text:
            by_text.setdefault(text, group)
        if chunk.chunk_id not in group.ids:
            group.ids.append(chunk.chunk_id)
    order = sorted(group.shown for group in groups)
    place = {index: at for at, index in enumerate(order)}
    ids = {group.shown: _own_first(group, chunks[group.shown].chunk_id) for group in groups}
    return MergedChunks(
        kept=tuple(chunks[index] for index in order),
        ranked=tuple(place[group.shown] for group in groups),
        ids=tuple(ids[index] for index in order),
    )


def same_text(text: str) -> str:
    """The text without differences of case, width and blanks, for comparisons."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
    return " ".join(text.casefold().split())


def _holder(groups: Sequence[_Group], text: str) -> _Group | None:
    """The best group whose text contains ``text``, or is contained in it."""
    for group in groups[:MAX_COMPARED]:
        shorter, longer = sorted((group.text, text), key=len)
        if len(shorter) >= MIN_CONTAINED_CHARS and shorter in longer:
            return group
    return None


def _own_first(group: _Group, own: str) -> tuple[str, ...]:
    return (own, *(name for name in group.ids if name != own))


def _score(chunk: EvidenceChunk) -> float:
    if chunk.score is None or math.isnan(chunk.score):
        return -math.inf
    return chunk.score
