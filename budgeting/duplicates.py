"""Evidence without duplicates: chunks with one id, with one text (case, width and spaces aside), or whose
text is contained in another's, are sent once, as the longer text in the better rank."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import Struct

from budgeting.normal_forms import normalized
from budgeting.values import EvidenceChunk

# Shorter texts ("in stock") occur inside many others and have a meaning of their own.
MIN_CONTAINED_CHARS = 24
# Containment is looked for among this many of the best chunks: the work grows with their number's square.
MAX_COMPARED = 64
# Longer evidence is compared as it is written: to fold a million characters takes 0.4 s, of some scripts 10.
MAX_FOLDED_CHARS = 262_144


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
    folds = sum(len(chunk.text) for chunk in chunks) <= MAX_FOLDED_CHARS
    groups: list[_Group] = []
    by_id: dict[str, _Group] = {}
    by_text: dict[str, _Group] = {}
    for index in ranked:
        chunk = chunks[index]
        text = same_text(chunk.text) if folds else chunk.text
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
        group.ids.append(chunk.chunk_id)
    order = sorted(groups, key=lambda group: group.shown)
    place = {group.shown: at for at, group in enumerate(order)}
    kept = tuple(chunks[group.shown] for group in order)
    return MergedChunks(
        kept=kept,
        ranked=tuple(place[group.shown] for group in groups),
        ids=tuple(
            tuple(dict.fromkeys((own.chunk_id, *group.ids))) for own, group in zip(kept, order, strict=True)
        ),
    )


def same_text(text: str) -> str:
    """The text without differences of case, width and blanks, for comparisons."""
    return " ".join(normalized("NFKC", text).casefold().split())


def _holder(groups: Sequence[_Group], text: str) -> _Group | None:
    """The best group whose text contains ``text``, or is contained in it."""
    for group in groups[:MAX_COMPARED]:
        shorter, longer = sorted((group.text, text), key=len)
        if len(shorter) >= MIN_CONTAINED_CHARS and shorter in longer:
            return group
    return None


def _score(chunk: EvidenceChunk) -> float:
    if chunk.score is None or math.isnan(chunk.score):
        return -math.inf
    return chunk.score
