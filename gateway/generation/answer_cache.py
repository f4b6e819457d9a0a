"""What the response cache is asked for a request, and what it stores.

Two requests share an answer exactly when their whole prompts, sampling and surroundings are equal. They share
one by similarity only inside a *scope*: tenant, route and model, adapter, prompt version, locale, intent,
sampling, the shape asked for, the context, the evidence, and all of the conversation but the text of its
latest user turn. So personal data of one request does not reach another.
"""

from dataclasses import dataclass

from budgeting.values import Role
from gateway.contracts.values import Answer, FinishReason, GenerateRequest
from gateway.generation.job import Job
from gateway.prompts.canonical import render_context
from resilience.response_cache import ResponseCache, digest_of
from resilience.response_cache_values import CachedAnswer, CacheQuestion


@dataclass(frozen=True, slots=True)
class AnswerFromCache:
    """A stored answer; ``warnings`` say when it answered a similar question."""

    text: str
    finish_reason: FinishReason
    warnings: tuple[str, ...] = ()


class AnswerCache:
    """The response cache for requests.

    Args:
        cache: finds and stores; ``None`` when it is off.
        deployment: the engine's model. Processes that share a store share answers only when it is the same.
    """

    def __init__(self, cache: ResponseCache | None, deployment: str) -> None:
        self._cache = cache
        self._deployment = deployment

    async def find(self, job: Job, timeout_s: float | None = None) -> AnswerFromCache | None:
        """A stored answer that fits the request; raises nothing but a cancellation."""
        if self._cache is None:
            return None
        hit = await self._cache.find(question_of(job, self._deployment), timeout_s)
        if hit is None:
            return None
        warnings = () if hit.exact else (f"answered from a similar question ({hit.similarity:.2f})",)
        return AnswerFromCache(hit.kept.text, FinishReason(hit.kept.finish_reason), warnings)

    def remember(self, job: Job, answer: Answer) -> None:
        """Store a whole answer of the primary backend; any other is ignored.

        One that ended at its length is stored for the same question only.
        """
        if self._cache is None or not worth_keeping(answer):
            return
        kept = CachedAnswer(
            answer.output_text, answer.finish_reason.value, similar=answer.finish_reason is FinishReason.STOP
        )
        self._cache.remember(lambda: question_of(job, self._deployment), kept)


def worth_keeping(answer: Answer) -> bool:
    """Whether an answer may be served again: complete, not degraded, one plain text."""
    whole = answer.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    plain = answer.logprobs is None and not answer.others and bool(answer.output_text)
    return whole and plain and answer.fallback is None


def question_of(job: Job, deployment: str) -> CacheQuestion:
    """What the cache is asked for a request."""
    request = job.request
    adapter = job.lease.adapter
    surroundings: list[str | None] = [
        deployment,
        request.caller.tenant,
        request.contract.value,
        job.target.route.name,
        request.model,
        job.target.backend,
        None if adapter is None else adapter.adapter_id,
        None if adapter is None else f"{adapter.base_model} {adapter.path}",
        job.target.prompt_version,
        request.locale,
        request.intent,
        repr(request.sampling),
        repr(request.response_format),
        repr(dict(request.extra)) if request.extra else None,
    ]
    # The prompt's token ids hold the context, the evidence and every turn that is sent.
    key = digest_of(["exact", *surroundings], job.plan.token_ids)
    text, others = _latest_turn(request)
    scope = digest_of(["scope", *surroundings, *_evidence(request), render_context(request.context), *others])
    return CacheQuestion(key, scope, text)


def _latest_turn(request: GenerateRequest) -> tuple[str | None, list[str]]:
    """The text of the latest user turn, and every other message with its position."""
    latest = next(
        (
            number
            for number, message in reversed(list(enumerate(request.messages)))
            if message.role is Role.USER
        ),
        None,
    )
    if latest is None:
        return None, [repr(request.raw_prompt)]
    others = [str(latest)]
    for number, message in enumerate(request.messages):
        if number != latest:
            others += [message.role.value, message.content]
    return request.messages[latest].content, others


def _evidence(request: GenerateRequest) -> list[str]:
    """The evidence, sorted: another wording of the question may find the same chunks in another order."""
    chunks = sorted({(chunk.source_type, chunk.text) for chunk in request.chunks})
    return [str(len(chunks)), *(part for chunk in chunks for part in chunk)]
