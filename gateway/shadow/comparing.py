"""Compares two answers to one request. Runs in a thread, in short steps."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import orjson

from accounting.shadow_values import ShadowPair, ShadowSide
from budgeting.values import ToolCall
from gateway.contracts.answer import Answer
from gateway.shadow.asking import ShadowAnswer
from gateway.shadow.checks import Checks, Exam, exam_of
from gateway.shadow.language import language_of
from gateway.shadow.likeness import chrf, yield_thread
from gateway.shadow.personal import Redactor, redact_calls
from gateway.shadow.sampling import Copy
from resilience.leg_limits import Cost, free


@dataclass(frozen=True, slots=True)
class JudgedPair:
    """Both answers, redacted, as a judge may read them."""

    question: str
    evidence: tuple[str, ...]
    primary: str
    shadow: str


@dataclass(frozen=True, slots=True)
class Comparer:
    """Makes pairs.

    Args:
        redact: removes content that must not be stored.
        keep_texts: whether the redacted answers are stored with the pair.
    """

    checks: Checks
    redact: Redactor
    costs: Mapping[str, Cost]
    keep_texts: bool
    unix_time: Callable[[], float]

    def compare(self, copy: Copy, asked: ShadowAnswer) -> tuple[ShadowPair, JudgedPair]:
        """Return the pair, and the texts for a judge. Raises the errors of the redactor."""
        answer, request = copy.answer, copy.request
        exam = exam_of(request, copy.plan, answer.output_text, called=bool(answer.tool_calls))
        texts = JudgedPair(
            self._redacted(exam.question),
            tuple(map(self._redacted, exam.evidence)) if asked.failure is None else (),
            self._redacted(answer.output_text),
            self._redacted(asked.text),
        )
        timings = answer.timings
        primary = replace(
            self._side(exam, answer, answer.backend_name, answer.backend_version),
            ttft_ms=None if timings.ttft_ms is None else max(0.0, timings.ttft_ms - timings.queue_wait_ms),
            total_ms=max(0.0, timings.total_ms - timings.queue_wait_ms),
            text=texts.primary if self.keep_texts else None,
        )
        exam = replace(exam, text=asked.text, called=bool(asked.tool_calls))
        shadow = replace(
            self._side(exam, asked, asked.backend, asked.version),
            ttft_ms=asked.ttft_ms,
            total_ms=asked.total_ms,
            failure=asked.failure,
            text=texts.shadow if self.keep_texts else None,
        )
        both = asked.failure is None
        pair = ShadowPair(
            pair_id=asked.generation_id,
            generation_id=request.generation_id,
            at=self.unix_time(),
            route=copy.target.route.name,
            primary=primary,
            shadow=shadow,
            prompt_version=copy.target.prompt_version,
            adapter_id=None if copy.adapter is None else copy.adapter.adapter_id,
            intent=request.intent,
            likeness=chrf(texts.primary, texts.shadow) if both and (texts.primary or texts.shadow) else None,
        )
        return pair, texts

    def _redacted(self, text: str) -> str:
        yield_thread()
        return self.redact(text)

    def _side(self, exam: Exam, given: Answer | ShadowAnswer, backend: str, version: str) -> ShadowSide:
        """Return one answer's side of the pair, computed from its text, calls and tokens."""
        usage, calls = given.usage, given.tool_calls
        cost = self.costs.get(backend, free)
        return ShadowSide(
            backend=backend,
            version=version,
            finish_reason=given.finish_reason.value,
            chars=len(exam.text),
            input_tokens=usage.input_tokens,
            output_tokens=usage.output_tokens,
            cost_nanousd=cost(
                usage.input_tokens, usage.output_tokens, usage.cached_tokens, usage.cache_write_tokens
            ),
            language=language_of(exam.text),
            checks=self.checks.run(exam),
            tool_calls=len(calls),
            tools=", ".join([call.name for call in calls]),
            calls=_hash(redact_calls(calls, self.redact)) if calls else "",
            reasoning_chars=len(given.reasoning or ""),
        )


def _hash(calls: Sequence[ToolCall]) -> str:
    """Hash tool calls: equal for the same tools and arguments in the same order, whatever the ids."""
    said = orjson.dumps([(call.name, _value(call)) for call in calls], option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(said, digest_size=16).hexdigest()


def _value(call: ToolCall) -> object:
    try:
        return orjson.loads(call.arguments)
    except orjson.JSONDecodeError:
        return call.arguments
