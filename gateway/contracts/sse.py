"""Reads server-sent events from bytes, however they are split into pieces; sans-I/O."""

from msgspec import Struct

# Longest event. A chunk with log-probabilities of 20 alternatives for 100 tokens is about 200 KB, a final
# event with 2,000 dropped chunk ids of 128 characters 260 KB.
MAX_EVENT_BYTES = 1024 * 1024
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class EventTooLarge(ValueError):
    """An event is longer than the reader takes."""


class EventReader(Struct, eq=False):
    """Collects the ``data`` of events; drops comments and other fields; accepts CR, LF and CRLF line ends."""

    _max_bytes: int = MAX_EVENT_BYTES
    _rest: bytes = b""
    _lines: list[bytes] = []
    _length: int = 0  # bytes of the lines, each with its end

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes, and return the data of each event that they complete. Raises EventTooLarge."""
        if self._rest:
            data, self._rest = self._rest + data, b""
        if self._lines or data.find(b"\r") >= 0:  # `in` tries to convert it to an int first: 20 times as long
            return self._by_line(data)
        if data.startswith(b"data: ") and data.endswith(b"\n\n"):
            events = data[6:-2].split(b"\n\ndata: ")
            if b"".join(events).find(b"\n") < 0:  # count() would look at each byte: ten times as long
                return events  # the common case, whole events of one line: no lists of lines
        *complete, self._rest = data.split(b"\n\n")
        if self._rest:
            self._check(len(self._rest))
        events = []
        for event in complete:
            for line in event.split(b"\n"):
                self._take(line)
            events += self._end()
        return events

    def _by_line(self, data: bytes) -> list[bytes]:
        # A CR at the end may be the first half of a CRLF, so it is kept for the next call.
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
        self._check(len(self._rest))
        return events

    def _take(self, line: bytes) -> None:
        line = line.removeprefix(BYTE_ORDER_MARK)  # at the stream's beginning
        if line.startswith(b"data:"):
            value = line[5:]
            self._lines.append(value[1:] if value.startswith(b" ") else value)
            self._length += len(self._lines[-1]) + 1
            self._check(self._length)

    def _end(self) -> list[bytes]:
        if not self._lines:
            return []
        event = b"\n".join(self._lines)
        self._lines.clear()
        self._length = 0
        return [event]

    def _check(self, length: int) -> None:
        if length > self._max_bytes:
            raise EventTooLarge(f"an event of the stream is longer than {self._max_bytes} bytes")
