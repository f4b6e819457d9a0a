"""The tools of a request in Converse's form; names and ids with the characters that Converse accepts."""

import hashlib
import itertools
import json
import re
from collections.abc import Container
from typing import Any, Final

import orjson

from budgeting.template_input import as_function, parsed_arguments
from budgeting.values import Message, Role, Tool, ToolCall, ToolChoiceMode, ToolKind
from gateway.backends.port import Work
from resilience.failures import invalid_input

MAX_ARGUMENT_DEPTH: Final = 64
"""Deepest nesting of a call's arguments in a history; botocore writes them by recursion."""
_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_ID: Final = re.compile(r"[a-zA-Z0-9_.:-]{1,64}")
_VALUES: Final = frozenset({"enum", "const", "default"})  # keywords of a schema whose values are not schemas
# Keywords of a schema whose values map names to schemas.
_MAPS: Final = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_READABLE = 47  # characters of a replaced name that stay readable before its hash


class ConverseTools:
    """The tools that one request has, and how its calls are written; Converse knows functions alone.

    ``may_call``: the answer may have calls. Converse has no choice ``none``, and needs tools if the history
    has calls; so calls in an answer that may not have any are left out. ``offered``: the request has tools.
    ``single``: the caller gets only the first call of the answer. ``custom``: the caller's names of custom
    tools; ``allowed``: those of the tools that may be called, empty for any.
    """

    def __init__(self, work: Work) -> None:
        self.generation_id = work.generation_id
        self._choice = work.tool_choice
        self._tools = tuple(map(as_function, work.tools))
        self.custom = frozenset([tool.name for tool in work.tools if tool.kind is ToolKind.CUSTOM])
        self.offered = bool(work.tools)
        self.may_call = self.offered and (
            self._choice is None or self._choice.mode is not ToolChoiceMode.NONE
        )
        self.allowed = () if self._choice is None else self._choice.allowed
        self.single = work.parallel_tool_calls is False
        self._called = dict.fromkeys([call.name for one in work.messages for call in one.tool_calls])
        names = dict.fromkeys([*[tool.name for tool in work.tools], *self._called])
        self._sent = {name: name for name in names if _NAME.fullmatch(name)}
        for name in names:
            if name not in self._sent:
                self._sent[name] = _replaced(name, self._sent.values())
        self._original = {sent: name for name, sent in self._sent.items()}
        self._ids: set[str] = set()

    def original(self, sent: str) -> str:
        """The caller's name of the tool that the model calls ``sent``."""
        return self._original.get(sent, sent)

    def config(self, *, strict: bool) -> dict[str, Any] | None:
        """``toolConfig``; ``None`` where the request needs none. ``strict``: the model takes that flag."""
        if not self.may_call and not self._called:
            return None
        choice = self._choice
        tools = [tool for tool in self._tools if not self.allowed or tool.name in self.allowed]
        stubs = [Tool(name) for name in self._called]
        config: dict[str, Any] = {"tools": [self._spec(tool, strict) for tool in tools or stubs]}
        if self.may_call and choice is not None:
            config["toolChoice"] = {
                ToolChoiceMode.REQUIRED: {"any": {}},
                ToolChoiceMode.NAMED: {"tool": {"name": self._sent.get(choice.name or "")}},
            }.get(choice.mode, {"auto": {}})
        return config

    def _spec(self, tool: Tool, strict: bool) -> dict[str, Any]:
        schema = {"type": "object"} | ({} if tool.parameters is None else orjson.loads(tool.parameters))
        description = tool.description if tool.description and tool.description.strip() else tool.name
        spec: dict[str, Any] = {
            "name": self._sent[tool.name],
            "description": description,
            "inputSchema": {"json": closed(schema) if tool.strict and strict else schema},
        }
        if tool.strict and strict:
            spec["strict"] = True
        return {"toolSpec": spec}

    def call_id(self, given: str) -> str:
        """The id for the next call of the history: ``given`` if Converse accepts it and no call has it."""
        sent = given if _ID.fullmatch(given) and given not in self._ids else _replaced(given, self._ids)
        self._ids.add(sent)
        return sent

    def call(self, call: ToolCall, sent_id: str) -> dict[str, Any]:
        """A call of the history as a block. Raises BackendFailure: its arguments are no JSON object."""
        return {
            "toolUse": {"toolUseId": sent_id, "name": self._sent[call.name], "input": _input(call)},
        }


def tools_as_messages(work: Work) -> tuple[Message, ...]:
    """The tools as a message of about as many tokens, for estimates; none without tools."""
    if not work.tools:
        return ()
    tools = map(as_function, work.tools)
    texts = [text for one in tools for text in (one.name, one.description, one.parameters) if text]
    return (Message(Role.SYSTEM, "\n".join(texts)),)


def closed(schema: Any, *, names: bool = False) -> Any:
    """The schema with ``additionalProperties`` false by default in every object, as models require it.

    ``names``: ``schema`` maps names to schemas.
    """
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if names:
        return {name: closed(one) for name, one in schema.items()}
    inner = {
        key: value if key in _VALUES else closed(value, names=key in _MAPS) for key, value in schema.items()
    }
    kind = inner.get("type")
    if kind == "object" or (isinstance(kind, list) and "object" in kind):
        inner.setdefault("additionalProperties", False)
    return inner


def _input(call: ToolCall) -> dict[str, Any]:
    if call.kind is ToolKind.CUSTOM:
        return {"input": call.arguments}
    try:
        found = parsed_arguments(call.arguments or "{}")
        json.dumps(found, allow_nan=False)  # 1e400 is read as an infinity, which Bedrock cannot
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or _depth_over(found, MAX_ARGUMENT_DEPTH):
        raise invalid_input(
            f"messages: the arguments of the call {call.id!r} of the tool {call.name!r} are not allowed; "
            f"allowed: a JSON object, nested {MAX_ARGUMENT_DEPTH} levels or fewer",
            "messages",
        )
    return found


def _depth_over(value: Any, most: int) -> bool:
    """Whether lists and objects are nested more than ``most`` levels deep."""
    if not isinstance(value, list | dict):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return not most or any(_depth_over(one, most - 1) for one in inner)


def _replaced(text: str, taken: Container[str]) -> str:
    """A name for ``text`` that Converse accepts and that is not ``taken``; the same in every request."""
    readable, encoded = re.sub(r"[^a-zA-Z0-9_-]", "_", text)[:_READABLE], text.encode(errors="surrogatepass")
    hashes = (hashlib.blake2b(b"%d:%b" % (number, encoded), digest_size=8) for number in itertools.count())
    return next(name for one in hashes if (name := f"{readable}_{one.hexdigest()}") not in taken)
