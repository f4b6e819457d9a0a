"""Checks the event sequence of a `/v1/responses` stream against the order that clients rely on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

TERMINAL = ("response.completed", "response.incomplete", "response.failed")
# Type of an item: (prefix of its delta and done events, field of the done event with the whole value).
KINDS = {
    "message": ("response.output_text", "text"),
    "reasoning": ("response.reasoning_text", "text"),
    "function_call": ("response.function_call_arguments", "arguments"),
    "custom_tool_call": ("response.custom_tool_call_input", "input"),
}


def check(events: Sequence[dict[str, Any]]) -> None:
    """Raises AssertionError: the events are not a legal response stream."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"] for event in events]
    is_background = bool(events[0]["response"].get("background"))
    opening = ["created", *(["queued"] if is_background else []), "in_progress"]
    assert kinds[: len(opening)] == [f"response.{kind}" for kind in opening]
    assert events[0]["response"]["status"] == ("queued" if is_background else "in_progress")
    assert kinds[-1] in TERMINAL and not any(kind in TERMINAL for kind in kinds[:-1])
    assert len({event["response"]["id"] for event in (events[0], events[1], events[-1])}) == 1
    items: list[dict[str, Any]] = []
    rest = list(events[len(opening) : -1])
    while rest:
        items.append(_item(rest, len(items)))
    assert events[-1]["response"]["output"] == items
    assert events[-1]["response"]["status"] == kinds[-1].removeprefix("response.")


def _item(rest: list[dict[str, Any]], index: int) -> dict[str, Any]:
    added = rest.pop(0)
    assert added["type"] == "response.output_item.added" and added["output_index"] == index
    item = added["item"]
    assert item["status"] == "in_progress"
    prefix, field = KINDS[item["type"]]
    place = {"item_id": item["id"], "output_index": index}
    is_call = item["type"].endswith("call")
    if is_call:
        assert item["call_id"] and item["name"] and item[field] == ""
    else:
        place["content_index"] = 0
        part = rest.pop(0)
        assert part["type"] == "response.content_part.added" and part.items() >= place.items()
        assert part["part"]["text"] == ""
    text = ""
    while rest[0]["type"] == f"{prefix}.delta":
        delta = rest.pop(0)
        assert delta.items() >= place.items()
        text += delta["delta"]
    done = rest.pop(0)
    assert done["type"] == f"{prefix}.done" and done.items() >= {**place, field: text}.items()
    if not is_call:
        part = rest.pop(0)
        assert part["type"] == "response.content_part.done" and part.items() >= place.items()
        assert part["part"]["text"] == text
    ended = rest.pop(0)
    assert ended["type"] == "response.output_item.done" and ended["output_index"] == index
    whole: dict[str, Any] = ended["item"]
    assert (whole["id"], whole["type"]) == (item["id"], item["type"])
    assert whole["status"] in ("completed", "incomplete")
    assert (whole[field] if is_call else whole["content"][0]["text"]) == text
    return whole
