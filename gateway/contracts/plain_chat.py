"""Parses the ordinary chat body (texts, and the fields that most clients send) in a fifth of the time.

:class:`gateway.contracts.openai.ChatRequest` parses every other body, invalid ones included, and makes their
errors. For the same body both make the same request.
"""

from collections.abc import Mapping
from typing import Final, Literal

import msgspec
from msgspec import Struct, structs

from budgeting.values import Message, Role
from gateway.contracts.dialect import ParsedRequest
from gateway.contracts.fields import MaxTokens, Seed, Temperature, TopP, label_or_none
from gateway.contracts.origin import RequestOrigin
from gateway.contracts.refusals import FEW_FIELDS_BYTES, check_fields
from gateway.contracts.values import Contract, GenerateRequest, Sampling

ROLES: Final[Mapping[str, Role]] = {**{role.value: role for role in Role}, "developer": Role.SYSTEM}
# This body's names of fields, by the names that internal errors use.
FIELDS: Final[Mapping[str, str]] = {"adapter_id": "model", "response_format": "response_format"}


class _PlainMessage(Struct, forbid_unknown_fields=True, gc=False):
    role: Literal["system", "developer", "user", "assistant"]
    content: str


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


_decode: Final = msgspec.json.Decoder(_PlainChat).decode


def plain_chat(body: bytes, origin: RequestOrigin) -> ParsedRequest | None:
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
    if given[-1].role != "user" or not given[-1].content.strip():
        return None
    for one in given:
        if "\0" in one.content:  # refused; a label with one is not printable
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
    request = GenerateRequest(
        # By place: a dict of names would take twice the time.
        *structs.astuple(structs.replace(origin, session_id=user)),
        contract=Contract.CHAT,
        messages=tuple([Message(ROLES[one.role], one.content) for one in given]),
        model=model,
        user=user,
        sampling=Sampling(max_tokens, chat.temperature, chat.top_p, seed=chat.seed),
        priority=origin.capped(0),
        stream=bool(chat.stream),
        labelled=False,
        fields=fields,
    )
    return ParsedRequest(request, usage, False)
