"""A worker process that returns embeddings after a fixed time: ``… PORT DELAY_MS DIMENSIONS``.

Each request takes ``DELAY_MS``, however many there are, as on a GPU whose batches have room. The vectors are
encoded in advance, so that the worker uses little CPU.
"""

from __future__ import annotations

import asyncio
import random
import sys
from array import array
from base64 import b64encode
from typing import Final, cast

import orjson
import uvloop

MODEL: Final = "vectors"
BACKLOG: Final = 1_024
SEED: Final = 7


def reply(body: bytes) -> bytes:
    """Return a whole HTTP response."""
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
        len(body),
        body,
    )


class VectorConnection(asyncio.Protocol):
    """One HTTP connection. A request needs a content-length, and the next one comes after the answer."""

    def __init__(self, delay_s: float, dimensions: int) -> None:
        rng = random.Random(SEED)
        vector = b64encode(array("f", [rng.uniform(-1, 1) for _ in range(dimensions)])).decode()
        self._vector = vector
        self._delay_s = delay_s
        self._got = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        """Drop the answer that is due."""
        self._transport = None

    def data_received(self, data: bytes) -> None:
        """Collect one request, then answer it after the delay."""
        self._got += data
        head, end, body = self._got.partition(b"\r\n\r\n")
        if not end:
            return
        place = head.lower().find(b"\r\ncontent-length:")
        length = 0 if place < 0 else int(head[place + 17 :].split(b"\r\n", 1)[0])
        if len(body) < length:
            return
        self._got = b""
        path = head[:40].split(b" ")[1]
        if path == b"/v1/embeddings":
            given = orjson.loads(body)["input"]
            answer = self._answer(1 if isinstance(given, str) else len(given))
            asyncio.get_running_loop().call_later(self._delay_s, self._write, answer)
        elif head.startswith(b"POST"):
            self._write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
        elif path == b"/metrics":
            self._write(reply(b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"))
        else:
            self._write(reply(orjson.dumps({"data": [{"id": MODEL, "max_model_len": 8_192}]})))

    def _answer(self, inputs: int) -> bytes:
        data = [{"object": "embedding", "index": at, "embedding": self._vector} for at in range(inputs)]
        usage = {"prompt_tokens": 20 * inputs, "total_tokens": 20 * inputs}
        return reply(orjson.dumps({"object": "list", "model": MODEL, "data": data, "usage": usage}))

    def _write(self, answer: bytes) -> None:
        if self._transport is not None:
            self._transport.write(answer)


async def serve(port: int, delay_s: float, dimensions: int) -> None:
    """Serve until it is killed."""
    server = await asyncio.get_running_loop().create_server(
        lambda: VectorConnection(delay_s, dimensions), "127.0.0.1", port, backlog=BACKLOG
    )
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), float(sys.argv[2]) / 1000, int(sys.argv[3])))
