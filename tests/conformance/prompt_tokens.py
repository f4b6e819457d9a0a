"""Compares the prompt tokens that the gateway and the engine count, in random conversations with tools.

python -m tests.conformance.prompt_tokens [1000]     (a ``vllm serve`` of the demo model, which gets messages)
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.conformance.conversations import CONCURRENCY, called, parsed, result, rig_of, user
from tests.conformance.harness import Specimen

# No control tokens: the gateway counts one in a caller's text as text, and a worker that gets messages does not.
WORDS = (
    *(
        "Berserk",
        "Is",
        "there",
        "a volume",
        "number 7",
        "“quoted”",
        "naïve",
        "鋼の錬金術師",
        "🗡️",
        "и",
        "\n",
        "\t",
        "  ",
    ),
    *('"', "\\", "</tool_call>", "<b>", "{x}", "&amp;", "é", "\u00a0", "'"),
)
NAMES = ("check_stock", "order_status", "get_weather", "send-mail", "f", "search_the_web_2")
FIELDS = ("title", "order_id", "größe", "n", "where", "a b")


class Bodies:
    """Random bodies of OpenAI's chat with tools."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def draw(self, count: int) -> Iterator[dict[str, Any]]:
        """Yield ``count`` bodies."""
        for _ in range(count):
            yield self._body()

    def _text(self, most: int = 8) -> str:
        return " ".join(self._rng.choices(WORDS, k=self._rng.randint(1, most))).strip() or "Hm."

    def _maybe(self, **fields: Any) -> dict[str, Any]:
        return {name: value for name, value in fields.items() if self._rng.random() < 0.5}

    def _value(self, depth: int = 2) -> Any:
        kinds = [
            lambda: self._text(3),
            lambda: self._rng.randint(-(10**12), 10**12),
            lambda: self._rng.choice((0.1, 1.0, 1e-7, 2.5e10, -0.0)),
            lambda: self._rng.choice((True, False, None)),
        ]
        if depth:
            kinds.append(lambda: [self._value(depth - 1) for _ in range(self._rng.randint(0, 2))])
            kinds.append(lambda: {self._rng.choice(FIELDS): self._value(depth - 1)})
        return self._rng.choice(kinds)()

    def _schema(self, depth: int = 1) -> dict[str, Any]:
        kind = self._rng.choice(("string", "integer", "number", "boolean", "object" if depth else "array"))
        schema: dict[str, Any] = {"type": kind, **self._maybe(description=self._text(4))}
        if kind == "string":
            schema |= self._maybe(enum=[self._text(1), "b", "ü"])
        if kind == "object":
            fields = self._rng.sample(FIELDS, self._rng.randint(0, 2))
            schema["properties"] = {field: self._schema(depth - 1) for field in fields}
            schema |= self._maybe(required=fields[:1], additionalProperties=False)
        items = list(schema.items())
        self._rng.shuffle(items)
        return dict(items)

    def _tool(self, name: str) -> dict[str, Any]:
        if self._rng.random() < 0.1:
            return {"type": "custom", "custom": {"name": name, **self._maybe(description=self._text(4))}}
        parameters = {"type": "object", "properties": {"title": self._schema()}}
        more = self._maybe(description=self._text(6), parameters=parameters)
        return {"type": "function", "function": {"name": name, **more}}

    def _arguments(self) -> str:
        value = {field: self._value() for field in self._rng.sample(FIELDS, self._rng.randint(0, 2))}
        style = self._rng.choice(({}, {"ensure_ascii": False}, {"indent": 1}, {"separators": (",", ":")}))
        return json.dumps(value, **style)

    def _exchange(self, number: int, names: Sequence[str]) -> list[dict[str, Any]]:
        calls = [
            (f"call_{number}_{place}", self._rng.choice(names), self._arguments())
            for place in range(self._rng.randint(1, 2))
        ]
        content = self._text(4) if self._rng.random() < 0.3 else None
        results: list[dict[str, Any]] = []
        for call, _, _ in calls:
            text = self._text() if self._rng.random() < 0.5 else json.dumps({"error": self._text(3)})
            parts = [{"type": "text", "text": text}, {"type": "text", "text": self._text(2)}]
            results.append(result(call, parts if self._rng.random() < 0.2 else text))
        answer = {"role": "assistant", "content": self._text(), **self._maybe(reasoning=self._text(3))}
        return [called(*calls, content=content), *results, *([answer] if self._rng.random() < 0.7 else [])]

    def _body(self) -> dict[str, Any]:
        names = self._rng.sample(NAMES, self._rng.randint(1, 3))
        tools = [self._tool(name) for name in names]
        functions = [one["function"]["name"] for one in tools if one["type"] == "function"]
        messages: list[dict[str, Any]] = []
        if self._rng.random() < 0.5:
            messages.append({"role": self._rng.choice(("system", "developer")), "content": self._text()})
        for number in range(self._rng.randint(0, 2) if functions else 0):
            messages += [user(self._text()), *self._exchange(number, functions)]
        messages.append(user(self._text(), **self._maybe(name="Ann")))
        choice = self._maybe(tool_choice=self._rng.choice(("auto", "none")), parallel_tool_calls=False)
        effort = self._maybe(reasoning_effort=self._rng.choice(("low", "none")))
        return {"messages": messages, "tools": tools, "max_tokens": 1, "temperature": 0, **choice, **effort}


async def miscounted(specimen: Specimen, bodies: Sequence[dict[str, Any]]) -> list[tuple[int, int, str]]:
    """Return the requests whose counts differ: planned tokens, computed tokens, and the body.

    Raises AssertionError for a request without an answer.
    """
    rig, turns = rig_of(specimen, specimen.backend), asyncio.Semaphore(CONCURRENCY)

    async def one(body: dict[str, Any]) -> tuple[int, int, str]:
        async with turns:
            asked = parsed({"model": specimen.backend.model, **body, "stream": True})
            sink = await rig.run(asked.request)
        assert sink.answer is not None, (sink.error, body)
        return len(sink.plans[0].token_ids), sink.answer.usage.input_tokens, json.dumps(body)

    found = await asyncio.gather(*[one(body) for body in bodies])
    return [row for row in found if row[0] != row[1]]


async def _main(count: int) -> None:
    from tests.conformance.specimens import vllm_serve, vllm_worker

    with tempfile.TemporaryDirectory() as name, vllm_serve(Path(name)) as url:
        async with vllm_worker(Path(name), url, "messages") as specimen:
            wrong = await miscounted(specimen, list(Bodies(22).draw(count)))
    for planned, computed, body in wrong[:5]:
        print(f"{planned} counted, {computed} computed: {body}")
    print(f"{count - len(wrong)} of {count} equal")


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000))
