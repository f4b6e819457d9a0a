"""The events of an answer, which every backend gives and every contract writes, and their order.

Per choice: ``(Delta | Reasoning | ToolBegin ToolArgs* ToolEnd)*``, then its finish reason in the completion.
A choice begins with its first event.
"""

from collections.abc import Awaitable, Generator, Sequence
from typing import Final, cast

from msgspec import Struct, structs

from budgeting.values import ToolCall, ToolKind
from gateway.contracts.values import FinishReason, TokenLogprob

MAX_CALLS = 128  # the most calls in one choice: more are a fault of the model or of a parser


class _Taken:
    def __await__(self) -> Generator[None, None, None]:
        return _ENDED


_ENDED: Final = cast("Generator[None, None, None]", iter(()))
TAKEN: Final[Awaitable[None]] = _Taken()
"""Returned instead of a coroutine if an event was handled synchronously; need not be awaited."""


class Delta(Struct, frozen=True, tag=True):
    """A piece, perhaps empty, of the text of choice ``index`` (of ``sampling.n``), and its number of tokens.

    ``logprobs`` has an entry for each token if requested; ``token_ids`` is empty if the backend reports none.
    ``cached_tokens`` and ``queue_wait_s`` are in the first piece if known, so that an answer that is cut
    short is billed correctly.
    """

    text: str
    tokens: int
    cached_tokens: int | None = None
    queue_wait_s: float | None = None
    index: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    token_ids: tuple[int, ...] = ()


class Reasoning(Delta, frozen=True, tag=True):
    """A piece of the model's reasoning: ``text`` is not a part of the answer's text."""


class ToolBegin(Delta, frozen=True, tag=True):
    """Call number ``call`` of the choice begins; ``text`` is the tool's whole name, ``id`` the call's."""

    call: int = 0
    id: str = ""
    kind: ToolKind = ToolKind.FUNCTION


class ToolArgs(Delta, frozen=True, tag=True):
    """A piece of the arguments of call number ``call``, never empty."""

    call: int = 0


class ToolEnd(Delta, frozen=True, tag=True):
    """Call number ``call`` has all its arguments."""

    call: int = 0


def with_figures(event: Delta, given: Delta) -> Delta:
    """The event with the tokens and figures of ``given``, of whose text it is the first."""
    return structs.replace(
        event,
        tokens=given.tokens,
        cached_tokens=given.cached_tokens,
        queue_wait_s=given.queue_wait_s,
        logprobs=given.logprobs,
        token_ids=given.token_ids,
    )


def counted(events: list[Delta], given: Delta) -> list[Delta]:
    """The events made of ``given``; the first one gets the tokens and figures of ``given``.

    If that is reasoning, the first event of another kind gets a part of the tokens, by the lengths of the
    texts: which token ended the reasoning is not known.
    """
    first, *others = events or [Delta("", 0, index=given.index)]
    first = with_figures(first, given)
    if not others or given.tokens < 2 or first.__class__ is not Reasoning:
        return [first, *others]
    after = next((place for place, one in enumerate(others) if one.__class__ is not Reasoning), None)
    if after is None:
        return [first, *others]
    reasoning = len(first.text) + sum([len(one.text) for one in others[:after]])
    whole = reasoning + sum([len(one.text) for one in others[after:]])
    tokens = min(max(1, round(given.tokens * reasoning / max(1, whole))), given.tokens - 1)
    ids = given.token_ids
    others[after] = structs.replace(others[after], tokens=given.tokens - tokens, token_ids=ids[tokens:])
    return [structs.replace(first, tokens=tokens, token_ids=ids[:tokens]), *others]


def joined(first: Delta, second: Delta, text: str) -> Delta:
    """Both pieces as one with ``text``; it has token ids if both have them."""
    tokens = first.tokens + second.tokens
    token_ids = first.token_ids + second.token_ids
    return Delta(
        text,
        tokens,
        second.cached_tokens if first.cached_tokens is None else first.cached_tokens,
        second.queue_wait_s if first.queue_wait_s is None else first.queue_wait_s,
        second.index,
        first.logprobs + second.logprobs,
        token_ids if len(token_ids) == tokens else (),
    )


AnswerEvent = Delta | Reasoning | ToolBegin | ToolArgs | ToolEnd


class IllegalEvent(ValueError):
    """An event that the order does not allow."""


class _Part(Struct, eq=False):
    """A run of text or of reasoning, or a call with its arguments; ``begin`` is its first event."""

    begin: Delta
    pieces: list[str] = []
    logprobs: list[TokenLogprob] = []


class _OpenChoice(Struct, eq=False):
    """What one choice has so far, in order; ``open``: whether the last call has not ended."""

    parts: list[_Part] = []
    calls: int = 0
    open: bool = False
    ended: bool = False

    @property
    def in_text(self) -> bool:
        return bool(self.parts) and self.parts[-1].begin.__class__ is Delta

    def add(self, event: Delta) -> None:
        """Add a piece of text or of reasoning; another kind than before begins a part."""
        if not self.parts or self.parts[-1].begin.__class__ is not event.__class__:
            self.parts.append(_Part(event))
        part = self.parts[-1]
        part.pieces.append(event.text)
        part.logprobs += event.logprobs

    def joined(self, kind: type[Delta]) -> str:
        return "".join(["".join(part.pieces) for part in self.parts if part.begin.__class__ is kind])


class AnswerFold:
    """Checks the order of an answer's events, and folds them into the whole answer; sans-I/O.

    In a choice, calls are numbered from 0. A call's id is unique in the answer, and its name comes in one
    piece. Arguments come only inside their call. No event follows a choice's end.
    """

    def __init__(self, n: int = 1) -> None:
        self._choices = [_OpenChoice() for _ in range(n)]
        self._ids: set[str] = set()

    def take(self, event: Delta) -> None:
        """Add an event. If it raises IllegalEvent, nothing has changed."""
        if not 0 <= event.index < len(self._choices):
            raise IllegalEvent(f"choice {event.index} of {len(self._choices)}")
        choice = self._choices[event.index]
        if choice.ended:
            raise IllegalEvent(f"choice {event.index} has ended")
        match event:
            case ToolBegin():
                self._begin(choice, event)
            case ToolArgs():
                self._in_call(choice, event.call)
                if not event.text:
                    raise IllegalEvent(f"an empty piece of arguments of call {event.call}")
                choice.parts[-1].pieces.append(event.text)
            case ToolEnd():
                self._in_call(choice, event.call)
                if event.text:
                    raise IllegalEvent(f"the end of call {event.call} has text")
                choice.open = False
            case _ if not event.text and not (event.logprobs and choice.in_text and event.__class__ is Delta):
                pass  # the event only counts tokens
            case _ if choice.open:
                raise IllegalEvent(f"text inside call {choice.calls - 1}")
            case _:
                choice.add(event)

    def _begin(self, choice: _OpenChoice, event: ToolBegin) -> None:
        if choice.open:
            raise IllegalEvent(f"call {event.call} begins inside call {choice.calls - 1}")
        if event.call != choice.calls:
            raise IllegalEvent(f"call {event.call} follows {choice.calls} calls")
        if event.call >= MAX_CALLS:
            raise IllegalEvent(f"more than {MAX_CALLS} calls")
        if not event.text or not event.id:
            raise IllegalEvent(f"call {event.call} has no {'id' if event.text else 'name'}")
        if event.id in self._ids:
            raise IllegalEvent(f"call {event.call} has the id of another call")
        self._ids.add(event.id)
        choice.parts.append(_Part(event))
        choice.calls += 1
        choice.open = True

    def _in_call(self, choice: _OpenChoice, call: int) -> None:
        if not choice.open or call != choice.calls - 1:
            raise IllegalEvent(f"call {call} is not open")

    def end(self, reasons: Sequence[FinishReason]) -> None:
        """End all choices with these reasons. A choice that was cut short may end inside a call.

        Raises:
            IllegalEvent: the number of reasons differs from that of choices; a choice has ended before; a
                reason is ``tool_calls`` without a call, or ``stop`` or ``tool_calls`` inside a call.
        """
        if len(reasons) != len(self._choices):
            raise IllegalEvent(f"{len(reasons)} finish reasons for {len(self._choices)} choices")
        for index, (choice, reason) in enumerate(zip(self._choices, reasons, strict=True)):
            if choice.ended:
                raise IllegalEvent(f"choice {index} has ended")
            if reason is FinishReason.TOOL_CALLS and not choice.calls:
                raise IllegalEvent(f"choice {index} ends for its tool calls and has none")
            if choice.open and reason in (FinishReason.TOOL_CALLS, FinishReason.STOP):
                raise IllegalEvent(f"choice {index} ends with {reason} inside call {choice.calls - 1}")
        for choice in self._choices:
            choice.ended = True

    def text(self, index: int = 0) -> str:
        return self._choices[index].joined(Delta)

    def reasoning(self, index: int = 0) -> str | None:
        """A choice's reasoning so far; ``None`` when there is none."""
        return self._choices[index].joined(Reasoning) or None

    def tool_calls(self, index: int = 0) -> tuple[ToolCall, ...]:
        """A choice's calls so far; the last one may lack arguments."""
        return tuple(
            [
                ToolCall(begin.id, begin.text, "".join(part.pieces), begin.kind)
                for part in self._choices[index].parts
                if isinstance(begin := part.begin, ToolBegin)
            ]
        )

    def in_call(self, index: int = 0) -> bool:
        """Whether a call of the choice has not ended."""
        return self._choices[index].open

    def in_order(self) -> tuple[Delta, ...]:
        """The first choice as the fewest events that fold to it; they count no tokens."""
        choice, events = self._choices[0], list[Delta]()
        for part in choice.parts:
            begin, text = part.begin, "".join(part.pieces)
            if not isinstance(begin, ToolBegin):
                events.append(type(begin)(text, 0, logprobs=tuple(part.logprobs)))
                continue
            events.append(ToolBegin(begin.text, 0, call=begin.call, id=begin.id, kind=begin.kind))
            if text:
                events.append(ToolArgs(text, 0, call=begin.call))
            if not choice.open or part is not choice.parts[-1]:
                events.append(ToolEnd("", 0, call=begin.call))
        return tuple(events)
