"""A scripted worker: calls the shop's tools turn by turn, and answers from their results.

It speaks OpenAI's Chat Completions as vLLM does, whole and streamed. Its answer depends on the history
alone: the first turn calls `check_stock` and `order_status` together, the second `ship`, the third answers.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

MODEL = "shop"
RESULTS: Mapping[str, str] = {"check_stock": "3 copies", "order_status": "packed", "ship": "sent"}
ANSWER = "Berserk: 3 copies. Order 48213: packed, then sent."
TURNS: tuple[tuple[tuple[str, dict[str, object]], ...], ...] = (
    (("check_stock", {"title": "Berserk"}), ("order_status", {"order_id": "48213"})),
    (("ship", {"order_id": "48213", "express": True}),),
)
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": properties, "required": list(properties)},
        },
    }
    for name, description, properties in (
        ("check_stock", "How many copies of a series there are.", {"title": {"type": "string"}}),
        ("order_status", "The status of an order.", {"order_id": {"type": "string"}}),
        ("ship", "Send an order.", {"order_id": {"type": "string"}, "express": {"type": "boolean"}}),
    )
]
# The answer to a request for JSON of a schema.
RECORD = {"title": "Berserk", "copies": 3}


@dataclass(frozen=True)
class Turn:
    """The worker's next answer: text or tool calls."""

    text: str
    calls: tuple[tuple[str, str, str], ...] = ()

    @property
    def reason(self) -> str:
        return "tool_calls" if self.calls else "stop"


def turn_of(body: Mapping[str, Any]) -> Turn:
    """Return the worker's next turn in the conversation of a request's body."""
    format_ = body.get("response_format") or {}
    if format_.get("type") in ("json_schema", "json_object"):
        return Turn(json.dumps(RECORD))
    history = body["messages"]
    last = max((at for at, one in enumerate(history) if one["role"] == "user"), default=0)
    done = sum(1 for one in history[last:] if one["role"] == "assistant" and one.get("tool_calls"))
    names = [one["function"]["name"] for one in body.get("tools") or ()]
    if names and "check_stock" not in names:  # a structured answer by a tool, as some clients ask for it
        return Turn("", (("call_record", names[0], json.dumps(RECORD)),))
    if names and done < len(TURNS):
        return Turn(
            "",
            tuple(
                (f"call_{done}_{index}", name, json.dumps(arguments))
                for index, (name, arguments) in enumerate(TURNS[done])
            ),
        )
    results = [one["content"] for one in history[last:] if one["role"] == "tool"]
    expected = [RESULTS[name] for turn in TURNS[:done] for name, _ in turn]
    return Turn(ANSWER if results == expected else f"unexpected results: {results}")


def deltas_of(turn: Turn) -> Iterator[dict[str, object]]:
    """Yield the deltas of a turn, with its arguments in pieces."""
    yield {"role": "assistant", "content": ""}
    for word in turn.text.split(" ") if turn.text else ():
        yield {"content": word if turn.text.startswith(word) else f" {word}"}
    for index, (call_id, name, arguments) in enumerate(turn.calls):
        function: dict[str, object] = {"name": name, "arguments": ""}
        yield {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        for at in range(0, len(arguments), 5):
            yield {"tool_calls": [{"index": index, "function": {"arguments": arguments[at : at + 5]}}]}


def make_app() -> FastAPI:
    app = FastAPI()

    @app.get("/v1/models")
    def models() -> dict[str, object]:
        return {"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 4096}]}

    @app.get("/health")
    def health() -> dict[str, str]:
        return {}

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await request.json()
        turn = turn_of(body)
        prompt = len(json.dumps(body["messages"])) // 4  # the gateway learns from it how long prompts are
        usage = {"prompt_tokens": prompt, "completion_tokens": 10, "total_tokens": prompt + 10}
        head = {"id": "chatcmpl-1", "created": 1_700_000_000, "model": MODEL}
        if body.get("stream"):
            return StreamingResponse(_events(turn, head, usage), media_type="text/event-stream")
        calls = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for call_id, name, arguments in turn.calls
        ]
        message: dict[str, object] = {"role": "assistant", "content": turn.text or None, "tool_calls": calls}
        choice = {"index": 0, "message": message, "finish_reason": turn.reason}
        return JSONResponse({**head, "object": "chat.completion", "choices": [choice], "usage": usage})

    @app.post("/v1/embeddings")
    async def embeddings(request: Request) -> JSONResponse:
        texts = (await request.json())["input"]
        data = [{"index": index, "embedding": list(vector_of(text))} for index, text in enumerate(texts)]
        return JSONResponse({"data": data, "usage": {"prompt_tokens": len(texts)}})

    @app.post("/v1/rerank")
    async def rerank(request: Request) -> JSONResponse:
        body = await request.json()
        results = [
            {"index": index, "relevance_score": score_of(body["query"], text)}
            for index, text in enumerate(body["documents"])
        ]
        return JSONResponse({"results": results, "usage": {"total_tokens": len(results)}})

    return app


def vector_of(text: str) -> tuple[float, float]:
    """Return a vector of numbers that 32-bit floats represent exactly."""
    return float(len(text)), float(text.count("e"))


def score_of(query: str, text: str) -> float:
    """Return the share of the query's words that are in the text."""
    words = query.lower().split()
    return sum(word in text.lower() for word in words) / len(words)


async def _events(turn: Turn, head: Mapping[str, object], usage: object) -> AsyncIterator[bytes]:
    def chunk(choices: list[object], **more: object) -> bytes:
        payload = {**head, "object": "chat.completion.chunk", "choices": choices, **more}
        return f"data: {json.dumps(payload)}\n\n".encode()

    for delta in deltas_of(turn):
        yield chunk([{"index": 0, "delta": delta, "finish_reason": None}])
    yield chunk([{"index": 0, "delta": {}, "finish_reason": turn.reason}])
    yield chunk([], usage=usage)
    yield b"data: [DONE]\n\n"


@contextlib.contextmanager
def serving_shop() -> Iterator[str]:
    """Run the worker in a thread on a free port; yield its URL."""
    server = uvicorn.Server(uvicorn.Config(make_app(), host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.005)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=10)
