"""One call of a worker's ``/embeddings``."""

from array import array
from base64 import b64decode, b64encode
from math import isfinite
from typing import Final

import msgspec
import orjson

from gateway.backends.port import EmbedPart, Vectors
from gateway.backends.workers.client import WorkerClient, whole_body
from gateway.backends.workers.errors import BadHttp
from gateway.backends.workers.refusal import failure_of

PATH: Final = "/embeddings"
MAX_ERROR_BYTES: Final = 64 * 1024
MAX_ANSWER_BYTES: Final = 64 << 20
"""Of a part: 64 vectors of 65,536 numbers are 22 MB of base64."""


class _Vector(msgspec.Struct):
    embedding: str | list[float]
    index: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None


class _Answer(msgspec.Struct):
    data: list[_Vector]
    usage: _Usage | None = None


_read = msgspec.json.Decoder(_Answer).decode


def body_of(model: str, part: EmbedPart) -> bytes:
    """The request; base64 is a third of the numbers' JSON."""
    given = {"dimensions": part.dimensions, "truncate_prompt_tokens": part.truncate_to, "user": part.user}
    asked = {name: value for name, value in given.items() if value is not None}
    return orjson.dumps({"model": model, "input": part.inputs, "encoding_format": "base64", **asked})


async def vectors_of(
    client: WorkerClient, model: str, body: bytes, headers: bytes, tokens: int, inputs: int
) -> Vectors:
    """Ask. Raises TransportError, BackendFailure; ``tokens`` are those of a worker that reports none."""
    data = await answer_of(client, model, PATH, body, headers)
    try:
        answer = _read(data)
        vectors = {
            place if one.index is None else one.index: _numbers(one.embedding)
            for place, one in enumerate(answer.data)
        }
    except (msgspec.DecodeError, ValueError):
        raise BadHttp("its embeddings are not OpenAI's") from None
    if len(answer.data) != inputs or vectors.keys() != set(range(inputs)):
        raise BadHttp(f"it gave {len(answer.data)} embeddings for {inputs} inputs, or one of them twice")
    if len({len(one) for one in vectors.values()}) != 1 or not all(map(_is_usable, vectors.values())):
        raise BadHttp("its embeddings are empty, not finite or of several lengths")
    usage = answer.usage
    reported = None if usage is None else usage.prompt_tokens
    return Vectors(
        tuple([b64encode(vectors[index]).decode() for index in range(inputs)]),
        tokens if reported is None else reported,
    )


async def answer_of(client: WorkerClient, model: str, path: str, body: bytes, headers: bytes) -> bytes:
    """The body of a whole answer. Raises TransportError, BackendFailure."""
    connection = await client.post(path, body, headers)
    try:
        if connection.status != 200:
            raise failure_of(
                connection.status,
                await whole_body(connection, MAX_ERROR_BYTES),
                connection.retry_after,
                connection.retry_after_ms,
                model=model,
            )
        return await whole_body(connection, MAX_ANSWER_BYTES)
    finally:
        connection.release()


def _numbers(vector: str | list[float]) -> "array[float]":
    """The numbers; servers that do not know ``encoding_format`` give them as such. Raises ValueError."""
    return array("f", b64decode(vector, validate=True) if isinstance(vector, str) else vector)


def _is_usable(vector: "array[float]") -> bool:
    """Whether it is of finite numbers. A sum with others is not finite, and costs the least to look at."""
    return bool(vector) and isfinite(sum(vector))
