"""One call of a worker's ``/embeddings``."""

from array import array
from binascii import b2a_base64
from math import isfinite
from typing import Any, Final

import msgspec
import orjson

from gateway.backends.port import EmbedPart, Vectors
from gateway.backends.workers.errors import BadHttp
from gateway.contracts.embeddings import Conversation

PATH: Final = "/embeddings"


class _Vector(msgspec.Struct):
    embedding: bytes | list[float]  # base64 in JSON
    index: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None


class _Answer(msgspec.Struct):
    data: list[_Vector]
    usage: _Usage | None = None


_read = msgspec.json.Decoder(_Answer).decode


def body_of(model: str, part: EmbedPart) -> bytes:
    """The request's body. It asks for base64, a third of the size of JSON numbers."""
    given = {"dimensions": part.dimensions, "truncate_prompt_tokens": part.truncate_to, "user": part.user}
    asked: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    talks = [one.messages for one in part.inputs if isinstance(one, Conversation)]
    if talks:
        asked["messages"] = talks if len(talks) > 1 else talks[0]
    else:
        asked["input"] = part.inputs
    return orjson.dumps({"model": model, "encoding_format": "base64", **asked})


def vectors_of(part: EmbedPart, data: bytes) -> Vectors:
    """The vectors of an answer; the tokens are the estimate where the worker reports none. Raises BadHttp."""
    inputs = len(part.inputs)
    try:
        answer = _read(data)
        vectors = {
            place if one.index is None else one.index: _numbers(one.embedding)
            for place, one in enumerate(answer.data)
        }
        lengths = {_usable_bytes(one) for one in vectors.values()}
    except (msgspec.DecodeError, ValueError):
        raise BadHttp("its embeddings are not OpenAI's") from None
    if len(answer.data) != inputs or vectors.keys() != set(range(inputs)):
        raise BadHttp(f"it gave {len(answer.data)} embeddings for {inputs} inputs, or one of them twice")
    if len(lengths) != 1 or 0 in lengths:
        raise BadHttp("its embeddings are empty, not finite or of several lengths")
    reported = None if answer.usage is None else answer.usage.prompt_tokens
    return Vectors(
        tuple([b2a_base64(vectors[index], newline=False).decode() for index in range(inputs)]),
        part.tokens if reported is None else reported,
    )


def _numbers(vector: bytes | list[float]) -> bytes:
    """A vector as 32-bit floats; servers that do not know ``encoding_format`` send JSON numbers."""
    return vector if isinstance(vector, bytes) else array("f", vector).tobytes()


def _usable_bytes(vector: bytes) -> int:
    """The length of a vector, bytes; 0 if a number is not finite. Raises ValueError: its end is cut off.

    This runs on the loop for every vector. A number that is not finite has 0x7f or 0xff as its top byte, as
    only the largest finite numbers have, so the numbers themselves are examined only if there is such a byte.
    """
    tops = vector[3::4]
    if b"\x7f" not in tops and b"\xff" not in tops and len(vector) % 4 == 0:
        return len(vector)
    return len(vector) if isfinite(sum(array("f", vector))) else 0
