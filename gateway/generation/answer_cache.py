"""What the response cache is asked for a request, and what it stores.

Two requests share an answer exactly when their whole prompts, sampling and surroundings are equal.
"""

from collections.abc import Sequence

from budgeting.values import Message
from gateway.contracts.values import Answer, FinishReason, GenerateRequest
from gateway.generation.job import Job
from resilience.response_cache import ResponseCache, digest_of
from resilience.response_cache_values import CachedAnswer


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
        """A stored answer to the same request; raises nothing but a cancellation."""
        if self._cache is None:
            return None
        return await self._cache.find(key_of(job, self._deployment), timeout_s)

    def remember(self, job: Job, answer: Answer) -> None:
        """Store a whole answer of the primary backend; any other is ignored."""
        if self._cache is None or not worth_keeping(answer):
            return
        kept = CachedAnswer(answer.output_text, answer.finish_reason.value, answer.reasoning)
        self._cache.remember(lambda: key_of(job, self._deployment), kept)


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
        _of_tools(request),
        _of_images(job.plan.messages),
    ]
    # The prompt's token ids hold the context, the evidence and every turn that is sent.
    return digest_of(["exact", *surroundings], job.plan.token_ids)
