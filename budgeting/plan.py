"""The budget stage: turns a canonical prompt into a plan of what is sent, which always fits the model."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Protocol, TypeVar

from budgeting.errors import ContextTooLong, EmptyPrompt, InvalidReserve, UnknownTokenId
from budgeting.fit import Fitting
from budgeting.images import DEFAULT_COST, ImageCost
from budgeting.learned_counter import PromptCounter
from budgeting.summary import ExtractiveSummarizer, Summarizer
from budgeting.values import (
    BudgetRequest,
    CanonicalPrompt,
    Plan,
    PromptSection,
    SectionCounts,
    SummaryKind,
    system_message,
)

# The least share of the model's length that trimming keeps for the answer: that which the default sections
# (3,400 tokens) leave of 4,096.
RESERVE_SHARE = 696 / 4096


def default_reserve(max_model_len: int, sections: int) -> int:
    """Tokens that trimming to ``sections`` keeps for an answer without a given length.

    It is what the sections leave of the model's length, but at least RESERVE_SHARE of that length, so that
    the answer of a short model has a proportional reserve.
    """
    return min(max(max_model_len - sections, int(max_model_len * RESERVE_SHARE), 1), max_model_len - 1)


# Bounds of a plan made on the event loop, which it blocks: about 0.8 ms of tokenizing by `tokenizers` (see
# counting.MESSAGE_CHARS; a faster encoder may do more), and 1 µs for a cached message.
INLINE_CHARS = 2_048
INLINE_MESSAGES = 128


T = TypeVar("T")


class Offload(Protocol):
    """Runs work in a thread, as :func:`asyncio.to_thread` does."""

    async def __call__(self, work: Callable[[], T], /) -> T:
        """The result of ``work``; raises what it raises."""


@dataclass(slots=True, eq=False)
class BudgetPlanner:
    """Plans prompts for one model. Deterministic: the same request always gives the same plan.

    ``max_model_len`` bounds prompt and answer together; the extractive summarizer replaces a kind missing in
    ``summarizers``; ``images`` gives the tokens of an image.
    """

    tokenizer: PromptCounter
    _: KW_ONLY
    max_model_len: int
    summarizers: Mapping[SummaryKind, Summarizer] = field(default_factory=dict)
    images: ImageCost = DEFAULT_COST
    _extractive: Summarizer = field(init=False)

    def __post_init__(self) -> None:
        if self.max_model_len < 2:
            raise ValueError(f"max_model_len is {self.max_model_len}; allowed: at least 2")
        self._extractive = self.summarizers.get(SummaryKind.EXTRACTIVE) or ExtractiveSummarizer()

    def plan(self, request: BudgetRequest) -> Plan:
        """Plan what to send. ``counts.total + generation_reserve`` never exceeds the model's length.

        Raises:
            InvalidReserve: ``max_tokens`` is not between 1 and the model's length less 1.
            ContextTooLong: the parts that are always sent do not fit.
            EmptyPrompt, UnknownTokenId: a raw prompt cannot be sent as it is.
            TemplateRefused: the chat template does not take the conversation.
        """
        if request.prompt.raw is not None:
            return self._plan_raw(request.prompt.raw, self._reserve(request), request.max_input_tokens)
        fitting = self._fitting(request)
        return fitting.whole() or fitting.trimmed()

    async def plan_async(self, request: BudgetRequest, offload: Offload = asyncio.to_thread) -> Plan:
        """:meth:`plan`, offloaded when it would block the event loop: much uncached text, or trimming."""
        if not self._is_quick(request.prompt):
            return await offload(lambda: self.plan(request))
        if request.prompt.raw is not None:
            return self.plan(request)
        fitting = self._fitting(request)
        whole = fitting.whole()
        return whole if whole is not None else await offload(fitting.trimmed)

    def _is_quick(self, prompt: CanonicalPrompt) -> bool:
        most = INLINE_CHARS * self.tokenizer.speed
        if isinstance(prompt.raw, str):
            return len(prompt.raw) <= min(INLINE_CHARS, most)
        if prompt.raw is not None:
            return True
        if len(prompt.system) + len(prompt.turns) + len(prompt.evidence) > INLINE_MESSAGES:
            return False
        volatile = len(prompt.context)
        for chunk in prompt.evidence:
            volatile += len(chunk.text)
        if volatile > most:
            return False
        messages = (*map(system_message, prompt.system), *prompt.turns)
        return volatile + self.tokenizer.unseen_chars(messages, prompt.tools) <= most

    def _reserve(self, request: BudgetRequest) -> int | None:
        """Tokens for the answer: the caller's number, else the route's or version's if it fits the model."""
        if request.lenient:
            return None
        if request.max_tokens is not None:
            if not 0 < request.max_tokens < self.max_model_len:
                raise InvalidReserve(max_tokens=request.max_tokens, max_model_len=self.max_model_len)
            return request.max_tokens
        if request.reserve is not None and 0 < request.reserve < self.max_model_len:
            return request.reserve
        return None

    def _fitting(self, request: BudgetRequest) -> Fitting:
        reserve, budgets = self._reserve(request), request.budgets
        summarizer, reserved = None, reserve
        if budgets is not None:
            # A lenient request has no reserve, but its answer needs no more than its upper bound.
            bound = request.max_tokens or self.max_model_len
            reserved = reserve or min(default_reserve(self.max_model_len, budgets.total), bound)
            if request.summary is not SummaryKind.NONE and budgets.older_summary > 0:
                summarizer = self.summarizers.get(request.summary, self._extractive)
        allowed = self.max_model_len - (reserved or 1)
        if request.max_input_tokens is not None:
            allowed = min(allowed, request.max_input_tokens)
        return Fitting(
            self.tokenizer, request, allowed=allowed, max_model_len=self.max_model_len, reserve=reserve,
            summarizer=summarizer, images=self.images,
        )  # fmt: skip

    def _plan_raw(
        self, raw: str | tuple[int, ...], reserve: int | None, max_input_tokens: int | None
    ) -> Plan:
        token_ids = self.tokenizer.encode(raw) if isinstance(raw, str) else raw
        if not token_ids:
            raise EmptyPrompt
        unknown = self.tokenizer.unknown_id(token_ids)
        if unknown is not None:
            raise UnknownTokenId(unknown, self.tokenizer.vocabulary)
        needed, reserved = len(token_ids), reserve or 1
        allowed = min(self.max_model_len - reserved, max_input_tokens or self.max_model_len)
        if needed > allowed:
            raise ContextTooLong(
                section=PromptSection.RECENT_TURNS, needed=needed, allowed=allowed, reserve=reserved
            )
        return Plan(
            messages=(),
            token_ids=token_ids,
            counts=SectionCounts(recent_turns=needed),
            generation_reserve=reserve or self.max_model_len - needed,
            prefix_tokens=0,
            open_ended=reserve is None,
        )
