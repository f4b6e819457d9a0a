"""Reads streamed answers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from gateway.contracts.sse import EventReader


def json_events(lines: Iterable[str]) -> Iterator[Any]:
    """Yield the events of a stream's lines as JSON values, as they arrive, without OpenAI's ``[DONE]``."""
    reader = EventReader()
    for line in lines:
        for event in reader.feed(f"{line}\n".encode()):
            if event != b"[DONE]":
                yield json.loads(event)
