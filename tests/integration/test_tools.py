"""Tool calls of the official client, through a gateway process, to a worker that records its requests."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import yaml

from tests.integration.live import ADMIN_KEY, gateway
from tests.workers.raw_worker import END, STREAM_HEAD, RawWorker, Request, answers, chunk, ending, event

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "stock",
            "description": "How many copies are there?",
            "parameters": {
                "type": "object",
                "properties": {"title": {"type": "string"}, "volume": {"type": "integer"}},
                "required": ["title"],
                "additionalProperties": False,
            },
            "strict": True,
        },
    }
]
HISTORY: list[Any] = [
    {"role": "system", "content": "You sell manga."},
    {"role": "user", "content": "Is Berserk there?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "stock", "arguments": '{"title": "Berserk"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": '{"copies": 3}'},
]


async def calls_patch(request: Request) -> None:
    """Answer as vLLM does: with a function call whose arguments hold the custom tool's input, in pieces."""
    first = {"index": 0, "id": "c1", "type": "function", "function": {"name": "patch", "arguments": ""}}
    rest = [{"index": 0, "function": {"arguments": text}} for text in ('{"inp', 'ut": "*** B', 'egin"}')]
    deltas = [event({"choices": [{"index": 0, "delta": {"tool_calls": [one]}}]}) for one in (first, *rest)]
    data = b"".join([*deltas, ending("tool_calls"), event(b"[DONE]")])
    await request.send(STREAM_HEAD, chunk(data), END)


async def test_a_worker_is_sent_the_tools_and_the_history_that_the_client_wrote(tmp_path: Path) -> None:
    worker = RawWorker([answers("Yes, ", "three."), calls_patch])
    await worker.start()
    pool = {
        "kind": "openai",
        "base_urls": [worker.url],
        "model": "base",
        "dialect": "vllm",
        "prompt": "messages",
    }
    route = {"routes": {"self_hosted_generation": {"backends": [{"name": "pool", "weight": 100}]}}}
    (tmp_path / "routing.yaml").write_text(yaml.safe_dump(route))
    config = {
        "engine": {"kind": "none"},
        "backends": {"pool": pool},
        "routing": {"file": str(tmp_path / "routing.yaml")},
    }
    (tmp_path / "sluice.yaml").write_text(yaml.safe_dump(config))
    manager = gateway(tmp_path, config=tmp_path / "sluice.yaml")
    live = await asyncio.to_thread(manager.__enter__)
    try:
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key=ADMIN_KEY, max_retries=0) as client:
            answer = await client.chat.completions.create(
                model="pool", messages=HISTORY, tools=TOOLS, tool_choice="auto", reasoning_effort="low"
            )
            assert answer.choices[0].message.content == "Yes, three."
            form = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /.+/"}}
            custom: Any = {"type": "custom", "custom": {"name": "patch", "format": form}}
            patched: Any = await client.chat.completions.create(
                model="pool", messages=HISTORY[:2], tools=[custom], tool_choice="required"
            )
            [call] = patched.choices[0].message.tool_calls
            assert (call.type, call.custom.name, call.custom.input) == ("custom", "patch", "*** Begin")
            assert "patch is described to the model, not enforced" in str(patched.sluice["warnings"])
    finally:
        await asyncio.to_thread(manager.__exit__, None, None, None)
        await worker.die()
    request, second = worker.requests
    [function] = second.body["tools"]
    assert function["type"] == "function" and "start: /.+/" in function["function"]["description"]
    assert list(function["function"]["parameters"]["properties"]) == ["input"]
    assert request.path.endswith("/chat/completions")
    assert request.body["messages"] == HISTORY
    sent = {name: request.body[name] for name in ("tools", "tool_choice", "reasoning_effort")}
    assert sent == {"tools": TOOLS, "tool_choice": "auto", "reasoning_effort": "low"}
