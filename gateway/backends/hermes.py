"""Tool calls written as text: the grammar that binds them, and the reader that finds them in a stream.

::

    <tool_call>{"name":"check_stock","arguments":{"title":"Berserk"}}</tool_call>
    <tool_call>{"name":"apply_patch","arguments":*** Begin Patch

Text may come before the first call; further calls follow it directly. The grammar limits the name to the
tools that may be called and the arguments to their schemas, without padding, so an answer that follows the
grammar is parsed without guessing. The input of a custom tool with a Lark grammar is written as it is, since
such a grammar does not describe how a text is written as a JSON string. It may contain any mark, so it lasts
until the model ends the answer: such a call is the last one.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Final

from budgeting.template_input import CUSTOM_INPUT, CUSTOM_PARAMETERS
from budgeting.values import Tool, ToolChoice, ToolChoiceMode, ToolKind
from engine.text import overlap
from gateway.backends.custom_input import CustomInput
from gateway.contracts.events import Delta, ToolArgs, ToolBegin, ToolEnd, joined, with_figures
from gateway.contracts.formats import text_shape
from gateway.contracts.refusals import not_allowed
from gateway.contracts.values import FormatType, ResponseFormat
from gateway.errors import InvalidRequest

CALL_START: Final = "<tool_call>"
CALL_END: Final = "</tool_call>"
_NAME: Final = '{"name":'
_ARGUMENTS: Final = ',"arguments":'
_CLOSE: Final = "}" + CALL_END
_PLAIN: Final = f"PLAIN: /(.|\\n)*/ & ~/(.|\\n)*{CALL_START}(.|\\n)*/"


def callable_tools(tools: Sequence[Tool], choice: ToolChoice) -> tuple[Tool, ...]:
    if choice.mode is ToolChoiceMode.NONE:
        return ()
    if choice.mode is ToolChoiceMode.NAMED:
        return tuple([tool for tool in tools if tool.name == choice.name])
    return tuple([tool for tool in tools if not choice.allowed or tool.name in choice.allowed])


def call_grammar(
    tools: Sequence[Tool], choice: ToolChoice, *, parallel: bool, content: object | None = None
) -> str | None:
    """The grammar of an answer with calls, in llguidance's Lark; ``None`` where nothing may be called.

    Args:
        parallel: more than one call may be made.
        content: the JSON schema of an answer without calls; ``None``: any text, also in front of a call.
    """
    offered = callable_tools(tools, choice)
    if tools and choice.mode is ToolChoiceMode.NONE and content is None:
        return f"start: PLAIN\n{_PLAIN}\n"  # the model sees the tools, and may not call them
    if not offered:
        return None
    larks = [_lark(tool) for tool in offered]
    closed = [f"call_{number}" for number, lark in enumerate(larks) if lark is None]
    several = parallel and closed and choice.mode is not ToolChoiceMode.NAMED
    calls = "(call open)* last" if several else "last"
    texts: list[str] = []
    if choice.mode is not ToolChoiceMode.AUTO:
        start = f"open {calls}"
    elif content is None:
        # PLAIN is a text without a call, ``lead`` a text up to and with the start mark of the first call.
        start = f"PLAIN | lead {calls}"
        texts = [_PLAIN, f"lead[lazy]: /(.|\\n)*{CALL_START}/"]
    else:
        start = f"content | open {calls}"
        texts = [f"content: %json {_bound(content)}"]
    lines = [
        f"start: {start}",
        f'open: "{CALL_START}"',
        "last: " + " | ".join(f"call_{number}" for number in range(len(offered))),
    ]
    if several:
        lines.append("call: " + " | ".join(closed))
    lines += texts
    for number, (tool, lark) in enumerate(zip(offered, larks, strict=True)):
        head = json.dumps(_NAME + json.dumps(tool.name, ensure_ascii=False) + _ARGUMENTS)
        if lark is not None:
            lines.append(f"call_{number}: {head} %lark {{\n{lark}\n}}")
            continue
        lines.append(f"call_{number}: {head} arguments_{number} {json.dumps(_CLOSE)}")
        lines.append(f"arguments_{number}: %json {_bound(arguments_schema(tool))}")
    return "\n".join(lines) + "\n"


@lru_cache(maxsize=64)
def call_format(
    tools: tuple[Tool, ...], choice: ToolChoice | None, parallel: bool | None, shape: ResponseFormat
) -> ResponseFormat | None:
    """The format of an answer with these tools; ``None``: ``shape`` applies, since no tool may be called.

    Raises InvalidRequest for a shape that cannot be joined with tools. Custom tools have a valid
    :func:`input_format`.
    """
    choice = choice or ToolChoice()
    offered = callable_tools(tools, choice)
    content: object | None = None
    if shape.type is FormatType.JSON_OBJECT:
        content = {"type": "object"}
    elif shape.type is FormatType.JSON_SCHEMA:
        content = json.loads(shape.spec)
    elif shape.type is not FormatType.TEXT and offered:
        raise InvalidRequest(
            f"{shape.param} cannot be used with tools; leave one of them out", param=shape.param
        )
    grammar = call_grammar(tools, choice, parallel=parallel is not False, content=content)
    return None if grammar is None else ResponseFormat(FormatType.GRAMMAR, grammar, param="tools")


def input_format(tool: Tool, param: str = "format") -> ResponseFormat | None:
    """The format of a custom tool's input; ``None``: any text. Raises InvalidRequest: an unknown format."""
    form = json.loads(tool.format) if tool.format else {}
    if form.get("type", "text") == "text":
        return None
    match form:
        case {"type": "grammar", "grammar": {"syntax": "lark", "definition": str(lark)}}:
            return text_shape(FormatType.GRAMMAR, lark, param)
        case {"type": "grammar", "grammar": {"syntax": "regex", "definition": str(regex)}}:
            return text_shape(FormatType.REGEX, regex, param)
    allowed = "the type text, or grammar with a syntax (lark or regex) and a definition"
    raise not_allowed(param, "is another format", allowed)


def _lark(tool: Tool) -> str | None:
    """The Lark grammar of the tool's input, which is then written as it is, not as JSON."""
    form = input_format(tool)
    return form.spec if form is not None and form.type is FormatType.GRAMMAR else None


def arguments_schema(tool: Tool) -> object:
    """The schema of a call's arguments, an object."""
    if tool.kind is ToolKind.CUSTOM:
        form = input_format(tool)
        if form is None:
            return CUSTOM_PARAMETERS
        text = {"type": "string", "pattern": f"^(?:{_without_anchors(form.spec)})$"}
        return {"type": "object", "properties": {CUSTOM_INPUT: text}, "required": [CUSTOM_INPUT]}
    if tool.parameters is None:  # as at OpenAI, a function without arguments
        return {"type": "object", "properties": {}, "additionalProperties": False}
    schema = json.loads(tool.parameters)
    if isinstance(schema, dict) and "type" not in schema:
        return {"type": "object", **schema}
    return schema


def _without_anchors(pattern: str) -> str:
    """The pattern without anchors at its ends, which a match as a whole does not need."""
    pattern = pattern.removeprefix("^")
    escapes = len(pattern[:-1]) - len(pattern[:-1].rstrip("\\"))
    return pattern.removesuffix("$") if escapes % 2 == 0 else pattern


def _bound(schema: object) -> str:
    """The schema in the grammar's form, without white space between values."""
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": {"whitespace_flexible": False}}
    return json.dumps(schema, ensure_ascii=False)


class CallReader:
    """Turns pieces of one choice's text into events; sans-I/O.

    The first event of a piece carries its tokens and figures. Text that may be the beginning of a call is
    held back until that is known, and so are its tokens: the token ids of a stream spell its text.

    Args:
        answer_id: the calls' ids are made from it, so that a resumed answer has the same ones.
        must_call: the grammar allows no text.
        tool_of: returns a tool by its name.
    """

    def __init__(
        self, answer_id: str, index: int = 0, *, must_call: bool = False, tool_of: Callable[[str], Tool]
    ) -> None:
        self._answer_id = answer_id
        self._index = index
        self._must_call = must_call
        self._tool_of = tool_of
        self._read: Callable[[], Iterator[Delta]] = self._text
        self._held = ""
        self._custom: CustomInput | None = None
        self._value = _JsonEnd()
        self._waiting: Delta | None = None
        self.calls = 0

    def feed(self, piece: Delta) -> list[Delta]:
        """The events of a piece, in order; none while it may be the beginning of a call or its name."""
        self._held += piece.text
        events: list[Delta] = []
        while True:
            state = self._read
            events += state()
            if self._read == state:
                break
        self._waiting = piece if self._waiting is None else joined(self._waiting, piece, "")
        if events:
            events[0] = self._with_figures(events[0])
        return events

    @property
    def in_call(self) -> bool:
        """Whether a call has begun and not ended; its name may not be known yet."""
        return self._read != self._text

    def end(self, *, stopped: bool = False, by_model: bool = False) -> list[Delta]:
        """The last events.

        ``stopped``: the model or a stop string ended the text: what is held back is no call, and a call with
        complete arguments ends, too. Else the text is cut: what is held back is left out where the grammar
        allows only another call's mark.
        ``by_model``: the model ended it; an input that is not JSON ends, too.
        """
        if (stopped and self._read == self._close) or (by_model and self._read == self._input):
            self._held = _CLOSE
            return [self._with_figures(event) for event in self._close()]
        is_text = not self.in_call and (stopped or not (self._must_call or self.calls))
        held, self._held = self._held if is_text else "", ""
        if not held and self._waiting is None:
            return []
        return [self._with_figures(Delta(held, 0, index=self._index))]

    def _with_figures(self, event: Delta) -> Delta:
        waiting, self._waiting = self._waiting, None
        return event if waiting is None else with_figures(event, waiting)

    def _text(self) -> Iterator[Delta]:
        before, found, rest = self._held.partition(CALL_START)
        if found:
            self._held = rest
            self._read = self._name
        else:
            kept = overlap(before, CALL_START)
            self._held = before[len(before) - kept :]
            before = before[: len(before) - kept]
        if before:
            yield Delta(before, 0, index=self._index)

    def _name(self) -> Iterator[Delta]:
        head, found, rest = self._held.partition(_ARGUMENTS)
        if not found:
            return
        name = json.loads(head.removeprefix(_NAME))
        tool = self._tool_of(name)
        self._held = rest
        self._value = _JsonEnd()
        self._custom = CustomInput() if tool.kind is ToolKind.CUSTOM else None
        self._read = self._arguments if _lark(tool) is None else self._input
        yield ToolBegin(name, 0, index=self._index, call=self.calls, id=self._id(), kind=tool.kind)

    def _arguments(self) -> Iterator[Delta]:
        size = self._value.take(self._held)
        text, self._held = self._held[:size], self._held[size:]
        if self._value.ended:
            self._read = self._close
        if self._custom is not None:
            text = self._custom.take(text)
        if text:
            yield ToolArgs(text, 0, index=self._index, call=self.calls)

    def _input(self) -> Iterator[Delta]:
        text, self._held = self._held, ""
        if text:
            yield ToolArgs(text, 0, index=self._index, call=self.calls)

    def _close(self) -> Iterator[Delta]:
        if len(self._held) < len(_CLOSE):
            return
        self._held = self._held[len(_CLOSE) :]
        self._read = self._text
        self.calls += 1
        yield ToolEnd("", 0, index=self._index, call=self.calls - 1)

    def _id(self) -> str:
        made = hashlib.sha256(f"{self._answer_id}/{self._index}/{self.calls}".encode())
        return f"call_{made.hexdigest()[:24]}"


class _JsonEnd:
    """Finds the end of a JSON object that arrives in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.ended = False

    def take(self, text: str) -> int:
        """The number of characters of ``text`` that belong to the object."""
        for place, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif character == '"':
                self._in_string = not self._in_string
            elif self._in_string:
                self._escaped = character == "\\"
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    self.ended = True
                    return place + 1
        return len(text)
