"""How a canonical prompt lies in messages: what stands where, and in which section it counts.

::

    system            one message each, the stable prefix
    older turns       user and assistant, oldest first
    evidence          ONE system message: evidence and context, whichever there is
    latest turn       the last user message (and what follows it)
    generation prompt

Evidence stands behind the older turns, so that changing it, or the context, changes no token before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from budgeting.values import CanonicalPrompt, EvidenceChunk, Message, Role

EVIDENCE_TITLE = "Evidence:"
CONTEXT_TITLE = "Context:"


def evidence_line(chunk: EvidenceChunk) -> str:
    """How the model sees one piece of evidence: ``[catalog manga_441] <text>``."""
    return f"[{chunk.source_type} {chunk.chunk_id}] {chunk.text}"


def evidence_text(chunks: Iterable[EvidenceChunk], context: str) -> str:
    """The evidence message's text; empty when there is neither evidence nor context."""
    lines = [evidence_line(chunk) for chunk in chunks]
    parts = []
    if lines:
        parts.append("\n".join([EVIDENCE_TITLE, *lines]))
    if context:
        parts.append(f"{CONTEXT_TITLE}\n{context}")
    return "\n\n".join(parts)


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Messages in the order they are sent.

    ``cuts`` are numbers of messages: the system messages end at the first, the evidence message stands
    between the second and the third (which are equal when there is none).
    """

    messages: tuple[Message, ...]
    cuts: tuple[int, int, int]


def arrange(prompt: CanonicalPrompt, chunks: Sequence[EvidenceChunk], first_turn: int = 0) -> Arrangement:
    """The prompt's messages with these chunks, and the turns from ``first_turn`` on."""
    system = [Message(Role.SYSTEM, text) for text in prompt.system]
    latest = latest_turn(prompt.turns)
    older = prompt.turns[first_turn:latest]
    text = evidence_text(chunks, prompt.context)
    evidence = [Message(Role.SYSTEM, text)] if text else []
    start = len(system) + len(older)
    return Arrangement(
        messages=(*system, *older, *evidence, *prompt.turns[latest:]),
        cuts=(len(system), start, start + len(evidence)),
    )


def prompt_messages(prompt: CanonicalPrompt) -> tuple[Message, ...]:
    """The whole prompt as messages, nothing trimmed (duplicate evidence merged)."""
    return arrange(prompt, merge_chunks(prompt.evidence).kept).messages


def latest_turn(turns: Sequence[Message]) -> int:
    """Where the latest turn starts: at the last user message, else at the last message."""
    for index in range(len(turns) - 1, -1, -1):
        if turns[index].role is Role.USER:
            return index
    return max(0, len(turns) - 1)


def exchanges(turns: Sequence[Message]) -> list[int]:
    """Starts of the older exchanges, oldest first: a user message with the answers to it.

    Answers before any user message are an exchange of their own. The latest turn is not among them.
    """
    latest = latest_turn(turns)
    return [index for index in range(latest) if index == 0 or turns[index].role is Role.USER]


@dataclass(frozen=True, slots=True)
class MergedChunks:
    """Evidence without duplicates.

    Args:
        kept: the chunks in the caller's order.
        ranked: positions in ``kept``, best first.
        ids: for each kept chunk, the ids it answers for: its own and those of its duplicates.
    """

    kept: tuple[EvidenceChunk, ...]
    ranked: tuple[int, ...]
    ids: tuple[tuple[str, ...], ...]


def merge_chunks(chunks: Sequence[EvidenceChunk]) -> MergedChunks:
    """Merge chunks of one id or of one text into the best of them.

    Best is the highest score, then the caller's order; no score (and NaN) is below every score.
    """
    ranked = sorted(range(len(chunks)), key=lambda index: (-_score(chunks[index]), index))
    by_id: dict[str, int] = {}
    by_text: dict[str, int] = {}
    answers_for: dict[int, list[str]] = {}
    for index in ranked:
        chunk = chunks[index]
        twin = by_id.get(chunk.chunk_id, by_text.get(chunk.text))
        best = index if twin is None else twin
        by_id.setdefault(chunk.chunk_id, best)
        by_text.setdefault(chunk.text, best)
        ids = answers_for.setdefault(best, [])
        if chunk.chunk_id not in ids:
            ids.append(chunk.chunk_id)
    order = sorted(answers_for)
    position = {index: place for place, index in enumerate(order)}
    return MergedChunks(
        kept=tuple(chunks[index] for index in order),
        ranked=tuple(position[index] for index in answers_for),
        ids=tuple(tuple(answers_for[index]) for index in order),
    )


def _score(chunk: EvidenceChunk) -> float:
    if chunk.score is None or math.isnan(chunk.score):
        return -math.inf
    return chunk.score
