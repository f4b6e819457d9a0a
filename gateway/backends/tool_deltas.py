"""Converts the tool calls in a stream of OpenAI's deltas to events; sans-I/O.

Defects with one possible meaning are corrected: a repeated name or id, an empty piece, a missing id or index,
indices with gaps, several calls under one index, a call without arguments, or with ``null``.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

import msgspec
from msgspec import structs

from budgeting.values import ToolKind
from gateway.backends.custom_input import CustomInput
from gateway.contracts.events import Delta, IllegalEvent, ToolArgs, ToolBegin, ToolEnd, counted

CALLS_LEFT_OUT: Final = "parallel_tool_calls is false: only the first call of the model is given"
CALLS_NOT_ALLOWED: Final = "tool_choice is none: the calls of the model are left out"


class ToolText(msgspec.Struct):
    """The tool's part of an entry: its name, and a piece of its arguments or of a custom tool's input."""

    name: str | None = None
    arguments: str | None = None
    input: str | None = None


class ToolCallDelta(msgspec.Struct):
    """One entry of a chunk's ``tool_calls``."""

    index: int | None = None
    id: str | None = None
    function: ToolText | None = None
    custom: ToolText | None = None


class CallNotAllowed(IllegalEvent):
    """A call of a tool that the request does not allow."""


@dataclass(slots=True)
class _Call:
    """A call of one choice; ``index`` and ``id`` are the worker's.

    ``pieces``: those of the arguments, if the worker's calls may be interleaved.
    """

    index: int | None
    id: str | None
    name: str
    kind: ToolKind
    shown_id: str
    empty: bool = True
    open: bool = True
    custom: CustomInput | None = None
    pieces: list[str] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """Whether nothing can follow; unknown, so true, of a custom tool's plain text."""
        if self.kind is ToolKind.CUSTOM:
            return True
        if not self.pieces or not self.pieces[-1].rstrip().endswith("}"):
            return False
        try:
            msgspec.json.decode("".join(self.pieces))
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return False
        return True


class ToolCallReader(msgspec.Struct, eq=False):
    """Reads the calls of one answer.

    Args:
        generation_id: unique, for the ids of calls that have none.
        wrapped: names of custom tools that the model calls as functions with one argument.
        names: names of all tools; a call that is cut inside its name is dropped.
        allowed: names of the tools that may be called; empty: any.
        interleaved: whether pieces of a call may follow the beginning of the next one. Its events never do:
            those of the next one wait until its arguments are whole.
        single: give only the first call of a choice.
        may_call: whether to give calls at all; some servers ignore a ``tool_choice`` of none.

    ``began``: whether there is a call. ``left_out``: the warning for the caller if calls were not given.
    """

    generation_id: str
    wrapped: Collection[str] = ()
    names: Collection[str] = ()
    allowed: Collection[str] = ()
    interleaved: bool = False
    single: bool = False
    may_call: bool = True
    began: bool = False
    left_out: str | None = None
    _calls: dict[int, list[_Call]] = {}
    _ids: set[str] = set()
    _held: dict[int, list[Delta]] = {}

    def take(self, choice: int, delta: ToolCallDelta, *, cut: bool = False) -> list[Delta]:
        """The events of one entry; ``cut``: the entry comes with the end of a choice that was cut short.

        Raises IllegalEvent if the entry belongs to no call or an ended one, or gives a call a second name;
        CallNotAllowed.
        """
        calls = self._calls.setdefault(choice, [])
        called = delta.function or delta.custom or ToolText()
        kind = ToolKind.FUNCTION if delta.custom is None else ToolKind.CUSTOM
        number = self._number(calls, delta, called)
        events: list[Delta] = []
        if number == len(calls):
            if not self.may_call or (calls and self.single):
                self.left_out = CALLS_LEFT_OUT if self.may_call else CALLS_NOT_ALLOWED
                return []
            bare = not (called.arguments or called.input)
            if bare and (not called.name or (cut and called.name not in self.names)):
                return []
            if not called.name:
                raise IllegalEvent(f"tool call {number} of the stream has no name")
            if self.allowed and called.name not in self.allowed:
                raise CallNotAllowed("the model called a tool that is not allowed")
            self.began = True
            if not (self.interleaved and self.in_call(choice) and self._goes_on(calls)):
                events += self.end(choice)
            custom = CustomInput() if called.name in self.wrapped else None
            calls.append(_Call(delta.index, delta.id, called.name, kind, self._id(delta.id), custom=custom))
            if _open(calls) == number:
                events += _begun(choice, number, calls[number])
        call = calls[number]
        text = called.arguments if kind is ToolKind.FUNCTION else called.input
        if text == "null" and call.empty and kind is ToolKind.FUNCTION:
            text = None
        if called.name and called.name != call.name:
            raise IllegalEvent(f"tool call {number} of the stream has two names")
        if text:
            if not call.open:
                raise IllegalEvent(f"tool call {number} of the stream goes on after it has ended")
            call.empty = False
            if self.interleaved:
                call.pieces.append(text)
            if _open(calls) == number:
                events += _arguments(choice, number, call, text)
                while number < len(calls) - 1 and calls[number].whole:
                    events += self._ended(choice, number)
                    number += 1
                    events += _begun(choice, number, calls[number])
        return events

    def between(self, text: Delta) -> list[Delta]:
        """The events of a text or of reasoning: it ends the open call, or waits for the rest of it.

        Parsers return white space between the pieces of a call.
        """
        if self.in_call(text.index) and self._goes_on(self._calls[text.index]):
            held = structs.replace(text, tokens=0, logprobs=(), token_ids=())
            self._held.setdefault(text.index, []).append(held)
            return counted([], text)
        return [*self.end(text.index), text]

    def _goes_on(self, calls: list[_Call]) -> bool:
        """Whether the arguments of the open call are not whole; if others wait for them, they are not."""
        at = _open(calls)
        return at < len(calls) - 1 or not calls[at].whole

    def end(self, choice: int, *, cut: bool = False, stopped: bool = False) -> list[Delta]:
        """End the choice's open calls, since something else follows or the choice is complete; then comes the
        text that waited.

        ``cut``: the choice was cut short, so its last call stays open. ``stopped``: a stop string ended the
        choice; a call that it has cut stays open. Whether a function's arguments are complete is checked
        where they are read.
        """
        if not self.in_call(choice):
            return []
        calls, events = self._calls[choice], list[Delta]()
        first, last = _open(calls), len(calls) - 1
        for number in range(first, last):
            events += self._ended(choice, number)
            events += _begun(choice, number + 1, calls[number + 1])
        if not cut:
            events += self._ended(choice, last, stopped=stopped)
        return events if self.in_call(choice) else events + self._held.pop(choice, [])

    def _ended(self, choice: int, number: int, *, stopped: bool = False) -> list[Delta]:
        call = self._calls[choice][number]
        whole = call.kind is ToolKind.FUNCTION and not call.empty
        if stopped and not (whole if call.custom is None else call.custom.closed):
            return []
        call.open = False
        events: list[Delta] = []
        if call.custom is not None:
            if rest := call.custom.rest:
                events.append(ToolArgs(rest, 0, index=choice, call=number))
        elif call.empty and call.kind is ToolKind.FUNCTION:
            events.append(ToolArgs("{}", 0, index=choice, call=number))
        return [*events, ToolEnd("", 0, index=choice, call=number)]

    def continues(self, choice: int, delta: ToolCallDelta) -> bool:
        """Whether an entry belongs to the choice's open call."""
        calls = self._calls.get(choice) or []
        called = delta.function or delta.custom or ToolText()
        return self.in_call(choice) and self._number(calls, delta, called) == _open(calls)

    def in_call(self, choice: int) -> bool:
        """Whether a call of the choice has not ended."""
        calls = self._calls.get(choice)
        return calls is not None and bool(calls) and calls[-1].open

    def has_calls(self, choice: int) -> bool:
        return bool(self._calls.get(choice))

    def _number(self, calls: list[_Call], delta: ToolCallDelta, called: ToolText) -> int:
        """The number of the entry's call; the number of the next call if the entry begins one."""
        same = [number for number, call in enumerate(calls) if call.index == delta.index]
        number = same[-1] if same else len(calls) if delta.index is not None else len(calls) - 1
        if number < 0:
            return 0
        if number == len(calls) or not called.name:
            return number
        call = calls[number]
        other_id = delta.id and call.id and delta.id != call.id
        # Gemini may give several calls, each whole in its entry, neither an id nor an index.
        follows = not delta.id and called.arguments and call.kind is ToolKind.FUNCTION and call.pieces
        return len(calls) if other_id or (follows and call.whole) else number

    def _id(self, given: str | None) -> str:
        """The worker's id for a call; a new id if it is missing or another call has it."""
        made = given if given and given not in self._ids else f"call_{self.generation_id}_{len(self._ids)}"
        self._ids.add(made)
        return made


def _open(calls: list[_Call]) -> int:
    """The number of the first call that has not ended; calls end in order."""
    number = len(calls)
    while number and calls[number - 1].open:
        number -= 1
    return number


def _begun(choice: int, number: int, call: _Call) -> list[Delta]:
    """The beginning of a call, with the arguments that have waited."""
    kind = call.kind if call.custom is None else ToolKind.CUSTOM
    begin = ToolBegin(call.name, 0, index=choice, call=number, id=call.shown_id, kind=kind)
    return [begin, *_arguments(choice, number, call, "".join(call.pieces))]


def _arguments(choice: int, number: int, call: _Call, text: str) -> list[Delta]:
    text = text if call.custom is None else call.custom.take(text)
    return [ToolArgs(text, 0, index=choice, call=number)] if text else []
