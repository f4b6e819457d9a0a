"""The guardrail checks of one answer; each says yes, no, or that it has nothing to say of this one.

A configuration names them, built in or as ``package.module:function``. They run in a thread, on what was
really said; nothing of it is kept by them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import orjson

from gateway.contracts.values import FormatType, ResponseFormat
from gateway.shadow.grounding import ungrounded
from gateway.shadow.hooks import load_hook
from gateway.shadow.language import language_of
from gateway.shadow.personal import has_personal
from gateway.shadow.schema import schema_faults


@dataclass(frozen=True, slots=True)
class Exam:
    """What a check looks at.

    Args:
        text: the answer.
        question: the caller's latest turn.
        said: everything that the caller sent beside the evidence, the question included.
        evidence: the retrieval chunks' texts.
        wanted: the shape that was asked for.
        locale: the request's.
    """

    text: str
    question: str = ""
    said: str = ""
    evidence: tuple[str, ...] = ()
    wanted: ResponseFormat = field(default_factory=ResponseFormat)
    locale: str | None = None


Check = Callable[[Exam], bool | None]
"""True: as it should be; ``None``: not this check's matter. Whatever it raises counts as ``None``."""

# How answers begin that decline; anywhere else the words may be of the matter itself.
_REFUSAL = re.compile(
    r"(?:^|[.!]\s+)\W*(?:(?:i['’]?m|i am|we are|we['’]re) (?:sorry|afraid|unable|not able)\b"
    r"|sorry,? (?:but|i)\b"
    r"|(?:i|we) (?:can['’]?t|can ?not|won['’]?t|will not|do not|don['’]t)"
    r" (?:help|assist|answer|provide|discuss|comply|do that)\b"
    r"|as an ai\b"
    r"|that['’]s outside\b|that is outside\b"
    r"|es tut mir leid\b|(?:das|dabei) kann ich (?:nicht|leider)"
    r"|je (?:suis désolée?|ne peux pas)\b|lo siento\b"
    r")|申し訳(?:ありません|ございません)|お手伝いできません|お答えできません|できかねます",
    re.IGNORECASE,
)
_REFUSAL_WITHIN = 240


def shape(exam: Exam) -> bool | None:
    """The answer holds something, and has the shape that was asked for."""
    if not exam.text.strip():
        return False
    wanted = exam.wanted
    if wanted.type is FormatType.TEXT:
        return True
    if wanted.type is FormatType.CHOICE:
        return exam.text.strip() in map(str, orjson.loads(wanted.spec))
    if wanted.type not in (FormatType.JSON_OBJECT, FormatType.JSON_SCHEMA):
        return None  # a pattern of the caller's may take for ever; a grammar needs its parser
    try:
        value = orjson.loads(exam.text)
    except orjson.JSONDecodeError:
        return False
    if wanted.type is FormatType.JSON_OBJECT:
        return isinstance(value, dict)
    return not schema_faults(orjson.loads(wanted.spec), value)


def language(exam: Exam) -> bool | None:
    """The answer is in the language of the question, or else of the locale."""
    if exam.wanted.type is not FormatType.TEXT:
        return None
    asked = language_of(exam.question) or (exam.locale or "").split("-")[0].split("_")[0].lower() or None
    given = language_of(exam.text)
    return None if asked is None or given is None else asked == given


def grounding(exam: Exam) -> bool | None:
    """Every name and number of the answer stands in the evidence, or in what the caller wrote."""
    if not exam.evidence:
        return None
    names, missing = ungrounded(exam.text, "\n".join((*exam.evidence, exam.said)))
    return None if not names else missing == 0


def no_personal_data(exam: Exam) -> bool | None:
    """The answer tells no personal data."""
    return not has_personal(exam.text)


def no_refusal(exam: Exam) -> bool | None:
    """The answer does not decline."""
    return _REFUSAL.search(exam.text.strip()[:_REFUSAL_WITHIN]) is None


def forbidding(patterns: Sequence[str]) -> Check:
    """The check that no text matches one of the operator's patterns."""
    compiled = tuple(re.compile(pattern, re.IGNORECASE) for pattern in patterns)

    def forbidden(exam: Exam) -> bool | None:
        if not compiled:
            return None
        return not any(pattern.search(exam.text) for pattern in compiled)

    return forbidden


BUILT_IN: Mapping[str, Check] = MappingProxyType(
    {
        "shape": shape,
        "language": language,
        "grounding": grounding,
        "pii": no_personal_data,
        "no_refusal": no_refusal,
    }
)


def make_checks(names: Sequence[str], forbidden: Sequence[str] = ()) -> Mapping[str, Check]:
    """The checks of those names, in order.

    Raises:
        HookError: a name is neither built in nor leads to a function.
    """
    known = {**BUILT_IN, "forbidden": forbidding(forbidden)}
    allowed = ", ".join(sorted(known))
    return MappingProxyType(
        {name: known[name] if name in known else load_hook(name, built_in=allowed) for name in names}
    )
