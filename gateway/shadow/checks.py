"""The guardrail checks of one answer: each passes, fails or does not apply.

The configuration lists them: built in, or ``package.module:function``. They run in a thread on the unredacted
text and store nothing.
"""

import pkgutil
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import orjson
import structlog

from budgeting.normal_forms import normalized
from budgeting.values import Plan, Role
from gateway.config.errors import ConfigError
from gateway.contracts.values import FormatType, GenerateRequest, ResponseFormat
from gateway.generation.json_schema import breaks_schema
from gateway.shadow.language import language_of
from gateway.shadow.likeness import yield_thread
from gateway.shadow.personal import redact_personal


@dataclass(frozen=True, slots=True)
class Exam:
    """The input of a check.

    Args:
        question: the caller's latest turn.
        said: all messages of the request, without the evidence.
        evidence: the texts of the retrieval chunks in the model's prompt.
        wanted: the response format of the request.
        called: whether the answer calls tools.
    """

    text: str
    question: str = ""
    said: str = ""
    evidence: tuple[str, ...] = ()
    wanted: ResponseFormat = field(default_factory=ResponseFormat)
    locale: str | None = None
    called: bool = False


def exam_of(request: GenerateRequest, plan: Plan, text: str, *, called: bool = False) -> Exam:
    """Return the exam of an answer to a request, with the evidence that was sent with ``plan``."""
    turns = [message.content for message in request.messages if message.role is Role.USER]
    gone = frozenset(plan.dropped_chunks)
    return Exam(
        text=text,
        question=turns[-1] if turns else "",
        said="\n".join(message.content for message in request.messages),
        evidence=tuple(chunk.text for chunk in request.chunks if chunk.chunk_id not in gone),
        wanted=request.response_format,
        locale=request.locale,
        called=called,
    )


Check = Callable[[Exam], bool | None]
"""True: passed; ``None``: does not apply. An exception counts as ``None`` (:class:`Checks`)."""

# Beginnings of refusals; later in the answer these words may belong to the subject.
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
    """Check that the answer has the requested format and is not empty, unless it calls tools."""
    if not exam.text.strip():
        return exam.called
    wanted = exam.wanted
    if wanted.type is FormatType.TEXT:
        return True
    if wanted.type is FormatType.CHOICE:
        return exam.text.strip() in map(str, orjson.loads(wanted.spec))
    if wanted.type not in (FormatType.JSON_OBJECT, FormatType.JSON_SCHEMA):
        return None  # a caller's pattern may run forever; a grammar needs a parser
    try:
        value = orjson.loads(exam.text)
    except orjson.JSONDecodeError:
        return False
    if wanted.type is FormatType.JSON_OBJECT:
        return isinstance(value, dict)
    return not breaks_schema(wanted.spec.encode(), value)


def language(exam: Exam) -> bool | None:
    """Check that the answer has the language of the question, or of the locale if that is unknown."""
    if exam.wanted.type is not FormatType.TEXT:
        return None
    asked = language_of(exam.question) or (exam.locale or "").split("-")[0].split("_")[0].lower() or None
    given = language_of(exam.text)
    return None if asked is None or given is None else asked == given


def grounding(exam: Exam) -> bool | None:
    """Check that each name and number of the answer occurs in the evidence or in the caller's messages."""
    if not exam.evidence:
        return None
    names, missing = ungrounded(exam.text, "\n".join((*exam.evidence, exam.said)))
    return None if not names else missing == 0


_QUOTED = re.compile(r"『([^『』]{1,80})』|「([^「」]{1,80})」|[\"“]([^\"“”]{1,80})[\"”]")
_WORD = re.compile(r"[^\W_]+(?:['’\-][^\W_]+)*")
_NUMBER = re.compile(r"\d[\d.,]*\d")
_SENTENCE_END = re.compile(r"[.!?:;\n•。！？]\s*[\"“*(\-]*\s*$")
# Words that are always capitalized: I, months and the like.
_PLAIN_WORDS = (
    "i i'm i'd i'll i've january february march april may june july august september october november"
    " december monday tuesday wednesday thursday friday saturday sunday english japanese manga"
)
_PLAIN = frozenset(_PLAIN_WORDS.split())
MAX_CHARS = 8_000


def ungrounded(answer: str, sources: str) -> tuple[int, int]:
    """Return the number of names and numbers in the answer, and of those that ``sources`` lacks.

    Names are titles in quotation marks, capitalized words inside a sentence, numbers of two or more digits.
    This finds invented titles, people and prices; a wrong sentence of correct words passes.
    """
    answer = normalized("NFKC", answer[:MAX_CHARS])
    held = normalized("NFKC", sources).lower()
    words = set(_WORD.findall(held))
    numbers = {_digits(one) for one in _NUMBER.findall(held)}
    names = missing = 0
    for found in _QUOTED.finditer(answer):
        title = next(filter(None, found.groups()))
        if not title.isascii():
            names += 1
            missing += title.lower() not in held
    for found in _WORD.finditer(answer):
        word = found[0]
        if not word[0].isupper() or word.lower() in _PLAIN or len(word) < 3:
            continue
        if _begins_sentence(answer, found.start()) and word.lower() not in words:
            continue  # the first word of a sentence is always capitalized
        names += 1
        # With or without the English genitive.
        missing += words.isdisjoint((word.lower(), re.sub(r"['’]s$", "", word.lower())))
    for found in _NUMBER.finditer(answer):
        names += 1
        missing += _digits(found[0]) not in numbers
    return names, missing


def _begins_sentence(text: str, place: int) -> bool:
    before = text[max(0, place - 8) : place]
    return not before.strip(' "“*(-') or _SENTENCE_END.search(before) is not None


def _digits(number: str) -> str:
    return re.sub(r"[.,](?=\d{3}\b)", "", number)


def no_personal_data(exam: Exam) -> bool | None:
    return redact_personal(exam.text) == exam.text


def no_refusal(exam: Exam) -> bool | None:
    return _REFUSAL.search(exam.text.strip()[:_REFUSAL_WITHIN]) is None


def forbidding(patterns: Sequence[str]) -> Check:
    """Return a check that an answer matches none of the operator's patterns."""
    compiled = tuple(re.compile(pattern, re.IGNORECASE) for pattern in patterns)

    def forbidden(exam: Exam) -> bool | None:
        if not compiled:
            return None
        return not any(pattern.search(exam.text) for pattern in compiled)

    return forbidden


class Checks:
    """Checks by name. ``errors`` counts the exceptions of each; the first one of a check is logged."""

    def __init__(self, checks: Mapping[str, Check]) -> None:
        self._checks = checks
        self._lock = Lock()
        self.errors = dict.fromkeys(checks, 0)
        self._log = structlog.get_logger("shadow")

    def run(self, exam: Exam) -> dict[str, bool | None]:
        """Return the results by check name. Called in a thread; lets other threads run between two checks."""
        return {name: self._result(name, check, exam) for name, check in self._checks.items()}

    def _result(self, name: str, check: Check, exam: Exam) -> bool | None:
        yield_thread()
        try:
            passed = check(exam)
            return None if passed is None else bool(passed)
        except Exception as error:
            # An operator's function may raise anything; its message may repeat the answer.
            with self._lock:
                self.errors[name] += 1
                first = self.errors[name] == 1
            if first:
                self._log.warning("a check has failed", check=name, error_type=type(error).__name__)
            return None


BUILT_IN: Mapping[str, Check] = {
    "shape": shape,
    "language": language,
    "grounding": grounding,
    "pii": no_personal_data,
    "no_refusal": no_refusal,
}


def make_checks(names: Sequence[str], forbidden: Sequence[str] = ()) -> Checks:
    """Return the checks of those names, in order. Raises ConfigError as :func:`hook`."""
    known = {**BUILT_IN, "forbidden": forbidding(forbidden)}
    return Checks({name: hook("shadow.checks", name, known) for name in names})


def hook(key: str, name: str, built_in: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Return a hook that ``key`` of the configuration names: built in, or ``package.module:function``.

    Raises ConfigError, with the allowed names or the reason, if the name is that of no function.
    """
    if name in built_in:
        return built_in[name]
    if ":" not in name:
        allowed = ", ".join(sorted(built_in))
        raise ConfigError(f"{key}: given {name!r}; allowed: {allowed}, or package.module:function")
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{key}: {name!r} cannot be imported ({type(error).__name__}: {error})") from None
    if not callable(found):
        raise ConfigError(f"{key}: {name!r} is no function")
    made: Callable[..., Any] = found
    return made
