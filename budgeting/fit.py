"""Makes one prompt fit: whole if possible, else trimmed in the order of :mod:`budgeting.trimming`."""

import dataclasses
from collections.abc import Mapping, Sequence

from msgspec import Struct

from budgeting.counting import EncodedChat
from budgeting.duplicates import NO_CHUNKS, merge_chunks
from budgeting.errors import ContextTooLong, TemplateRefused
from budgeting.images import ImageCost
from budgeting.learned_counter import PromptCounter
from budgeting.sections import (
    EVIDENCE_TITLE,
    SUMMARY_TITLE,
    arrange,
    evidence_line,
    exchanges,
    latest_turn,
)
from budgeting.sentences import sentence_ends
from budgeting.summary import Summarizer
from budgeting.trimming import TrimCandidate, largest_that_fits, offers
from budgeting.values import (
    SPARE_ORDER,
    BudgetRequest,
    EvidenceChunk,
    Plan,
    PromptSection,
    SectionBudgets,
    SectionCounts,
    system_message,
)

# A prompt that may be trimmed is not encoded whole if it has more characters per allowed token than this:
# English has 4 to 5 characters a token with common vocabularies.
_HOPELESS_CHARS_PER_TOKEN = 8
# Characters that a message's markup counts in that sum: those of three tokens.
_MARKUP_CHARS = 3 * _HOPELESS_CHARS_PER_TOKEN
# The search for a place to cut a chunk covers at most this many characters for each token of room.
_CUT_CHARS_PER_TOKEN = 16
_SUMMARY_TRIES = 3  # how often a summary is requested, each time shorter, when it is too long


_BUDGETS = SectionBudgets()


class _Candidate(Struct, frozen=True):
    """A prompt that could be sent, encoded in ``tokens``."""

    chat: EncodedChat
    counts: SectionCounts
    image_tokens: int
    tokens: int


class _Selection(Struct, frozen=True):
    """What is sent of the optional parts: chunks (by position, with the text after a cut), turns, summary."""

    chunks: Mapping[int, str | None]
    first_turn: int
    summary: bool


class Fitting:
    """One request's prompt and the room for it.

    Args:
        allowed: tokens that the prompt should keep to.
        reserve: tokens for the answer; ``None``: the rest of the context.
        summarizer: makes the summary of older turns; ``None``: they are left out.
        images: the tokens of an image.
    """

    def __init__(
        self,
        tokenizer: PromptCounter,
        request: BudgetRequest,
        *,
        allowed: int,
        max_model_len: int,
        reserve: int | None,
        summarizer: Summarizer | None,
        images: ImageCost,
    ) -> None:
        self.tokenizer, self.request, self.images = tokenizer, request, images
        self.allowed, self.max_model_len, self.reserve = allowed, max_model_len, reserve
        self.summarizer, self._budgets = summarizer, request.budgets or _BUDGETS
        self._prompt = prompt = request.prompt
        self._tools = (0, 0)  # tokens of the tools: in front of the first turn, and in all
        if prompt.tools:
            self._tools = tokenizer.tool_tokens(
                prompt.tools, prompt.template_kwargs, system=bool(prompt.system)
            )
        self._merged = merge_chunks(prompt.evidence) if prompt.evidence else NO_CHUNKS
        self._everything = _Selection(dict.fromkeys(range(len(self._merged.kept))), 0, False)

    def whole(self) -> Plan | None:
        """The plan that sends everything; ``None`` when that does not fit and parts may be left out.

        Raises TemplateRefused; ContextTooLong without budgets.
        """
        may_trim = self.request.budgets is not None
        if may_trim and self._chars() > self.allowed * _HOPELESS_CHARS_PER_TOKEN:
            return None
        sent = self._encode(self._everything)
        if sent.tokens <= self.allowed:
            return self._plan(sent, self._everything, 0)
        if may_trim:
            return None
        raise self._too_long(sent, self.allowed)

    def _chars(self) -> int:
        prompt = self._prompt
        chars = sum(map(len, prompt.system)) + len(prompt.context) + _MARKUP_CHARS * len(prompt.turns)
        for turn in prompt.turns:
            chars += len(turn.content)
        for chunk in prompt.evidence:
            chars += len(chunk.text)
        return chars

    def _too_long(self, sent: _Candidate, allowed: int) -> ContextTooLong:
        sections = (PromptSection.SYSTEM, *SPARE_ORDER, PromptSection.TOOLS)  # a summary may be left out
        return ContextTooLong(
            section=max(sections, key=lambda section: getattr(sent.counts, section.value)),
            needed=sent.tokens,
            allowed=allowed,
            reserve=self.reserve or 1,
        )

    def trimmed(self) -> Plan:
        """The plan that leaves parts out. Raises ContextTooLong when the parts always sent do not fit."""
        least = self._encode(_Selection({}, latest_turn(self._prompt.turns), False))
        # Only a prompt that does not fit the model is too long; parts that are never cut may pass `allowed`.
        room = self.max_model_len - (self.reserve or 1)
        if least.tokens > room:
            raise self._too_long(least, room)
        self.allowed = max(self.allowed, least.tokens)
        taken, guess = self._affordable(least.counts, self.allowed - least.tokens)
        tried = {0: least}

        def fits(number: int) -> bool:
            selected = self._selection(taken[:number])
            if number not in tried:
                tried[number] = self._encode(selected)
            return tried[number].tokens + self._summary_tokens(selected) <= self.allowed

        number = largest_that_fits(guess, len(taken), fits)
        # When the summary comes next and its whole budget does not fit, it gets the room that is left.
        with_next = taken[: number + 1]
        selected = self._selection(with_next if with_next and with_next[-1].summary else taken[:number])
        sent, summarized = self._with_summary(tried[number], selected)
        return self._plan(sent, selected, summarized)

    def _affordable(self, least: SectionCounts, room: int) -> tuple[list[TrimCandidate], int]:
        """The offers that might fit (slightly more than expected to), and how many are expected to fit."""
        prompt, budgets = self._prompt, self._budgets
        merged, tokenizer = self._merged, self.tokenizer
        starts = exchanges(prompt.turns)
        ends = [*starts[1:], latest_turn(self._prompt.turns)]
        title = 0
        if merged.kept:
            title = (
                tokenizer.text_tokens(f"{EVIDENCE_TITLE}\n\n")
                if prompt.context
                else tokenizer.message_tokens(system_message(f"{EVIDENCE_TITLE}\n"))
            )
        summary_room = budgets.older_summary if self.summarizer is not None and starts else 0
        in_order = offers(
            ranked_chunks=merged.ranked,
            exchange_starts=starts,
            chunk_tokens=lambda at: self._line_tokens(merged.kept[at]),
            exchange_tokens=lambda place: (
                sum(tokenizer.message_tokens(turn) for turn in prompt.turns[starts[place] : ends[place]])
                + self.images.of(prompt.turns[starts[place] : ends[place]])
            ),
            evidence_room=budgets.retrieval - least.retrieval - title,
            turns_room=budgets.recent_turns - least.recent_turns,
            summary_room=summary_room,
            cut=self._cut,
            spare=self.request.spare,
        )
        # Estimates may be a little high, and a summary's room is free when no turn is left to summarize: take
        # offers up to this margin beyond the room, and one more.
        margin = room // 8 + summary_room
        taken: list[TrimCandidate] = []
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

    def _line_tokens(self, chunk: EvidenceChunk) -> int:
        return self.tokenizer.text_tokens(evidence_line(chunk) + "\n")

    def _cut(self, position: int, room: int) -> tuple[str, int] | None:
        """As many whole sentences of a chunk as fit in ``room``, and their tokens; ``None`` if none fits."""
        chunk = self._merged.kept[position]
        looked_at = chunk.text[: room * _CUT_CHARS_PER_TOKEN]
        ends = sentence_ends(looked_at)
        if len(looked_at) < len(chunk.text):
            ends = ends[:-1]  # the last end is that of the text searched, not of a sentence

        def tokens(number: int) -> int:
            return self._line_tokens(dataclasses.replace(chunk, text=looked_at[: ends[number - 1]].rstrip()))

        guess = len(ends) * room // max(1, self._line_tokens(dataclasses.replace(chunk, text=looked_at)))
        number = largest_that_fits(guess, len(ends), lambda number: tokens(number) <= room)
        if number == 0 or not (text := looked_at[: ends[number - 1]].rstrip()):
            return None
        return text, tokens(number)

    def _selection(self, taken: Sequence[TrimCandidate]) -> _Selection:
        starts = (offer.first_turn for offer in taken if offer.first_turn is not None)
        return _Selection(
            chunks={offer.chunk: offer.text for offer in taken if offer.chunk is not None},
            first_turn=min(starts, default=latest_turn(self._prompt.turns)),
            summary=any(offer.summary for offer in taken),
        )

    def _summary_tokens(self, selected: _Selection) -> int:
        """Tokens reserved for the summary of the turns not sent; at most what these turns would take.

        If message lengths are estimates, the whole budget is reserved, so that one more turn never needs more
        room than its own tokens.
        """
        budget = self._budgets.older_summary
        if not selected.summary or not self.tokenizer.per_message:
            return budget if selected.summary else 0
        tokens = 0
        for turn in reversed(self._prompt.turns[: selected.first_turn]):
            tokens += self.tokenizer.message_tokens(turn)
            if tokens >= budget:
                return budget
        return tokens

    def _with_summary(self, sent: _Candidate, selected: _Selection) -> tuple[_Candidate, int]:
        """``sent`` with a summary of the turns not sent, if one fits; and how many turns it summarizes."""
        room = min(self._budgets.older_summary, self.allowed - sent.tokens)
        if self.summarizer is None or not selected.summary or selected.first_turn == 0:
            return sent, 0
        turns = self._prompt.turns[: selected.first_turn]
        text_room = room - self.tokenizer.message_tokens(system_message(f"{SUMMARY_TITLE}\n"))
        for _ in range(_SUMMARY_TRIES):
            summary = self.summarizer.summarize(
                turns,
                max_tokens=text_room,
                count=self.tokenizer.text_tokens,
                owner=self.request.owner,
            )
            if summary is None:
                break
            try:
                longer = self._encode(selected, summary.text)
            except TemplateRefused:
                break  # the template takes the conversation, but no summary before it
            over = max(longer.tokens - self.allowed, longer.counts.older_summary - room)
            if over <= 0:
                return longer, summary.turns
            text_room -= over
        return sent, 0

    def _encode(self, selected: _Selection, summary: str = "") -> _Candidate:
        chunks = []
        for position in sorted(selected.chunks):
            chunk, text = self._merged.kept[position], selected.chunks[position]
            chunks.append(chunk if text is None else dataclasses.replace(chunk, text=text))
        arrangement = arrange(self._prompt, chunks, selected.first_turn, summary)
        prompt = self._prompt
        cuts: Sequence[int] = arrangement.cuts
        if cuts[2] == cuts[3]:  # no evidence: where it would be is not needed
            cuts = cuts[:2]
        chat = self.tokenizer.encode_parts(
            arrangement.messages, cuts, tools=prompt.tools, kwargs=prompt.template_kwargs
        )
        images = self.images.of(arrangement.messages)
        tokens = len(chat.token_ids) + images
        system, opening, *evidence = chat.ends
        retrieval = evidence[1] - evidence[0] if evidence else 0
        before, tools = self._tools
        first = min(before, system) if arrangement.cuts[0] else system
        counts = SectionCounts(
            system=system - first,
            retrieval=retrieval,
            recent_turns=tokens - opening - retrieval - (tools - first),
            older_summary=opening - system,
            tools=tools,
        )
        return _Candidate(chat, counts, images, tokens)

    def _plan(self, sent: _Candidate, selected: _Selection, summarized: int) -> Plan:
        dropped: tuple[str, ...] = ()
        cut: tuple[str, ...] = ()
        duplicates: tuple[str, ...] = ()
        merged = self._merged
        if merged.kept:
            missing = {
                name for at in range(len(merged.kept)) if at not in selected.chunks for name in merged.ids[at]
            }
            in_order = dict.fromkeys(chunk.chunk_id for chunk in self._prompt.evidence)
            dropped = tuple(name for name in in_order if name in missing)
            cut = tuple(
                merged.kept[at].chunk_id for at, text in sorted(selected.chunks.items()) if text is not None
            )
            sent_as = {name for at in selected.chunks for name in merged.ids[at][1:]}
            duplicates = tuple(name for name in in_order if name in sent_as)
        room = self.max_model_len - sent.tokens
        bounded = self.request.max_tokens if self.request.lenient else None
        return Plan(
            messages=tuple(sent.chat.messages),
            token_ids=sent.chat.token_ids,
            counts=sent.counts,
            generation_reserve=self.reserve or min(room, bounded or room),
            prefix_tokens=sent.chat.ends[0],
            dropped_chunks=dropped,
            dropped_turns=selected.first_turn,
            cut_chunks=cut,
            merged_chunks=duplicates,
            summarized_turns=summarized,
            open_ended=self.reserve is None and (bounded or room) >= room,
            tools=self._prompt.tools,
            image_tokens=sent.image_tokens,
        )
