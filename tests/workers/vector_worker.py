"""A worker that makes vectors which follow from their inputs."""

from __future__ import annotations

import hashlib
import json
from array import array
from base64 import b64encode
from collections.abc import Callable
from functools import partial
from typing import Any

from tests.workers.raw_worker import RawWorker, Request

MODEL = "bge-small"
SIZE = 8


def vector_of(given: str | list[int], dimensions: int = SIZE) -> array[float]:
    """32-bit floats that follow from the input, with negative zero and a subnormal number among them."""
    seed = hashlib.sha256(json.dumps(given).encode()).digest()
    numbers = array("f", [-0.0, 1e-42, *(byte / 3 - 40 for byte in seed)])
    return numbers[:dimensions]


def tokens_of(given: str | list[int]) -> int:
    return len(given.split()) if isinstance(given, str) else len(given)


class VectorWorker(RawWorker):
    """Lists one model; with ``numbers`` it sends lists of numbers, even when base64 is asked for.

    ``of`` makes the vectors. ``dies_after``: at this request, counted from 1, it is killed without an answer.
    """

    def __init__(
        self,
        *,
        numbers: bool = False,
        dies_after: int | None = None,
        model: str = MODEL,
        of: Callable[[Any, int], array[float]] = vector_of,
    ) -> None:
        listed = json.dumps({"data": [{"id": model, "max_model_len": 512}]}).encode()
        super().__init__([self.embed], models=partial(bytes, listed))
        self.numbers = numbers
        self.of = of
        self.dies_after = dies_after

    @property
    def inputs(self) -> list[Any]:
        """All inputs of all requests, in their order."""
        return [one for request in self.requests for one in request.body["input"]]

    async def embed(self, request: Request) -> None:
        if self.dies_after is not None and len(self.requests) >= self.dies_after:
            await self.die()
            return
        body = request.body
        vectors = [self.of(one, body.get("dimensions", SIZE)) for one in body["input"]]
        as_base64 = body["encoding_format"] == "base64" and not self.numbers
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": b64encode(one).decode() if as_base64 else one.tolist(),
            }
            for index, one in enumerate(vectors)
        ]
        count = sum(map(tokens_of, body["input"]))
        usage = {"prompt_tokens": count, "total_tokens": count}
        # Reversed, so that the gateway must sort them by ``index``.
        answer = {"object": "list", "model": body["model"], "data": data[::-1], "usage": usage}
        await request.whole(200, json.dumps(answer).encode())
