"""Server-sent events out of bytes that come in any pieces; sans-I/O."""

from __future__ import annotations

from gateway.backends.workers.errors import BadHttp

# Longest event: a chunk with log-probabilities of 20 alternatives for a hundred tokens is some 200 KB.
MAX_EVENT_BYTES = 1024 * 1024


class EventReader:
    """Collects the ``data`` of events, line ends of all three kinds, comments and other fields left out."""

    __slots__ = ("_lines", "_rest")

    def __init__(self) -> None:
        self._rest = b""
        self._lines: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """The data of each event that is whole now.

        Raises:
            BadHttp: an event is longer than MAX_EVENT_BYTES.
        """
        if self._rest:
            data = self._rest + data
        if b"\r" not in data and not self._lines:
            *whole, self._rest = data.split(b"\n\n")
            if self._rest:
                self._check(self._rest)
            events = []
            for event in whole:
                if event.startswith(b"data: ") and b"\n" not in event:
                    events.append(event[6:])
                else:
                    events += self._event_of(event)
            return events
        return self._by_line(data)

    def _event_of(self, event: bytes) -> list[bytes]:
        for line in event.split(b"\n"):
            self._take(line)
        return self._end()

    def _by_line(self, data: bytes) -> list[bytes]:
        # A CR at the very end may be half of a CRLF: it waits for what follows.
        held = b""
        if data.endswith(b"\r"):
            data, held = data[:-1], b"\r"
        *lines, rest = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = rest + held
        events = []
        for line in lines:
            if line:
                self._take(line)
            else:
                events += self._end()
        self._check(self._rest)
        return events

    def _take(self, line: bytes) -> None:
        if line.startswith(b"data:"):
            value = line[5:]
            self._lines.append(value[1:] if value.startswith(b" ") else value)
            if len(self._lines) > 1:
                self._check(*self._lines)

    def _end(self) -> list[bytes]:
        if not self._lines:
            return []
        event = b"\n".join(self._lines)
        self._lines.clear()
        return [event]

    def _check(self, *parts: bytes) -> None:
        if sum(map(len, parts)) > MAX_EVENT_BYTES:
            raise BadHttp(f"an event of the stream is longer than {MAX_EVENT_BYTES} bytes")
