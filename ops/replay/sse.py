"""Splitting a byte stream into the payloads of server-sent events."""

from __future__ import annotations

from collections.abc import Iterator

# One event's size. A final event with 2,000 dropped chunk ids of 128 characters is 260 KB.
MAX_EVENT_BYTES = 1_048_576


class EventTooLarge(ValueError):
    """An event is over :data:`MAX_EVENT_BYTES`."""


class EventSplitter:
    """Takes chunks as they arrive, gives the ``data`` of each finished event; all else is left."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """The events that ``chunk`` finishes. Raises EventTooLarge."""
        buffered = self._rest + chunk
        if b"\r" in buffered:
            # A lone CR at the end may be half of a CRLF: it stays for the next chunk.
            half = buffered.endswith(b"\r")
            buffered = buffered[: len(buffered) - half].replace(b"\r\n", b"\n") + b"\r" * half
        *events, self._rest = buffered.split(b"\n\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise EventTooLarge(f"a server-sent event has more than {MAX_EVENT_BYTES} bytes")
        for event in events:
            lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield b"\n".join(lines)
