"""The requests to every gateway and the worker's answers: OpenAI chat completions, as bytes ready to send.

A prompt has about 8 KB, 2,000 tokens of the demo model; that of an agent, with its tools, 45 KB and 13,000.
The worker's answer has :data:`ANSWER_TOKENS` tokens and begins with the ticket from the request's last turn,
so that an answer that is cut off, cached, or sent to the wrong caller is detected.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Any

from ops.replay.text import WORDS

MODEL = "base"
ANSWER_TOKENS = 140
# Enough that no two of 64 callers have the same one, few enough that all were sent before the warm-up ends.
CONVERSATIONS = 128
# A shared system prompt and ten earlier turns; with the last turn 8 KB of JSON.
SYSTEM_PARAGRAPHS = 6
PARAGRAPH_WORDS = 50
EARLIER_TURNS = 10
TURN_WORDS = 75
LAST_TURN_WORDS = 30
# An agent's tools, and its calls with their results, each longer than a turn of a chat.
TOOLS = 10
CALLS = 20
RESULT_WORDS = 150
TICKET_MARK = b"ticket "
TICKET_BYTES = 8
# A worker that gets a shorter prompt than this was sent a trimmed one.
LEAST_PROMPT_BYTES = 7_000
LEAST_PROMPT_TOKENS = 1_700

ANSWER_WORDS = tuple(f" {WORDS[place % len(WORDS)]}" for place in range(ANSWER_TOKENS - 1))


class Regime(StrEnum):
    """How much of a prompt's text the gateway has seen before."""

    CONVERSATION = "conversation"
    UNSEEN = "unseen"
    AGENT = "agent"


def answer_text(ticket: str) -> str:
    """The whole answer to the request with this ticket."""
    return ticket + "".join(ANSWER_WORDS)


def bodies(regime: Regime, *, stream: bool, seed: str, model: str = MODEL) -> Iterator[tuple[bytes, str]]:
    """Yield request bodies without end, each with its ticket.

    ``conversation``: the system prompt and all turns but the last were sent before; the last turn is new.
    ``agent``: the same with tools, calls and their results.
    ``unseen``: every message begins with a word never sent before, so that no cache of earlier messages
    helps.
    """
    fresh = regime is Regime.UNSEEN
    agent = regime is Regime.AGENT
    makers = [
        _maker(f"{regime} {number}", stream=stream, fresh=fresh, model=model, agent=agent)
        for number in range(CONVERSATIONS)
    ]
    for number, ticket in enumerate(_tickets(seed)):
        yield makers[number % CONVERSATIONS](ticket.encode()), ticket


def _tickets(seed: str) -> Iterator[str]:
    rng = random.Random(seed)
    while True:
        yield f"{rng.randrange(16**TICKET_BYTES):0{TICKET_BYTES}x}"


def _maker(name: str, *, stream: bool, fresh: bool, model: str, agent: bool) -> Callable[[bytes], bytes]:
    """Return a function that fills a ticket into an encoded body: the load generator must be fast."""
    hole = "\0"
    opening = f"{hole} " if fresh else ""
    # All conversations share the system prompt.
    system = "\n".join(_words(f"system/{number}", PARAGRAPH_WORDS) for number in range(SYSTEM_PARAGRAPHS))
    messages: list[dict[str, Any]] = [{"role": "system", "content": opening + system}]
    for turn in range(EARLIER_TURNS):
        role = "user" if turn % 2 == 0 else "assistant"
        messages.append({"role": role, "content": opening + _words(f"{name}/{turn}", TURN_WORDS)})
    for call in range(CALLS if agent else 0):
        messages += _call(f"{name}/{call}", call)
    last = f"{opening}{_words(f'{name}/last', LAST_TURN_WORDS)} {TICKET_MARK.decode()}{hole}"
    messages.append({"role": "user", "content": last})
    body: dict[str, object] = {"model": model, "messages": messages, "max_tokens": ANSWER_TOKENS}
    if agent:
        body["tools"] = [_tool(number) for number in range(TOOLS)]
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    pieces = json.dumps(body, separators=(",", ":")).encode().split(rb"\u0000")
    return lambda ticket: ticket.join(pieces)


def _tool(number: int) -> dict[str, Any]:
    fields = {
        f"field_{place}": {"type": "string", "description": _words(f"field/{number}/{place}", 12)}
        for place in range(4)
    }
    schema = {"type": "object", "properties": fields, "required": ["field_0"]}
    described = _words(f"tool/{number}", 60)
    return {
        "type": "function",
        "function": {"name": f"tool_{number}", "description": described, "parameters": schema},
    }


def _call(name: str, number: int) -> list[dict[str, Any]]:
    """A call of a tool, and its result."""
    given = json.dumps({"field_0": _words(f"{name}/call", 10)})
    function = {"name": f"tool_{number % TOOLS}", "arguments": given}
    made = {"id": f"call_{number}", "type": "function", "function": function}
    result = _words(f"{name}/result", RESULT_WORDS)
    return [
        {"role": "assistant", "content": None, "tool_calls": [made]},
        {"role": "tool", "tool_call_id": made["id"], "content": result},
    ]


def _words(name: str, count: int) -> str:
    return " ".join(random.Random(name).choices(WORDS, k=count))
