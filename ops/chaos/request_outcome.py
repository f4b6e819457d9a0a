"""The outcome of each request: a verdict from the observed answer, the expected one and the ledger."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ops.chaos.scenario import Verdict
from ops.chaos.workload import ObservedAnswer

DEGRADED = "degraded_response"  # `fallback.kind` of an answer without a model: the route's degraded text


@dataclass(frozen=True, slots=True)
class ExpectedAnswers:
    """The answers without faults, by question; ``bedrock``: the stand-in's answer."""

    texts: Mapping[str, str]
    bedrock: str | None = None


@dataclass(frozen=True, slots=True)
class AppliedFault:
    """A fault action that was carried out: its time, its label, and the role whose process it broke."""

    at_s: float
    label: str
    breaks: str | None = None


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """The outcome of one request.

    Args:
        met: labels of the actions carried out while the request was in flight.
        fallback: ``kind:reason``.
        tokens: output tokens that the answer reports.
        duplicated, missing: in a wrong answer, the number of surplus and of missing characters.
        billed: output tokens of all its ledger rows; ``None`` when the ledger was not read.
        seams: where other calls resumed the answer; ``None`` when the log was not read.
    """

    request_id: str
    stream: bool
    sent_s: float
    first_s: float | None
    ended_s: float | None
    longest_pause_s: float
    verdict: Verdict
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


def outcome_of(
    observed: ObservedAnswer,
    known: ExpectedAnswers,
    injected: Sequence[AppliedFault],
    *,
    rows: Sequence[int] | None = None,
    seams: tuple[str, ...] | None = None,
) -> RequestOutcome:
    """The outcome of one request; ``rows`` (output tokens of each ledger row) and ``seams`` are ``None`` if
    they could not be read.
    """
    ended_s = observed.ended_s if observed.ended_s is not None else observed.sent_s
    met = [one for one in injected if observed.sent_s <= one.at_s <= ended_s]
    if seams is not None:
        broken = bool(seams)
    else:  # streams run on the engine; with several workers it is unknown which worker served which stream
        broken = observed.first_s is not None and any(
            one.at_s >= observed.first_s for one in met if one.breaks == "engine"
        )
    answer = observed.answer or {}
    fallback = answer.get("fallback") or {}
    kind = str(fallback.get("kind", "")) or None
    usage = answer.get("usage") or {}
    tokens = usage.get("output_tokens")
    verdict, why = _verdict(observed, known, kind, broken)
    billed = None if rows is None else sum(rows)
    reported = None if rows is None else _ledger_problem(observed, rows, tokens)
    if reported:
        verdict, why = Verdict.WRONG, reported
    wrong = verdict is Verdict.WRONG and answer
    duplicated, missing = differing(known.texts[observed.question.text], observed.text) if wrong else (0, 0)
    return RequestOutcome(
        request_id=observed.question.request_id,
        stream=observed.question.stream,
        sent_s=observed.sent_s,
        first_s=observed.first_s,
        ended_s=observed.ended_s,
        longest_pause_s=observed.longest_pause_s,
        verdict=verdict,
        met=tuple(one.label for one in met),
        backend=answer.get("backend"),
        fallback=f"{kind}:{fallback.get('reason')}" if kind else None,
        finish=answer.get("finish_reason"),
        code=observed.code,
        tokens=tokens,
        duplicated=duplicated,
        missing=missing,
        billed=billed,
        rows=None if rows is None else len(rows),
        seams=seams,
        warnings=tuple(answer.get("warnings") or ()),
        why=why,
    )


def _verdict(
    observed: ObservedAnswer, known: ExpectedAnswers, kind: str | None, broken: bool
) -> tuple[Verdict, str]:
    wanted, text = known.texts[observed.question.text], observed.text
    ours = wanted.startswith(text) or _joined(wanted, known.bedrock, text)
    if observed.answer is None:
        if not observed.ended:
            return Verdict.LOST, observed.code or "no end"
        if not ours:
            return Verdict.WRONG, _first_difference(wanted, text)
        return (Verdict.PARTIAL if observed.partial else Verdict.ERROR), observed.code or ""
    finish = observed.answer.get("finish_reason")
    if kind == DEGRADED:
        return Verdict.DEGRADED, ""
    if finish in ("deadline", "error", "cancelled"):
        return (Verdict.PARTIAL, str(finish)) if ours else (Verdict.WRONG, _first_difference(wanted, text))
    if text == wanted:
        if broken:
            return Verdict.RESUMED, ""
        return (Verdict.FALLBACK if kind else Verdict.WHOLE), ""
    if kind is not None and text == known.bedrock:
        return Verdict.FALLBACK, ""
    if kind is not None and _joined(wanted, known.bedrock, text):
        return Verdict.RESUMED, "resumed by another model"
    return Verdict.WRONG, _first_difference(wanted, text)


def _joined(wanted: str, other: str | None, text: str) -> bool:
    """Whether ``text`` is a prefix of ``wanted`` followed by the rest, or all, of another model's answer."""
    if other is None:
        return False
    cuts = range(min(common(wanted, text), len(text) - 1), -1, -1)
    return any(other.endswith(text[cut:]) or other.startswith(text[cut:]) for cut in cuts)


def _ledger_problem(observed: ObservedAnswer, rows: Sequence[int], tokens: int | None) -> str:
    """What is wrong with the request's ledger rows; empty if nothing is."""
    if len(rows) > 1:
        return f"{len(rows)} rows in the ledger"
    if rows and tokens is not None and rows[0] != tokens:
        return f"billed {rows[0]} tokens, reported {tokens}"
    if not rows and observed.answer is not None:
        return "an answer without a row in the ledger"
    return ""


def common(one: str, other: str) -> int:
    """Length of the common prefix."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def differing(wanted: str, text: str) -> tuple[int, int]:
    """The numbers of characters of ``text`` that are surplus, and of ``wanted`` that are missing."""
    matched = sum(
        block.size
        for block in difflib.SequenceMatcher(None, wanted, text, autojunk=False).get_matching_blocks()
    )
    return len(text) - matched, len(wanted) - matched


def _first_difference(wanted: str, text: str) -> str:
    return f"differs from character {common(wanted, text)} of {len(wanted)}"
