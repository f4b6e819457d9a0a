"""The body of ``POST /v1/responses``, mapped to the inside."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final, Literal, Protocol, TypeVar

from pydantic import Field, Tag
from typing_extensions import TypeAliasType

from budgeting.values import ImageContent, Message, Role, Tool, ToolCall, ToolChoice, ToolChoiceMode, ToolKind
from gateway.contracts.checks import check_count, check_latest
from gateway.contracts.dialect import ParsedRequest
from gateway.contracts.fields import ANYTHING, Body, Label, MaxTokens, Name, Temperature, Text, TopP
from gateway.contracts.formats import FormatBody, from_format
from gateway.contracts.images import holds_data, said
from gateway.contracts.native import SluiceFields, request_of
from gateway.contracts.origin import RequestOrigin
from gateway.contracts.refusals import not_allowed
from gateway.contracts.tool_fields import MAX_TOOLS, CustomToolBody, FunctionBody, ReasoningEffort
from gateway.contracts.tools import asked_tools, holds_calls, named_tools
from gateway.contracts.values import PLAIN_TEXT, Contract, ResponseFormat, Sampling
from gateway.errors import InvalidRequest

T = TypeVar("T")

MAX_METADATA: Final = 16
"""Most pairs of ``metadata``, as at OpenAI."""
NAMESPACE_JOINT: Final = "__"
"""Between a namespace and its member in the name that the model is given."""
INCLUDED_LOGPROBS: Final = "message.output_text.logprobs"
INCLUDED_SEALED: Final = "reasoning.encrypted_content"

_LABELS: Final[Mapping[str, tuple[object, ...]]] = MappingProxyType(
    dict.fromkeys(
        ("id", "status", "phase", "annotations", "logprobs", "internal_chat_message_metadata_passthrough"),
        (ANYTHING,),
    )
)


class ItemPart(Body):
    """A part of a message, of a tool's output or of a reasoning item: a text, or an image of the user's."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {**_LABELS, "file_id": (None,)}
    type: Literal[
        "input_text", "output_text", "refusal", "reasoning_text", "summary_text", "text", "input_image"
    ]
    text: Text | None = None
    image_url: Text | None = None
    detail: Literal["auto", "low", "high"] | None = None
    refusal: Text | None = None


ItemParts = TypeAliasType("ItemParts", Annotated[list[ItemPart], Field(fail_fast=True)])
Words = Annotated[
    Annotated[Text, Tag("~text")] | Annotated[ItemParts, Tag("~parts")], Field(union_mode="left_to_right")
]


class InputItem(Body):
    """One of ``input``; which fields it has follows from its type."""

    neutral = _LABELS
    type: Literal[
        "message",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "reasoning",
    ] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Words | None = None
    call_id: Name | None = None
    name: Name | None = None
    namespace: Name | None = None
    arguments: Text | None = None
    input: Text | None = None
    output: Words | None = None
    summary: ItemParts | None = None
    encrypted_content: Text | None = None


InputItems = TypeAliasType("InputItems", Annotated[list[InputItem], Field(fail_fast=True)])
Input = Annotated[
    Annotated[Text, Tag("~text")] | Annotated[InputItems, Tag("~items")], Field(union_mode="left_to_right")
]


class PlainTool(Body):
    """A function or a custom tool; its fields are not nested as in chats."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "defer_loading": (None, False),
        "output_schema": (None,),
        "allowed_callers": (None,),
    }
    type: Literal["function", "custom"]
    name: Name
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None


class ToolItem(PlainTool):
    """One of ``tools``; those of a ``namespace`` are its members."""

    type: Literal["function", "custom", "namespace"]  # type: ignore[assignment]
    tools: Annotated[list[PlainTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None


ToolItems = TypeAliasType("ToolItems", Annotated[list[ToolItem], Field(max_length=MAX_TOOLS, fail_fast=True)])


class NamedTool(Body):
    """Names a tool."""

    type: Literal["function", "custom"]
    name: Name
    namespace: Name | None = None


class ChoiceObject(Body):
    """``tool_choice`` where it is an object."""

    type: Literal["function", "custom", "allowed_tools"]
    name: Name | None = None
    namespace: Name | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)] | None = None


class TextFormat(Body):
    """``text.format``."""

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: Text | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextBody(Body):
    """``text``."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {"verbosity": (None, "medium")}
    format: TextFormat | None = None


class ReasoningBody(Body):
    """``reasoning``; a summary is never written: the answer has the reasoning itself."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "summary": (None, "auto", "concise", "detailed"),
        "generate_summary": (None, "auto", "concise", "detailed"),
    }
    effort: ReasoningEffort | None = None


class ResponsesStreamOptions(Body):
    """``stream_options``."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {"include_obfuscation": (None, True, False)}


class ResponsesBody(Body):
    """The body of ``POST /v1/responses``."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "client_metadata": (ANYTHING,),
        "context_management": (None, []),
        "conversation": (None,),
        "max_tool_calls": (None,),
        "moderation": (None,),
        "prompt": (None,),
        "prompt_cache_options": (None,),
        "prompt_cache_retention": (None, "in_memory", "in-memory", "24h"),
        "safety_identifier": (ANYTHING,),
        "service_tier": (None, "auto", "default"),
    }
    model: Name
    input: Input
    instructions: Text | None = None
    max_output_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: ToolItems | None = None
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("~text")]
            | Annotated[ChoiceObject, Tag("~object")],
            Field(union_mode="left_to_right"),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningBody | None = None
    text: TextBody | None = None
    include: (
        list[
            Literal[
                "reasoning.encrypted_content",
                "message.output_text.logprobs",
                "message.input_image.image_url",
                "file_search_call.results",
                "web_search_call.results",
                "web_search_call.action.sources",
                "code_interpreter_call.outputs",
                "computer_call_output.output.image_url",
            ]
        ]
        | None
    ) = None
    metadata: Annotated[dict[str, Text], Field(max_length=MAX_METADATA)] | None = None
    previous_response_id: Name | None = None
    store: bool | None = None
    background: bool | None = None
    prompt_cache_key: Label | None = None
    user: Label | None = None
    truncation: Literal["auto", "disabled"] | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    sluice: SluiceFields | None = None


class ReasoningSeal(Protocol):
    """Seals reasoning for clients that send it back, bound to a tenant and a model."""

    def seal(self, tenant: str, model: str, text: str) -> str:
        """The text, sealed."""

    def opened(self, tenant: str, model: str, sealed: str) -> str | None:
        """The text; ``None`` when it was sealed elsewhere, for others, or is damaged."""


class ResponsesRequest(ParsedRequest, frozen=True):
    """A parsed request, what its response object repeats, and the namespaces of flattened tools.

    ``items`` are its own input, for a response that is stored. ``seal`` makes the ``encrypted_content`` of
    its reasoning, where that was asked for and there is a key. ``again`` is what another gateway runs it by.
    """

    echo: Mapping[str, Any] = MappingProxyType({})
    namespaces: Mapping[str, tuple[str, str]] = MappingProxyType({})
    store: bool = False
    background: bool = False
    previous_id: str | None = None
    items: Sequence[Mapping[str, Any]] = ()
    seal: Callable[[str], str] | None = None
    again: bytes | None = None


_FIELDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "response_format": "text.format",
        "adapter_id": "model",
        "reasoning_effort": "reasoning.effort",
    }
)
_NO_FIELDS: Final = SluiceFields()


def responses_request(
    body: ResponsesBody,
    origin: RequestOrigin,
    *,
    stores: bool = False,
    before: Sequence[Mapping[str, Any]] = (),
    seal: ReasoningSeal | None = None,
) -> ResponsesRequest:
    """Map a validated body to the inside. Raises InvalidRequest: a rule between fields is broken.

    ``stores``: whether responses can be stored; ``before`` are the items of the conversation that it goes on
    with.
    """
    bound = origin.caller.tenant, body.model
    opened = _closed if seal is None else partial(seal.opened, *bound)
    messages = tuple(_conversation(body, [InputItem.model_validate(dict(one)) for one in before], opened))
    store = _stores(body, stores, holds_data(messages))
    namespaces: dict[str, tuple[str, str]] = {}
    tools = named_tools(_flat(body.tools or (), namespaces))
    included = body.include or ()
    if body.top_logprobs is not None and INCLUDED_LOGPROBS not in included:
        raise not_allowed(
            "top_logprobs", "is given without include", f"with {INCLUDED_LOGPROBS!r} in include"
        )
    own, needs = asked_tools(
        tools,
        _choice(body.tool_choice, tools),
        parallel=body.parallel_tool_calls,
        effort=None if body.reasoning is None else body.reasoning.effort,
        in_history=holds_calls(messages),
    )
    native = body.sluice or _NO_FIELDS
    try:
        check_count(len(messages), origin.max_messages)
        check_latest(messages)
    except InvalidRequest as error:
        raise InvalidRequest(error.message.replace("messages", "input", 1), param="input") from None
    request = request_of(
        origin,
        Contract.RESPONSES,
        native,
        "sluice.context",
        messages=messages,
        model=body.model,
        # The client's own key for one conversation: it keeps the conversation near its prefix cache.
        session_id=native.session_id or body.prompt_cache_key or body.user,
        user=body.user,
        sampling=Sampling(
            max_tokens=body.max_output_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            logprobs=(body.top_logprobs or 0) if INCLUDED_LOGPROBS in included else None,
        ),
        response_format=_shape(None if body.text is None else body.text.format),
        priority=origin.priority(0),
        stream=bool(body.stream),
        needs=needs,
        truncate=body.truncation == "auto",
        fields={**_FIELDS, **{name: f"sluice.{name}" for name in native.__pydantic_fields_set__}},
        **own,
    )
    return ResponsesRequest(
        request,
        echo={**_echo(body), "store": store},
        namespaces=namespaces,
        store=store,
        background=bool(body.background),
        previous_id=body.previous_response_id,
        items=input_items(body, origin.generation_id) if store else (),
        seal=partial(seal.seal, *bound) if seal is not None and INCLUDED_SEALED in included else None,
    )


def input_items(body: ResponsesBody, generation_id: str) -> list[dict[str, Any]]:
    """The items of ``input`` with ids, as ``input_items`` lists them."""
    own = generation_id.removeprefix("gen_")
    if isinstance(body.input, str):
        text = [{"type": "input_text", "text": body.input}]
        given = [{"type": "message", "role": "user", "content": text}]
    else:
        given = [one.model_dump(exclude_none=True) | {"type": one.type} for one in body.input]
    return [{"id": f"item_{own}_{number}", "status": "completed", **one} for number, one in enumerate(given)]


def _stores(body: ResponsesBody, stores: bool, holds_image: bool) -> bool:
    """Whether the response is stored: at OpenAI it is unless the request says otherwise.

    No input that holds an image is stored, and the response says so; one with an image's address is.
    """
    if body.store and not stores:
        raise not_allowed("store", "is true", "false, this gateway stores no responses")
    if body.store and holds_image:
        raise not_allowed("store", "is true with an image in the input", "false, or the image's address")
    stores = stores and not holds_image
    store = stores if body.store is None else body.store
    if body.background and not store:
        raise not_allowed("background", "is true", "false where the response is not stored")
    return store


def _conversation(
    body: ResponsesBody, before: Sequence[InputItem], opened: Callable[[str], str | None]
) -> Iterator[Message]:
    """The items as messages: an assistant's reasoning, text and calls in a row are one message."""
    if body.instructions:
        yield Message(Role.SYSTEM, body.instructions)
    own = body.input
    if isinstance(own, str):
        if not before:
            yield Message(Role.USER, own)
            return
        own = [InputItem(type="message", role="user", content=own)]
    turn = _Turn()
    for index, item in enumerate((*before, *own), -len(before)):
        at = f"input.{index}"
        match item.type:
            case "reasoning":
                if turn.content is not None or turn.calls:
                    yield turn.taken()
                turn.reasoning.append(_reasoning(item, at, opened))
            case "function_call" | "custom_tool_call":
                turn.calls.append(_call(item, at))
            case "message" if item.role == "assistant":
                if turn.content is not None or turn.calls:
                    yield turn.taken()
                turn.content = _words(item.content, f"{at}.content")
            case _:
                if turn:
                    yield turn.taken()
                yield _other(item, at)
    if turn:
        yield turn.taken()


class _Turn:
    """An assistant's message, item by item."""

    def __init__(self) -> None:
        self.reasoning: list[str] = []
        self.content: str | None = None
        self.calls: list[ToolCall] = []

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.calls) or self.content is not None

    def taken(self) -> Message:
        """The message; the next one begins."""
        message = Message(
            Role.ASSISTANT,
            self.content or "",
            tool_calls=tuple(self.calls),
            reasoning="".join(self.reasoning) or None,
        )
        self.__init__()  # type: ignore[misc]
        return message


def _given(value: T | None, at: str) -> T:
    if value is None:
        raise InvalidRequest(f"{at} is missing; it is required", param=at)
    return value


def _words(given: str | Sequence[ItemPart] | None, at: str) -> str:
    if given is None:
        raise InvalidRequest(f"{at} is missing; it is required", param=at)
    if isinstance(given, str):
        return given
    for number, part in enumerate(given):
        if part.type == "input_image":
            raise not_allowed(f"{at}.{number}.type", "is an image", "text, and images of 'user'")
    return "".join([_text(part, f"{at}.{number}") for number, part in enumerate(given)])


def _text(part: ItemPart, at: str) -> str:
    return _given(part.refusal if part.type == "refusal" else part.text, f"{at}.text")


def _said(given: Sequence[ItemPart], at: str) -> Message:
    """A message of the user: its texts and images."""
    return said(
        [
            ImageContent(_given(part.image_url, f"{where}.image_url"), part.detail, f"{where}.image_url")
            if part.type == "input_image"
            else _text(part, where)
            for where, part in ((f"{at}.{number}", part) for number, part in enumerate(given))
        ]
    )


def _closed(sealed: str) -> None:
    """Without a key nothing can be opened."""


def _reasoning(item: InputItem, at: str, opened: Callable[[str], str | None]) -> str:
    """What was sealed here comes first: clients shorten or drop the content."""
    if item.encrypted_content and (text := opened(item.encrypted_content)) is not None:
        return text
    words = _words(item.content or (), f"{at}.content") or _words(item.summary or (), f"{at}.summary")
    if item.encrypted_content and not words:
        raise not_allowed(
            f"{at}.encrypted_content",
            "was not sealed here for this tenant and model",
            "reasoning with its content",
        )
    return words


def _call(item: InputItem, at: str) -> ToolCall:
    call_id, name = _given(item.call_id, f"{at}.call_id"), _given(item.name, f"{at}.name")
    if item.namespace is not None:
        name = f"{item.namespace}{NAMESPACE_JOINT}{name}"
    if item.type == "function_call":
        return ToolCall(call_id, name, _given(item.arguments, f"{at}.arguments"))
    return ToolCall(call_id, name, _given(item.input, f"{at}.input"), ToolKind.CUSTOM)


def _other(item: InputItem, at: str) -> Message:
    if item.type != "message":
        output = _words(item.output, f"{at}.output")
        return Message(Role.TOOL, output, tool_call_id=_given(item.call_id, f"{at}.call_id"))
    role = _given(item.role, f"{at}.role")
    if role == "user" and item.content is not None and not isinstance(item.content, str):
        return _said(item.content, f"{at}.content")
    content = _words(item.content, f"{at}.content")
    return Message(Role.SYSTEM if role == "developer" else Role(role), content)


def _flat(
    tools: Sequence[ToolItem], namespaces: dict[str, tuple[str, str]]
) -> Iterator[tuple[str, FunctionBody | CustomToolBody]]:
    """Each tool and its path; a namespace's members have its name in front. Fills ``namespaces``."""
    for index, tool in enumerate(tools):
        at = f"tools.{index}"
        if tool.type != "namespace":
            yield at, _nested(tool, tool.name)
            continue
        for number, member in enumerate(_given(tool.tools, f"{at}.tools")):
            name = f"{tool.name}{NAMESPACE_JOINT}{member.name}"
            namespaces[name] = (tool.name, member.name)
            yield f"{at}.tools.{number}", _nested(member, name)


def _nested(tool: PlainTool, name: str) -> FunctionBody | CustomToolBody:
    if tool.type == "custom":
        return CustomToolBody(name=name, description=tool.description, format=tool.format)
    return FunctionBody(
        name=name, description=tool.description, parameters=tool.parameters, strict=tool.strict
    )


def _choice(given: str | ChoiceObject | None, tools: Sequence[Tool]) -> ToolChoice | None:
    if given is None or (not tools and given in ("none", "auto")):
        return None
    if not tools:
        raise not_allowed("tool_choice", "is given without tools", "with tools")
    if isinstance(given, str):
        return ToolChoice(ToolChoiceMode(given))
    if given.type == "allowed_tools":
        named = _given(given.tools, "tool_choice.tools")
        names = tuple(_known(one, f"tool_choice.tools.{index}", tools) for index, one in enumerate(named))
        return ToolChoice(ToolChoiceMode(given.mode), allowed=names)
    return ToolChoice(ToolChoiceMode.NAMED, _known(given, "tool_choice", tools))


def _known(given: NamedTool | ChoiceObject, at: str, tools: Sequence[Tool]) -> str:
    name = _given(given.name, f"{at}.name")
    if given.namespace is not None:
        name = f"{given.namespace}{NAMESPACE_JOINT}{name}"
    if not any(tool.name == name and tool.kind == given.type for tool in tools):
        raise not_allowed(f"{at}.name", "is not the name of a tool", "a tool of tools")
    return name


def _shape(given: TextFormat | None) -> ResponseFormat:
    if given is None:
        return PLAIN_TEXT
    schema = None if given.schema_ is None else {"schema": given.schema_}
    try:
        return from_format(FormatBody(type=given.type, json_schema=schema))
    except InvalidRequest as error:
        old, new = "response_format.json_schema", "text.format"
        param = (error.param or "").replace(f"{old}.schema", f"{new}.schema").replace(old, f"{new}.schema")
        raise type(error)(error.message.replace(error.param or old, param, 1), param=param) from None


def _echo(body: ResponsesBody) -> dict[str, Any]:
    """What the response object repeats of its request, with the defaults."""
    text, reasoning = body.text, body.reasoning
    shape = None if text is None or text.format is None else text.format
    return {
        "background": bool(body.background),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
        "service_tier": "default",
        "temperature": body.temperature,
        "text": {
            "format": {"type": "text"}
            if shape is None
            else shape.model_dump(by_alias=True, exclude_unset=True)
        },
        "tool_choice": "auto" if body.tool_choice is None else _plain(body.tool_choice),
        "tools": [_plain(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs,
        "top_p": body.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }


def _plain(value: str | Body) -> Any:
    return value if isinstance(value, str) else value.model_dump(exclude_none=True)
