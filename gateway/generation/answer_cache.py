"""Looks up and stores requests' answers in the response cache.

Two requests share an answer if their prompts, sampling and surroundings (tenant, route, model, …) are equal.
On routes with ``response_cache.similar`` the text of the latest user turn need only be similar; all else must
be equal. So nothing that is personal to one request reaches another one.
"""

from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from budgeting.token_ids import joined
from budgeting.values import Role
from gateway.contracts.answer import Answer
from gateway.contracts.values import FinishReason, GenerateRequest
from gateway.generation.job import Job
from gateway.prompts.canonical import render_context
from resilience.question_vectors import numbers_in
from resilience.response_cache import ResponseCache, digest_of
from resilience.response_cache_values import CachedAnswer, CacheFigures, Question

MAX_QUESTION_CHARS: Final = 2_000
"""A longer turn is rarely one question; it shares an answer only with an equal one."""


@dataclass(frozen=True, slots=True)
class AnswerCache:
    """The response cache for requests.

    Args:
        cache: the response cache; ``None`` if it is off.
        deployment: the engine's model. Processes that share a store share answers only if it is equal.
        place: the store's address without a password, for display.
    """

    cache: ResponseCache | None
    deployment: str
    place: str = ""

    def figures(self) -> CacheFigures | None:
        """Return the figures of the stored answers; ``None`` without a cache, or if Redis stores them."""
        return None if self.cache is None else self.cache.store.figures()

    async def find(self, job: Job, timeout_s: float | None = None) -> CachedAnswer | None:
        """Return a stored answer to an equal or similar request; raises nothing but a cancellation."""
        if self.cache is None:
            return None
        question = question_of(job, self.deployment)
        return await self.cache.find(key_of(job, self.deployment), timeout_s, question)

    def remember(self, job: Job, answer: Answer) -> None:
        """Store a complete answer of the primary backend; ignore any other.

        An answer that ended at its length limit is only served to an equal request.
        """
        if self.cache is None or not worth_keeping(answer):
            return
        stored = CachedAnswer(answer.output_text, answer.finish_reason.value, answer.reasoning)
        whole = answer.finish_reason is FinishReason.STOP
        self.cache.remember(
            lambda: key_of(job, self.deployment),
            stored,
            lambda: question_of(job, self.deployment) if whole else None,
        )


def worth_keeping(answer: Answer) -> bool:
    """Whether an answer may be served again: complete, not degraded, one text, and without tool calls,
    because a tool may have had its effect.
    """
    whole = answer.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    plain = answer.logprobs is None and not answer.others and bool(answer.output_text)
    return whole and plain and not answer.tool_calls and answer.fallback is None


def _of_tools(request: GenerateRequest) -> str | None:
    """Return the settings of tools and reasoning, which the prompt's token ids need not contain."""
    asked = (request.tools, request.tool_choice, request.parallel_tool_calls, request.reasoning_effort)
    if not any(asked) and not request.template_kwargs:
        return None
    return repr((asked, dict(request.template_kwargs)))


def key_of(job: Job, deployment: str) -> str:
    """Return a digest of the prompt and of all that must be equal.

    The messages contain the context, the evidence, every turn that is sent, and its images. Their token ids
    are not compared: without the model's tokenizer they are stand-ins, which change as the estimate does.
    """
    messages = job.plan.messages
    ids = () if messages else joined(job.plan.token_ids)
    texts = [
        text for one in messages for text in ((one.role, one.content) if one.plain else (None, repr(one)))
    ]
    return digest_of(["exact", *_surroundings(job, deployment), *texts], ids)


def question_of(job: Job, deployment: str) -> Question | None:
    """Return the latest user turn, with a key of all that must be equal; ``None``: no similarity search."""
    similar, messages = job.target.route.config.response_cache.similar, job.request.messages
    latest = next((at for at, one in reversed([*enumerate(messages)]) if one.role is Role.USER), None)
    if similar is None or latest is None or any(one.parts for one in messages):
        return None
    text = messages[latest].content
    if not text.strip() or len(text) > MAX_QUESTION_CHARS:
        return None
    others = [*messages[:latest], replace(messages[latest], content=""), *messages[latest + 1 :]]
    equality_key = digest_of(
        [
            "similar",
            similar.model,
            *_surroundings(job, deployment),
            # Sorted, because retrieval may return the same chunks in another order.
            *map(repr, sorted({(one.source_type, one.text) for one in job.request.chunks})),
            render_context(job.request.context),
            repr(numbers_in(text)),
            *map(repr, others),
        ]
    )
    return Question(text, equality_key, job.request.caller.tenant, similar.model, similar.threshold)


def _surroundings(job: Job, deployment: str) -> list[str | None]:
    """Return the values besides the prompt that must be equal for two requests to share an answer."""
    request = job.request
    adapter = job.lease.adapter
    return [
        deployment,
        request.caller.tenant,
        request.contract.value,
        job.target.route.name,
        request.model,
        # A key's own name of a model may be another key's name of another model.
        job.target.model,
        # The stored answer may be of a model that another key of the tenant may not use.
        None if request.caller.models is None else repr(sorted(request.caller.models)),
        job.target.backend,
        job.lease.adapter_id,
        None if adapter is None else f"{adapter.base_model} {adapter.path}",
        job.target.prompt_version,
        request.locale,
        request.intent,
        repr(request.sampling),
        repr(request.response_format),
        repr(dict(request.extra)) if request.extra else None,
        _of_tools(request),
    ]
