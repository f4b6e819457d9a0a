"""Checks the grammar of Anthropic's event streams, and assembles messages by its official client."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anthropic.types import Message as Accumulated

_DELTAS = {
    "text": ({"text_delta": "text"},),
    "thinking": ({"thinking_delta": "thinking", "signature_delta": "signature"},),
    "tool_use": ({"input_json_delta": "partial_json"},),
}
_STOPS = {"end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"}


def parsed(data: bytes) -> list[dict[str, Any]]:
    """Parse a stream's events; check that the name of each is its type."""
    assert data.endswith(b"\n\n")
    found = []
    for one in data[:-2].split(b"\n\n"):
        name, body = one.split(b"\n")
        event: dict[str, Any] = json.loads(body.removeprefix(b"data: "))
        assert name == b"event: " + event["type"].encode()
        found.append(event)
    return found


def check_grammar(events: list[dict[str, Any]]) -> None:
    """Check that the events are one whole message. Raises AssertionError."""
    events = [one for one in events if one["type"] != "ping" or one != {"type": "ping"}]
    assert [one["type"] for one in events].count("message_stop") == 1
    start, *middle, last, stop = events
    assert start["type"] == "message_start"
    message = start["message"]
    assert (message["type"], message["role"], message["content"]) == ("message", "assistant", [])
    assert message["id"].startswith("msg_")
    assert message["stop_reason"] is None
    assert {"input_tokens", "output_tokens"} <= set(message["usage"])
    assert last["type"] == "message_delta"
    assert last["delta"]["stop_reason"] in _STOPS
    assert last["usage"]["output_tokens"] >= 0
    assert stop == {"type": "message_stop"}
    blocks: list[list[Any]] = []  # type and joined pieces of each block
    is_open = False
    for one in middle:
        if one["type"] == "content_block_start":
            assert not is_open
            assert one["index"] == len(blocks)
            block = one["content_block"]
            assert block["type"] in _DELTAS
            if block["type"] == "tool_use":
                assert block["id"]
                assert block["name"]
                assert block["input"] == {}
            blocks.append([block["type"], ""])
            is_open = True
        elif one["type"] == "content_block_delta":
            assert is_open
            assert one["index"] == len(blocks) - 1
            [fields] = _DELTAS[blocks[-1][0]]
            delta = one["delta"]
            piece = delta[fields[delta["type"]]]
            assert piece
            blocks[-1][1] += piece
        else:
            assert one == {"type": "content_block_stop", "index": len(blocks) - 1}
            assert is_open
            is_open = False
    assert not is_open
    assert all(kind != "text" or text.strip() for kind, text in blocks)


def accumulated(events: list[dict[str, Any]]) -> Accumulated:
    """Return the message as the official client assembles it. Importing the client takes 2 s of a core."""
    from anthropic.lib.streaming._messages import accumulate_event
    from anthropic.types import Message

    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for one in events:
        if one["type"] not in ("ping", "message_stop"):
            raw: Any = one
            snapshot = accumulate_event(event=raw, current_snapshot=snapshot, json_bufs=buffers)
    return Message.model_validate(snapshot.to_dict())
