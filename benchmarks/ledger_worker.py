"""A worker whose answers have different lengths, so that a right sum of tokens is not right by chance.

    python -m benchmarks.ledger_worker PORT [SECONDS A TOKEN]

It speaks vLLM's variant of chat completions, streamed and whole, and counts tokens as an engine does.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys

from aiohttp import web

# Most tokens of an answer.
LONGEST_ANSWER = 8
MODEL = "base"


class Worker:
    """The endpoints; ``prompt`` and ``generated`` count all tokens so far."""

    def __init__(self, token_s: float = 0.0) -> None:
        self._token_s = token_s
        self._numbers = itertools.count()
        self.prompt = self.generated = 0

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Answer with 1 to 8 tokens to a prompt of 40 to 136, a third of it cached."""
        asked = await request.json()
        number = next(self._numbers)
        prompt, answer = 40 + number % 97, 1 + number % LONGEST_ANSWER
        self.prompt += prompt
        self.generated += answer
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": answer,
            "total_tokens": prompt + answer,
            "prompt_tokens_details": {"cached_tokens": prompt // 3},
        }
        head = {"id": f"chatcmpl-{number}", "created": 1, "model": asked["model"]}
        if not asked.get("stream"):
            message = {"role": "assistant", "content": "word " * answer}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            whole = {**head, "object": "chat.completion", "choices": [choice], "usage": usage}
            return web.json_response(whole)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        chunk = {**head, "object": "chat.completion.chunk"}
        for place in range(answer):
            ended = "stop" if place == answer - 1 else None
            choice = {"index": 0, "delta": {"content": f"word{number}.{place} "}, "finish_reason": ended}
            await asyncio.sleep(self._token_s)
            await response.write(_event({**chunk, "choices": [choice]}))
        await response.write(_event({**chunk, "choices": [], "usage": usage}) + b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def models(self, request: web.Request) -> web.Response:
        """List the served model."""
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def metrics(self, request: web.Request) -> web.Response:
        """Return the metrics with vLLM's names."""
        labels = f'{{engine="0",model_name="{MODEL}"}}'
        lines = (
            f"vllm:num_requests_running{labels} 0",
            f"vllm:num_requests_waiting{labels} 0",
            f"vllm:kv_cache_usage_perc{labels} 0",
            f"vllm:prompt_tokens_total{labels} {self.prompt}",
            f"vllm:generation_tokens_total{labels} {self.generated}",
        )
        return web.Response(text="\n".join(lines) + "\n")


def app(token_s: float = 0.0) -> web.Application:
    """Build the worker's application."""
    worker, made = Worker(token_s), web.Application()
    made.router.add_post("/v1/chat/completions", worker.complete)
    made.router.add_get("/v1/models", worker.models)
    made.router.add_get("/health", worker.models)
    made.router.add_get("/metrics", worker.metrics)
    return made


def _event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


if __name__ == "__main__":
    web.run_app(
        app(*map(float, sys.argv[2:3])), host="127.0.0.1", port=int(sys.argv[1]), access_log=None, print=None
    )
