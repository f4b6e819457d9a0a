"""Reads streamed answers while they arrive."""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any

from gateway.contracts.sse import EventReader


async def json_events(chunks: AsyncIterable[bytes]) -> AsyncIterator[Any]:
    """The events of a stream's bytes as JSON values, as they arrive; without OpenAI's ``[DONE]``."""
    reader = EventReader()
    async for chunk in chunks:
        for event in reader.feed(chunk):
            if event != b"[DONE]":
                yield json.loads(event)
