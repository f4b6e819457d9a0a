"""Bodies and answers of ``/tokenize`` and ``/detokenize``, in vLLM's format."""

from collections.abc import Sequence
from typing import Annotated, Any, Final

from pydantic import Field
from typing_extensions import TypedDict

from gateway.contracts import openai_fields
from gateway.contracts.fields import Body, Label, Text, TokenIds
from gateway.contracts.openai import ChatMessages
from gateway.contracts.tool_fields import Tools

MAX_IDS: Final = 262_144  # most ids of one ``/detokenize``: decoding them blocks all threads for about 60 ms


class TokenizeRequest(Body):
    """Either ``prompt``, a plain text, or ``messages``, which the chat template renders with the tools."""

    neutral = openai_fields.TOKENIZE
    model: Label | None = None
    prompt: Text | None = None
    messages: ChatMessages | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeBody(TypedDict):
    """The answer of ``/tokenize``; ``token_strs`` is null unless asked for."""

    count: int
    max_model_len: int
    tokens: Sequence[int]
    token_strs: list[str] | None


class DetokenizeRequest(Body):
    """Token ids to turn into text."""

    model: Label | None = None
    tokens: Annotated[TokenIds, Field(max_length=MAX_IDS)]


class DetokenizeBody(TypedDict):
    """The answer of ``/detokenize``."""

    prompt: str
