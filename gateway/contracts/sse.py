"""Reads server-sent events from bytes, however they are split into pieces; sans-I/O."""

from msgspec import Struct

# Longest event. A chunk with log-probabilities of 20 alternatives for 100 tokens is about 200 KB, a final
# event with 2,000 dropped chunk ids of 128 characters 260 KB.
MAX_EVENT_BYTES = 1024 * 1024
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class EventTooLarge(ValueError):
    """An event is longer than the reader takes."""


class EventReader(Struct, eq=False):
    """Collects the ``data`` of events; drops comments and other fields; accepts CR, LF and CRLF line ends.

    Of an event that is not complete, ``lines`` are its lines and ``rest`` the beginning of the next one.
    """

    _max_bytes: int = MAX_EVENT_BYTES
    rest: bytes = b""
    lines: list[bytes] = []
    _length: int = 0  # bytes of the lines, each with its end

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes, and return the data of each event that they complete. Raises EventTooLarge."""
        if self.rest:
            data, self.rest = self.rest + data, b""
        has_cr = data.find(b"\r") >= 0  # `in` tries to convert it to an int first: 20 times as long
        if not (has_cr or self.lines) and data.startswith(b"data: ") and data.endswith(b"\n\n"):
            events = data[6:-2].split(b"\n\ndata: ")
            if b"".join(events).find(b"\n") < 0:  # count() would look at each byte: ten times as long
                return events  # the common case, whole events of one line: no lists of lines
        held = b""
        if has_cr:
            # A CR at the end may be the first half of a CRLF, so it is kept for the next call.
            if data.endswith(b"\r"):
                data, held = data[:-1], b"\r"
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, rest = data.split(b"\n")
        self.rest = rest + held
        events = []
        for line in lines:
            if not line:
                if self.lines:
                    events.append(b"\n".join(self.lines))
                    self.lines, self._length = [], 0
            elif line.removeprefix(BYTE_ORDER_MARK).startswith(b"data:"):  # the mark begins the stream
                value = line.partition(b":")[2].removeprefix(b" ")
                self.lines.append(value)
                self._length += len(value) + 1
                self._check(self._length)
        self._check(len(self.rest))
        return events

    def _check(self, length: int) -> None:
        if length > self._max_bytes:
            raise EventTooLarge(f"an event of the stream is longer than {self._max_bytes} bytes")
