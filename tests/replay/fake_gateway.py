import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web

OVERHEAD = 7
MAX_MODEL_LEN = 600


def tokens_of(text: str) -> int:
    """Count a text's tokens as the fake does: one for every six letters of a word, rounded up."""
    return sum(-(-len(word) // 6) for word in text.split())


@dataclass
class Behaviour:
    """How the fake answers one request."""

    status: int = 200
    code: str | None = None
    tokens: int | None = None
    first_after_s: float = 0.0
    between_s: float = 0.0
    cut_off_after: int | None = None
    error_after: int | None = None
    garbage: bool = False
    fallback: Mapping[str, object] | None = None
    finish_reason: str = "length"
    cached: int = 0


@dataclass
class FakeGateway:
    """The parts of a gateway that a replay uses; ``behave(n, body)`` decides the n-th answer.

    A replay's first generation is its probe, with n = -1; ``behave`` decides it only if ``probe`` is false.
    """

    tokenize: bool = True
    probe: bool = True
    behave: Callable[[int, dict[str, Any]], Behaviour] = lambda n, body: Behaviour()
    arrived: list[float] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    cancelled: int = 0
    generations: int = -1
    url: str = ""
    came: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def until(self, requests: int) -> None:
        """Wait until ``requests`` generations have arrived, not counting the probe."""
        async with asyncio.timeout(60), self.came:
            await self.came.wait_for(lambda: len(self.arrived) >= requests)

    def app(self) -> web.Application:
        app = web.Application()
        if self.tokenize:
            app.router.add_post("/tokenize", self._tokenize)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/generate", self._native)
        app.router.add_post("/v1/chat/completions", self._openai)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "demo", "object": "model"}]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        count = tokens_of((await request.json())["prompt"])
        return web.json_response(
            {"count": count, "max_model_len": MAX_MODEL_LEN, "tokens": list(range(count))}
        )

    async def _native(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        return await self._answer(request, body, body["sampling"]["max_tokens"], openai=False)

    async def _openai(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        assert body["stream_options"] == {"include_usage": True}
        assert body["model"] == "demo"
        return await self._answer(request, body, body["max_tokens"], openai=True)

    async def _answer(
        self, request: web.Request, body: dict[str, Any], max_tokens: int, *, openai: bool
    ) -> web.StreamResponse:
        number = self.generations
        self.generations += 1
        behaviour = Behaviour() if number < 0 and self.probe else self.behave(number, body)
        if number >= 0:
            self.arrived.append(time.monotonic())
            self.bodies.append(body)
            self.headers.append(request.headers)
            async with self.came:
                self.came.notify_all()
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self._stream(request, body, max_tokens, behaviour, openai=openai)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def _stream(
        self, request: web.Request, body: dict[str, Any], max_tokens: int, how: Behaviour, *, openai: bool
    ) -> web.StreamResponse:
        if how.status >= 400:
            error: dict[str, str] = {"code": how.code, "message": "no"} if how.code else {}
            return web.json_response({"error": error}, status=how.status)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)

        async def send(event: object) -> None:
            await response.write(b"data: " + orjson.dumps(event) + b"\n\n")

        if how.garbage:
            await response.write(b"data: {no json\n\n")
            return response
        produced = max_tokens if how.tokens is None else how.tokens
        prompt = tokens_of(body["messages"][0]["content"]) + OVERHEAD
        await asyncio.sleep(how.first_after_s)
        if openai:
            await send({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for position in range(produced):
            if position == how.cut_off_after:
                return response
            if position == how.error_after:
                error = {"code": str(how.code), "message": "broke"}
                await send({"error": error} if openai else {"type": "error", "error": error, "partial": True})
                return response
            piece = f"w{position} "
            await send(
                {"choices": [{"delta": {"content": piece}}]} if openai else {"type": "token", "delta": piece}
            )
            await asyncio.sleep(how.between_s)
        extras = {"backend": "embedded", "fallback": how.fallback, "finish_reason": how.finish_reason}
        if openai:
            await send({"choices": [{"delta": {}, "finish_reason": "length"}]})
            usage = {
                "prompt_tokens": prompt,
                "completion_tokens": produced,
                "prompt_tokens_details": {"cached_tokens": how.cached},
            }
            await send({"choices": [], "usage": usage, "sluice": extras})
            await response.write(b"data: [DONE]\n\n")
        else:
            usage = {"input_tokens": prompt, "output_tokens": produced, "cached_tokens": how.cached}
            await send({"type": "done", "usage": usage, **extras})
        return response
