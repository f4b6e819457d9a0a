"""What the response cache is asked for a request, and what it stores.

Two requests share an answer when their whole prompts, sampling and surroundings are equal. On routes with
``response_cache.similar`` they also do when all of that is equal but the text of the latest user turn, which
is similar enough. So nothing that is personal to one request reaches another.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from msgspec.structs import replace

from budgeting.token_ids import joined
from budgeting.values import Message, Role
from gateway.contracts.values import Answer, FinishReason, GenerateRequest
from gateway.generation.job import Job
from gateway.prompts.canonical import render_context
from resilience.question_vectors import numbers_in
from resilience.response_cache import ResponseCache, digest_of
from resilience.response_cache_values import CachedAnswer, Question

MAX_QUESTION_CHARS: Final = 2_000
"""A longer turn is rarely one question; it is answered when it is the same."""


class AnswerCache:
    """The response cache for requests.

    Args:
        cache: finds and stores; ``None`` when it is off.
        deployment: the engine's model. Processes that share a store share answers only when it is the same.
    """

    def __init__(self, cache: ResponseCache | None, deployment: str) -> None:
        self._cache = cache
        self._deployment = deployment

    async def find(self, job: Job, timeout_s: float | None = None) -> CachedAnswer | None:
        """A stored answer to the same request or a similar one; raises nothing but a cancellation."""
        if self._cache is None:
            return None
        question = question_of(job, self._deployment)
        return await self._cache.find(key_of(job, self._deployment), timeout_s, question)

    def remember(self, job: Job, answer: Answer) -> None:
        """Store a whole answer of the primary backend; any other is ignored.

        One that ended at its length is for the same request only.
        """
        if self._cache is None or not worth_keeping(answer):
            return
        kept = CachedAnswer(answer.output_text, answer.finish_reason.value, answer.reasoning)
        whole = answer.finish_reason is FinishReason.STOP
        self._cache.remember(
            lambda: key_of(job, self._deployment),
            kept,
            lambda: question_of(job, self._deployment) if whole else None,
        )


def worth_keeping(answer: Answer) -> bool:
    """Whether an answer may be served again: complete, not degraded, one text, and no call of a tool, which
    may have had its effect.
    """
    whole = answer.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    plain = answer.logprobs is None and not answer.others and bool(answer.output_text)
    return whole and plain and not answer.tool_calls and answer.fallback is None


def _of_tools(request: GenerateRequest) -> str | None:
    """What templates need not show of tools and thinking."""
    asked = (request.tools, request.tool_choice, request.parallel_tool_calls, request.reasoning_effort)
    if not any(asked) and not request.template_kwargs:
        return None
    return repr((asked, dict(request.template_kwargs)))


def _of_images(messages: Sequence[Message]) -> str | None:
    """What token ids do not show of a prompt with images: which ones, and where in their messages."""
    shown = [(index, one.parts) for index, one in enumerate(messages) if one.parts]
    return repr(shown) if shown else None


def key_of(job: Job, deployment: str) -> str:
    """What the cache is asked for a request."""
    images = _of_images(job.plan.messages)
    # The prompt's token ids hold the context, the evidence and every turn that is sent.
    return digest_of(["exact", *_surroundings(job, deployment), images], joined(job.plan.token_ids))


def question_of(job: Job, deployment: str) -> Question | None:
    """The latest user turn, and all that a similar one must share; ``None``: only the same request counts."""
    similar, messages = job.target.route.similar, job.request.messages
    latest = next((at for at, one in reversed([*enumerate(messages)]) if one.role is Role.USER), None)
    if similar is None or latest is None or any(one.parts for one in messages):
        return None
    text = messages[latest].content
    if not text.strip() or len(text) > MAX_QUESTION_CHARS:
        return None
    others = [*messages[:latest], replace(messages[latest], content=""), *messages[latest + 1 :]]
    shelf = digest_of(
        [
            "similar",
            similar.model,
            *_surroundings(job, deployment),
            *_evidence(job.request),
            render_context(job.request.context),
            repr(numbers_in(text)),
            *map(repr, others),
        ]
    )
    return Question(text, shelf, job.request.caller.tenant, similar.model, similar.threshold)


def _evidence(request: GenerateRequest) -> Iterator[str]:
    """Retrieval may find the same chunks in another order."""
    for chunk in sorted({(one.source_type, one.text) for one in request.chunks}):
        yield repr(chunk)


def _surroundings(job: Job, deployment: str) -> list[str | None]:
    """What no two requests that share an answer differ in."""
    request = job.request
    adapter = job.lease.adapter
    return [
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
        _of_tools(request),
    ]
