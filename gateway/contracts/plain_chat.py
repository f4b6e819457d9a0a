"""Parses the ordinary chat body (texts, tools, and the fields that most clients send) in a fifth of the time.

The requests of an agent have the same tools, which are read once for equal bytes.
:class:`gateway.contracts.openai.ChatRequest` parses every other body, invalid ones included, and makes their
errors. For the same body both make the same request.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType, structs
from pydantic import TypeAdapter, ValidationError

from budgeting.token_cache import TokenCache
from budgeting.values import Message, Role, Tool, ToolCall
from gateway.contracts.dialect import ParsedRequest
from gateway.contracts.fields import MAX_CALL_ID, MaxTokens, Seed, Temperature, TopP, label_or_none
from gateway.contracts.origin import RequestOrigin
from gateway.contracts.refusals import FEW_FIELDS_BYTES, check_fields
from gateway.contracts.tool_fields import MAX_CALLS, ReasoningEffort, Tools
from gateway.contracts.tools import asked_tools, holds_calls, to_mode, to_tools
from gateway.contracts.values import EMPTY, Contract, GenerateRequest, Sampling
from gateway.errors import InvalidRequest

ROLES: Final[Mapping[str, Role]] = {**{role.value: role for role in Role}, "developer": Role.SYSTEM}
# This body's names of fields, by the names that internal errors use.
FIELDS: Final[Mapping[str, str]] = {"adapter_id": "model", "response_format": "response_format"}


KNOWN_TOOLS_BYTES: Final = 16 << 20
"""Bound of the tools that are kept, with their bytes: some hundred agents."""


class _Function(Struct, forbid_unknown_fields=True, gc=False):
    name: Annotated[str, Meta(min_length=1, max_length=MAX_CALL_ID)]
    arguments: str | None = None


class _Call(Struct, forbid_unknown_fields=True, gc=False):
    id: Annotated[str, Meta(min_length=1, max_length=MAX_CALL_ID)]
    function: _Function
    type: Literal["function"] = "function"


class _TextPart(Struct, forbid_unknown_fields=True, gc=False):
    type: Literal["text"]
    text: str


class _PlainMessage(Struct, forbid_unknown_fields=True, gc=False):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_TextPart] | UnsetType | None = UNSET
    tool_calls: Annotated[list[_Call], Meta(max_length=MAX_CALLS)] | None = None
    tool_call_id: Annotated[str, Meta(min_length=1, max_length=MAX_CALL_ID)] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: None = None


class _StreamOptions(Struct, forbid_unknown_fields=True, gc=False):
    include_usage: bool | None = None


class _PlainChat(Struct, forbid_unknown_fields=True):
    model: str
    messages: list[_PlainMessage]
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    seed: Seed | None = None
    user: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    tools: Raw | UnsetType = UNSET
    tool_choice: Literal["none", "auto", "required"] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None


_decode: Final = msgspec.json.Decoder(_PlainChat).decode


_tool_bodies: Final = TypeAdapter(Tools)


class KnownTools:
    """The tools of earlier bodies, by the bytes in which they were sent. Thread-safe."""

    def __init__(self, max_bytes: int = KNOWN_TOOLS_BYTES) -> None:
        self._known: TokenCache[tuple[Tool, ...]] = TokenCache(max_bytes)

    def of(self, body: bytes) -> tuple[Tool, ...]:
        """Raises ValidationError, InvalidRequest."""
        tools = self._known.get(body)
        if tools is None:
            tools = to_tools(_tool_bodies.validate_json(body))
            self._known.put(body, tools, 3 * len(body))
        return tools


def plain_chat(body: bytes, origin: RequestOrigin, known: KnownTools) -> ParsedRequest | None:
    """The request of an ordinary body; ``None`` for any other. Raises InvalidRequest as ChatRequest would."""
    if len(body) > FEW_FIELDS_BYTES:
        check_fields(body)
    try:
        chat = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    model, user, options, given = chat.model, chat.user or None, chat.stream_options, chat.messages
    if not 1 <= len(given) <= origin.max_messages:
        return None
    messages: list[Message] = []
    texts_only = True
    for one in given:
        content, role = one.content, one.role
        if (
            content.__class__ is str
            and role != "tool"
            and one.tool_calls is None
            and one.tool_call_id is None
            and one.reasoning is None
            and one.reasoning_content is None
            and "\0" not in content  # refused; a label with one is not printable
        ):
            messages.append(Message(ROLES[role], content))
        elif (other := _message(one)) is not None:
            messages.append(other)
            texts_only = False
        else:
            return None
    last = given[-1].role
    if last != "tool" and (last != "user" or not messages[-1].content.strip()):
        return None
    if label_or_none(model) is None:
        return None
    if user is not None and label_or_none(user) is None:
        return None
    usage = options is not None and bool(options.include_usage)
    if usage and not chat.stream:
        return None
    max_tokens, fields = chat.max_tokens, FIELDS
    if chat.max_completion_tokens is not None:
        max_tokens = chat.max_completion_tokens
        fields = {**FIELDS, "max_tokens": "max_completion_tokens"}
    own: Mapping[str, Any] = EMPTY
    in_history = not texts_only and holds_calls(messages)
    if in_history or chat.tools or chat.tool_choice or chat.reasoning_effort:
        try:
            own = _tool_fields(chat, in_history, known)
        except (ValidationError, InvalidRequest):
            return None
    request = GenerateRequest(
        # By place: a dict of names would take twice the time.
        *structs.astuple(structs.replace(origin, session_id=user)),
        contract=Contract.CHAT,
        messages=tuple(messages),
        model=model,
        user=user,
        sampling=Sampling(max_tokens, chat.temperature, chat.top_p, seed=chat.seed),
        priority=origin.capped(0),
        stream=bool(chat.stream),
        labelled=False,
        fields=fields,
        **own,
    )
    return ParsedRequest(request, usage, False)


def _message(one: _PlainMessage) -> Message | None:
    """A message that is more than a text; ``None`` if pydantic must refuse it."""
    content, calls, call_id, role = one.content, one.tool_calls or (), one.tool_call_id, ROLES[one.role]
    if isinstance(content, list):
        content = "".join([part.text for part in content])
    if (content is UNSET and not calls) or (calls and role is not Role.ASSISTANT):
        return None
    if (call_id is None) is (role is Role.TOOL):
        return None
    texts = [content or "", one.reasoning or "", one.reasoning_content or ""]
    texts += [text for call in calls for text in (call.function.name, call.function.arguments or "")]
    ids = [call.id for call in calls] if call_id is None else [call_id]
    if "\0" in "".join(texts) or not all(one.isprintable() and one.strip() for one in ids):
        return None
    reasoning = one.reasoning if one.reasoning is not None else one.reasoning_content
    return Message(
        role,
        content or "",
        tuple([ToolCall(call.id, call.function.name, call.function.arguments or "") for call in calls]),
        call_id,
        reasoning=reasoning if role is Role.ASSISTANT else None,
    )


def _tool_fields(chat: _PlainChat, in_history: bool, known: KnownTools) -> dict[str, Any]:
    """The request's fields for tools. Raises ValidationError, InvalidRequest."""
    tools = known.of(bytes(chat.tools)) if chat.tools else ()
    own, needs = asked_tools(
        tools,
        to_mode(chat.tool_choice, tools),
        parallel=chat.parallel_tool_calls,
        effort=chat.reasoning_effort,
        in_history=in_history,
    )
    return {**own, "needs": needs}
