"""One call of a worker's ``/embeddings``."""

from array import array
from base64 import b64encode
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
    index: int = 0


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


async def vectors_of(client: WorkerClient, model: str, body: bytes, headers: bytes, tokens: int) -> Vectors:
    """Ask. Raises TransportError, BackendFailure; ``tokens`` are those of a worker that reports none."""
    connection = await client.post(PATH, body, headers)
    try:
        if connection.status != 200:
            raise failure_of(
                connection.status,
                await whole_body(connection, MAX_ERROR_BYTES),
                connection.retry_after,
                connection.retry_after_ms,
                model=model,
            )
        data = await whole_body(connection, MAX_ANSWER_BYTES)
    finally:
        connection.release()
    try:
        answer = _read(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise BadHttp("its embeddings are not OpenAI's") from None
    usage = answer.usage
    reported = None if usage is None else usage.prompt_tokens
    in_order = sorted(answer.data, key=lambda one: one.index)
    return Vectors(
        tuple([_base64(one.embedding) for one in in_order]), tokens if reported is None else reported
    )


def _base64(vector: str | list[float]) -> str:
    """Servers that do not know ``encoding_format`` answer with numbers."""
    return vector if isinstance(vector, str) else b64encode(array("f", vector)).decode()
