"""OpenAI's embeddings: the body, and the answer."""

from array import array
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Generic, Literal, TypeVar

import orjson
from msgspec import Struct, structs
from pydantic import Field
from typing_extensions import TypedDict

from gateway.contracts.checks import check_count, prompts_of
from gateway.contracts.fields import (
    ANYTHING,
    Body,
    Either,
    Label,
    Listed,
    Neutral,
    OptionalLabel,
    Prompts,
    Text,
    TextOr,
)
from gateway.contracts.origin import RequestOrigin
from gateway.contracts.refusals import not_allowed, required

MAX_INPUTS: Final = 2_048  # most inputs of one request, as at OpenAI
CONTRACT: Final = "embeddings"


class TextPart(Body):
    """A part of a message's content."""

    type: Literal["text"]
    text: Text


class EmbeddedMessage(Body):
    """A message of a conversation whose vector is wanted."""

    role: Literal["system", "user", "assistant"]
    content: TextOr[TextPart]


class Conversation(Struct, frozen=True):
    """Messages that have one vector together: the worker's chat template makes a text of them."""

    messages: tuple[Mapping[str, Any], ...]


Result = TypeVar("Result")
EmbeddingInput = str | tuple[int, ...] | Conversation


class EmbeddingsBody(Body):
    """The body of ``POST /v1/embeddings``, with ``input`` or vLLM's ``messages``."""

    neutral: ClassVar[Neutral] = {
        "add_special_tokens": (None, True),
        "priority": (None, 0),
        "request_id": (ANYTHING,),
        "truncation_side": (None,),
    }
    model: Label
    input: Prompts | None = None
    messages: Either[Listed[EmbeddedMessage], Listed[Listed[EmbeddedMessage]]] | None = None
    dimensions: Annotated[int, Field(ge=1, le=65_536)] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=1 << 24)] | None = None
    user: OptionalLabel = None


class EmbeddingBody(TypedDict):
    """One vector: numbers, or the base64 of little-endian 32-bit floats."""

    object: str
    index: int
    embedding: list[float] | str


class EmbeddingsAnswerBody(TypedDict):
    """The vectors, in the order of the inputs."""

    object: str
    model: str
    data: list[EmbeddingBody]
    usage: dict[str, int]


class PooledRequest(RequestOrigin, frozen=True, kw_only=True):
    """A request that a model answers without generating, or the part of one that a backend gets.

    ``for_cache``: it is the response cache's, not the tenant's. ``tokens``: of a part, an estimate.
    ``trace_headers``: the trace context for workers, as header lines.
    """

    model: str
    user: str | None = None
    for_cache: bool = False
    tokens: int = 0
    trace_headers: bytes = b""


class PooledAnswer(Struct, Generic[Result], frozen=True):
    """A result for each input of a request or a part, in order, and the number of tokens of all inputs."""

    model: str
    results: Sequence[Result]
    input_tokens: int
    output_tokens: int = 0


EmbeddingsAnswer = PooledAnswer[str]  # the vectors, as base64


class EmbeddingsRequest(PooledRequest, frozen=True, kw_only=True):
    """A request for a vector of each input.

    Args:
        truncate_to: longest input in tokens, -1: the model's; ``None``: longer ones are refused.
        first: of a part of several, the number of its first input in the caller's request.
    """

    inputs: tuple[EmbeddingInput, ...]
    dimensions: int | None = None
    truncate_to: int | None = None
    first: int | None = None

    def field(self, index: int) -> str:
        """The body's field with the input of this index."""
        return "input" if self.first is None else f"input.{self.first + index}"


def embeddings_request(body: EmbeddingsBody, origin: RequestOrigin) -> EmbeddingsRequest:
    """Convert a validated body to a request. Raises InvalidRequest."""
    inputs: tuple[EmbeddingInput, ...]
    if body.truncate_prompt_tokens == 0:
        raise not_allowed("truncate_prompt_tokens", "is 0", "-1, or 1 or more")
    if body.messages is not None:
        inputs = tuple(_conversations(body, body.messages, origin.max_messages))
    else:
        inputs = tuple(prompts_of(required(body.input, "input"), "input"))
    if len(inputs) > MAX_INPUTS:
        raise not_allowed(
            "input" if body.messages is None else "messages",
            f"has {len(inputs)} inputs",
            f"{MAX_INPUTS} or fewer",
        )
    return EmbeddingsRequest(
        **structs.asdict(origin),
        model=body.model,
        inputs=inputs,
        dimensions=body.dimensions,
        truncate_to=body.truncate_prompt_tokens,
        user=body.user,
    )


def _conversations(
    body: EmbeddingsBody, given: Sequence[EmbeddedMessage | Sequence[EmbeddedMessage]], most: int
) -> Iterator[Conversation]:
    for name in ("input", "add_special_tokens"):
        if getattr(body, name, None) is not None:
            raise not_allowed(name, "is given with messages", "either one alone")
    one = [message for message in given if isinstance(message, EmbeddedMessage)]
    several = [messages for messages in given if not isinstance(messages, EmbeddedMessage)]
    for index, messages in enumerate(several or [one]):
        check_count(len(messages), most, f"messages.{index}" if several else "messages")
        yield Conversation(tuple([message.model_dump() for message in messages]))


def embeddings_body(answer: EmbeddingsAnswer, *, floats: bool) -> bytes:
    """The JSON body of an answer; with ``floats``, the numbers have exactly the base64's bits.

    Vectors are written one by one: a thread that wrote all of them at once would block the event loop.
    """
    data = [
        b'{"object":"embedding","index":%d,"embedding":%b}' % (index, _embedding(one, floats=floats))
        for index, one in enumerate(answer.results)
    ]
    usage = {"prompt_tokens": answer.input_tokens, "total_tokens": answer.input_tokens}
    rest = orjson.dumps({"object": "list", "model": answer.model, "usage": usage})
    # One join, so that large bodies are copied once: 2,048 vectors of 1,024 numbers are 11 MB of base64.
    data[0] = b'%b,"data":[%b' % (rest[:-1], data[0])
    data[-1] += b"]}"
    return b",".join(data)


def _embedding(vector: str, *, floats: bool) -> bytes:
    """The JSON of a vector; base64 has no character that JSON escapes."""
    if not floats:
        return b'"%b"' % vector.encode("ascii")
    numbers = array("f")
    numbers.frombytes(b64decode(vector))
    return orjson.dumps(numbers.tolist())
