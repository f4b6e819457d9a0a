"""What became of each request: a verdict from what was heard, what should have been, and what was billed."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ops.chaos.heard import Heard
from ops.chaos.scenario import FateVerdict

# `fallback.kind` of answers that no model made.
DEGRADED, CACHE = "degraded_response", "response_cache"


@dataclass(frozen=True, slots=True)
class ExpectedAnswers:
    """What undisturbed runs gave.

    Args:
        texts: the answer to each question, by the model that all backends but Bedrock run.
        tokens: of each of these answers.
        bedrock: what the Bedrock stand-in says, if there is one.
    """

    texts: Mapping[str, str]
    tokens: Mapping[str, int]
    bedrock: str | None = None


@dataclass(frozen=True, slots=True)
class Billed:
    """One row of the ledger."""

    output_tokens: int
    backend: str | None
    error_code: str | None


@dataclass(frozen=True, slots=True)
class Happened:
    """A deed that was done, when, and whose process it broke."""

    at_s: float
    label: str
    breaks: str | None = None


@dataclass(frozen=True, slots=True)
class RequestFate:
    """One request's.

    Args:
        met: deeds done while it was under way.
        backend: that ended it.
        fallback: ``kind:reason``.
        tokens: of the answer as told; ``None`` when it was not.
        duplicated, missing: of a wrong answer, characters too many and too few.
        billed: output tokens of all its rows; ``None`` when the ledger was not read.
        rows: of the ledger.
        seams: where other calls resumed the answer; ``None`` when the log was not read.
        why: what is wrong, in words.
    """

    request_id: str
    stream: bool
    sent_s: float
    first_s: float | None
    ended_s: float | None
    longest_pause_s: float
    verdict: FateVerdict
    met: tuple[str, ...]
    backend: str | None = None
    fallback: str | None = None
    finish: str | None = None
    code: str | None = None
    tokens: int | None = None
    duplicated: int = 0
    missing: int = 0
    billed: int | None = None
    rows: int | None = None
    seams: tuple[str, ...] | None = None
    warnings: tuple[str, ...] = ()
    why: str = ""


def fate_of(
    heard: Heard,
    known: ExpectedAnswers,
    happened: Sequence[Happened],
    *,
    rows: Sequence[Billed] | None = None,
    seams: tuple[str, ...] | None = None,
) -> RequestFate:
    """The fate of one request; ``rows`` and ``seams`` are its own, ``None`` when they could not be read."""
    ended_s = heard.ended_s if heard.ended_s is not None else heard.sent_s
    met = [one for one in happened if heard.sent_s <= one.at_s <= ended_s]
    if seams is not None:
        broken = bool(seams)
    else:  # all streams are on the engine; of several workers nobody tells which one had which
        broken = heard.first_s is not None and any(
            one.at_s >= heard.first_s for one in met if one.breaks == "engine"
        )
    answer = heard.answer or {}
    fallback = answer.get("fallback") or {}
    kind = str(fallback.get("kind", "")) or None
    usage = answer.get("usage") or {}
    tokens = usage.get("output_tokens")
    verdict, why = _verdict(heard, known, kind, broken)
    billed = None if rows is None else sum(row.output_tokens for row in rows)
    reported = None if rows is None else _books(heard, rows, tokens)
    if reported:
        verdict, why = FateVerdict.WRONG, reported
    wrong = verdict is FateVerdict.WRONG and answer
    duplicated, missing = differing(known.texts[heard.question.text], heard.text) if wrong else (0, 0)
    return RequestFate(
        request_id=heard.question.request_id,
        stream=heard.question.stream,
        sent_s=heard.sent_s,
        first_s=heard.first_s,
        ended_s=heard.ended_s,
        longest_pause_s=heard.longest_pause_s,
        verdict=verdict,
        met=tuple(one.label for one in met),
        backend=answer.get("backend"),
        fallback=f"{kind}:{fallback.get('reason')}" if kind else None,
        finish=answer.get("finish_reason"),
        code=heard.code,
        tokens=tokens,
        duplicated=duplicated,
        missing=missing,
        billed=billed,
        rows=None if rows is None else len(rows),
        seams=seams,
        warnings=tuple(answer.get("warnings") or ()),
        why=why,
    )


def _verdict(heard: Heard, known: ExpectedAnswers, kind: str | None, broken: bool) -> tuple[FateVerdict, str]:
    wanted, text = known.texts[heard.question.text], heard.text
    ours = wanted.startswith(text) or _joined(wanted, known.bedrock, text)
    if heard.answer is None:
        if not heard.ended:
            return FateVerdict.LOST, heard.code or "no end"
        if not ours:
            return FateVerdict.WRONG, _first_difference(wanted, text)
        return (FateVerdict.PARTIAL if heard.partial else FateVerdict.ERROR), heard.code or ""
    finish = heard.answer.get("finish_reason")
    if kind == DEGRADED:
        return FateVerdict.DEGRADED, ""
    if finish in ("deadline", "error", "cancelled"):
        return (
            (FateVerdict.PARTIAL, str(finish))
            if ours
            else (FateVerdict.WRONG, _first_difference(wanted, text))
        )
    if text == wanted:
        if broken:
            return FateVerdict.RESUMED, ""
        return (FateVerdict.FALLBACK if kind else FateVerdict.WHOLE), ""
    if kind is not None and text == known.bedrock:
        return FateVerdict.FALLBACK, ""
    if kind is not None and _joined(wanted, known.bedrock, text):
        return FateVerdict.RESUMED, "went on in another model's words"
    return FateVerdict.WRONG, _first_difference(wanted, text)


def _joined(wanted: str, other: str | None, text: str) -> bool:
    """Whether ``text`` is a beginning of ``wanted`` and then the rest, or all, of what another model says."""
    if other is None:
        return False
    cuts = range(min(common(wanted, text), len(text) - 1), -1, -1)
    return any(other.endswith(text[cut:]) or other.startswith(text[cut:]) for cut in cuts)


def _books(heard: Heard, rows: Sequence[Billed], tokens: int | None) -> str:
    """What is wrong with what was billed; empty when nothing is."""
    if len(rows) > 1:
        return f"{len(rows)} rows in the ledger"
    if rows and tokens is not None and rows[0].output_tokens != tokens:
        return f"billed {rows[0].output_tokens} tokens, reported {tokens}"
    if not rows and heard.answer is not None:
        return "an answer without a row in the ledger"
    return ""


def common(one: str, other: str) -> int:
    """Characters that both begin with."""
    for number, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return number
    return min(len(one), len(other))


def differing(wanted: str, text: str) -> tuple[int, int]:
    """Characters of ``text`` that are too many, and those of ``wanted`` that are missing."""
    matched = sum(
        block.size
        for block in difflib.SequenceMatcher(None, wanted, text, autojunk=False).get_matching_blocks()
    )
    return len(text) - matched, len(wanted) - matched


def _first_difference(wanted: str, text: str) -> str:
    return f"differs from character {common(wanted, text)} of {len(wanted)}"
