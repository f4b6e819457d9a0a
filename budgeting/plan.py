"""The budget stage: from a canonical prompt to what is sent, never more than the model can hold."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from budgeting.counting import EncodedChat
from budgeting.errors import ContextTooLong, EmptyPrompt, InvalidReserve, UnknownTokenId
from budgeting.reserve import default_reserve
from budgeting.sections import (
    EVIDENCE_TITLE,
    Arrangement,
    MergedChunks,
    arrange,
    evidence_line,
    exchanges,
    latest_turn,
    merge_chunks,
)
from budgeting.trimming import Offer, largest_that_fits, offers
from budgeting.values import (
    BudgetRequest,
    CanonicalPrompt,
    EvidenceChunk,
    Message,
    Plan,
    Role,
    Section,
    SectionCounts,
)

# A whole prompt of more characters per allowed token than this is not worth encoding to see if it fits;
# English has 4 to 5 characters a token with common vocabularies.
_HOPELESS_CHARS_PER_TOKEN = 8
# What a message's markup counts as in that sum: three tokens.
_MARKUP_CHARS = 3 * _HOPELESS_CHARS_PER_TOKEN

# How much is planned in the caller's thread, where it holds up the event loop: about 0.8 ms of tokenizing
# (see counting.MESSAGE_CHARS), and 1 µs for a message that the cache holds.
INLINE_CHARS = 2_048
INLINE_MESSAGES = 128


class PromptTokenizer(Protocol):
    """What the planner needs of a tokenizer; :class:`budgeting.counting.ChatTokenizer` is one.

    Invariants: deterministic; adding a message, or lines to one, never makes a conversation shorter.
    """

    def encode_parts(
        self, messages: Sequence[Message], cuts: Sequence[int], *, add_generation_prompt: bool = True
    ) -> EncodedChat:
        """Exact ids of a conversation, and where its first ``cuts[i]`` messages end in them."""

    def message_tokens(self, message: Message) -> int:
        """About how many tokens a message adds."""

    def text_tokens(self, text: str) -> int:
        """About how many tokens a text adds to a message."""

    def unseen_chars(self, messages: Iterable[Message]) -> int:
        """How much encoding these messages costs, in characters of text."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Ids of a raw text."""

    def unknown_id(self, token_ids: Sequence[int]) -> int | None:
        """The first id outside the vocabulary, if any."""

    @property
    def vocabulary(self) -> int:
        """One more than the largest token id."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A prompt that could be sent, encoded."""

    arrangement: Arrangement
    chat: EncodedChat

    @property
    def tokens(self) -> int:
        return len(self.chat.token_ids)

    @property
    def counts(self) -> SectionCounts:
        system, start, end = self.chat.ends
        return SectionCounts(
            system=system, retrieval=end - start, recent_turns=self.tokens - system - (end - start)
        )


class BudgetPlanner:
    """Plans prompts for one model. Deterministic: the same request always gives the same plan.

    Args:
        tokenizer: the model's; thread-safe.
        max_model_len: the longest sequence, prompt and answer together, in tokens; at least 2.
    """

    def __init__(self, tokenizer: PromptTokenizer, *, max_model_len: int) -> None:
        if max_model_len < 2:
            raise ValueError(f"max_model_len is {max_model_len}; allowed: at least 2")
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len

    def plan(self, request: BudgetRequest) -> Plan:
        """What to send. ``counts.total + generation_reserve`` never exceeds the model's length.

        Raises:
            InvalidReserve: ``max_tokens`` is not between 1 and the model's length less 1.
            ContextTooLong: what is always sent does not fit.
            EmptyPrompt, UnknownTokenId: a raw prompt cannot be sent as it is.
            TemplateRefused: the chat template does not take the conversation.
        """
        reserve = self._reserve(request)
        if request.prompt.raw is not None:
            return self._plan_raw(request.prompt.raw, reserve)
        return self._plan_chat(request, reserve)

    async def plan_async(self, request: BudgetRequest) -> Plan:
        """:meth:`plan`, in a thread when it would hold up the event loop."""
        if self._is_quick(request.prompt):
            return self.plan(request)
        return await asyncio.to_thread(self.plan, request)

    def _is_quick(self, prompt: CanonicalPrompt) -> bool:
        if isinstance(prompt.raw, str):
            return len(prompt.raw) <= INLINE_CHARS
        if prompt.raw is not None:
            return True
        if len(prompt.system) + len(prompt.turns) + len(prompt.evidence) > INLINE_MESSAGES:
            return False
        volatile = len(prompt.context) + sum(len(chunk.text) for chunk in prompt.evidence)
        if volatile > INLINE_CHARS:
            return False
        system = (Message(Role.SYSTEM, text) for text in prompt.system)
        return volatile + self._tokenizer.unseen_chars((*system, *prompt.turns)) <= INLINE_CHARS

    def _reserve(self, request: BudgetRequest) -> int:
        """The caller's wish, else the version's where the model is long enough for it, else the default."""
        if request.max_tokens is not None:
            if not 0 < request.max_tokens < self._max_model_len:
                raise InvalidReserve(max_tokens=request.max_tokens, max_model_len=self._max_model_len)
            return request.max_tokens
        if request.reserve is not None and 0 < request.reserve < self._max_model_len:
            return request.reserve
        return default_reserve(self._max_model_len)

    def _plan_raw(self, raw: str | tuple[int, ...], reserve: int) -> Plan:
        token_ids = self._tokenizer.encode(raw) if isinstance(raw, str) else raw
        if not token_ids:
            raise EmptyPrompt
        unknown = self._tokenizer.unknown_id(token_ids)
        if unknown is not None:
            raise UnknownTokenId(unknown, self._tokenizer.vocabulary)
        allowed = self._max_model_len - reserve
        if len(token_ids) > allowed:
            raise ContextTooLong(
                section=Section.RECENT_TURNS, needed=len(token_ids), allowed=allowed, reserve=reserve
            )
        counts = SectionCounts(recent_turns=len(token_ids))
        return Plan(
            messages=(), token_ids=token_ids, counts=counts, generation_reserve=reserve, prefix_tokens=0
        )

    def _plan_chat(self, request: BudgetRequest, reserve: int) -> Plan:
        prompt = request.prompt
        allowed = self._max_model_len - reserve
        merged = merge_chunks(prompt.evidence)

        if _chars(prompt) <= allowed * _HOPELESS_CHARS_PER_TOKEN:
            whole = self._encode(prompt, merged.kept, 0)
            if whole.tokens <= allowed:
                return _plan(whole, reserve, dropped_chunks=(), dropped_turns=0)

        latest = latest_turn(prompt.turns)
        least = self._encode(prompt, (), latest)
        if least.tokens > allowed:
            raise ContextTooLong(
                section=_largest(least.counts), needed=least.tokens, allowed=allowed, reserve=reserve
            )
        taken, guess = self._affordable(request, merged, least.counts, allowed - least.tokens)

        tried = {0: least}

        def fits(number: int) -> bool:
            if number not in tried:
                chunks, first_turn = _kept(taken[:number], latest)
                tried[number] = self._encode(
                    prompt, tuple(merged.kept[at] for at in sorted(chunks)), first_turn
                )
            return tried[number].tokens <= allowed

        number = largest_that_fits(guess, len(taken), fits)
        chunks, first_turn = _kept(taken[:number], latest)
        missing = {name for at in range(len(merged.kept)) if at not in chunks for name in merged.ids[at]}
        return _plan(
            tried[number],
            reserve,
            dropped_chunks=tuple(
                dict.fromkeys(chunk.chunk_id for chunk in prompt.evidence if chunk.chunk_id in missing)
            ),
            dropped_turns=first_turn,
        )

    def _affordable(
        self, request: BudgetRequest, merged: MergedChunks, least: SectionCounts, room: int
    ) -> tuple[list[Offer], int]:
        """The offers that might fit, a little more than expected to, and how many are expected to fit."""
        prompt = request.prompt
        starts = exchanges(prompt.turns)
        ends = [*starts[1:], latest_turn(prompt.turns)]
        title = 0
        if merged.kept:
            title = (
                self._tokenizer.text_tokens(f"{EVIDENCE_TITLE}\n\n")
                if prompt.context
                else self._tokenizer.message_tokens(Message(Role.SYSTEM, f"{EVIDENCE_TITLE}\n"))
            )
        in_order = offers(
            ranked_chunks=merged.ranked,
            exchange_starts=starts,
            chunk_tokens=lambda at: self._tokenizer.text_tokens(evidence_line(merged.kept[at]) + "\n"),
            exchange_tokens=lambda place: sum(
                self._tokenizer.message_tokens(turn) for turn in prompt.turns[starts[place] : ends[place]]
            ),
            evidence_room=request.budgets.retrieval - least.retrieval - title,
            turns_room=request.budgets.recent_turns - least.recent_turns,
        )
        # Estimates may be a little high: look somewhat further than they say, and one item more.
        margin = room // 8
        taken: list[Offer] = []
        guess = 0
        for offer in in_order:
            if offer.chunk is not None and title:
                room, title = room - title, 0
            room -= offer.tokens
            taken.append(offer)
            if room >= 0:
                guess = len(taken)
            elif room < -margin:
                break
        return taken, guess

    def _encode(
        self, prompt: CanonicalPrompt, chunks: Sequence[EvidenceChunk], first_turn: int
    ) -> _Candidate:
        arrangement = arrange(prompt, chunks, first_turn)
        return _Candidate(arrangement, self._tokenizer.encode_parts(arrangement.messages, arrangement.cuts))


def _plan(sent: _Candidate, reserve: int, *, dropped_chunks: tuple[str, ...], dropped_turns: int) -> Plan:
    return Plan(
        messages=sent.arrangement.messages,
        token_ids=sent.chat.token_ids,
        counts=sent.counts,
        generation_reserve=reserve,
        prefix_tokens=sent.counts.system,
        dropped_chunks=dropped_chunks,
        dropped_turns=dropped_turns,
    )


def _kept(taken: Sequence[Offer], latest: int) -> tuple[frozenset[int], int]:
    """Positions of the chunks sent, and the first turn sent."""
    chunks = frozenset(offer.chunk for offer in taken if offer.chunk is not None)
    starts = (offer.first_turn for offer in taken if offer.first_turn is not None)
    return chunks, min(starts, default=latest)


def _largest(counts: SectionCounts) -> Section:
    sizes = {
        Section.SYSTEM: counts.system,
        Section.RETRIEVAL: counts.retrieval,
        Section.RECENT_TURNS: counts.recent_turns,
    }
    return max(sizes, key=lambda section: sizes[section])


def _chars(prompt: CanonicalPrompt) -> int:
    return (
        sum(map(len, prompt.system))
        + sum(len(turn.content) + _MARKUP_CHARS for turn in prompt.turns)
        + sum(len(chunk.text) for chunk in prompt.evidence)
        + len(prompt.context)
    )
