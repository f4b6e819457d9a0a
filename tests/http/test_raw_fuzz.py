"""Requests and WebSocket frames that are nearly right: no answer is 500, no connection hangs, nothing is left.

``SLUICE_FUZZ_SECONDS`` runs it for longer, with other inputs each time. An input that fails is shown; add it to
``FOUND``, which is sent first.
"""

from __future__ import annotations

import logging
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from gateway.testing import FakeJourney, fake_services, serving
from tests.http.fakes import eventually
from tests.http.raw_corpus import ACCEPTED, REFUSED, SOCKET_GET
from tests.http.test_hostile_clients import LAST_PING, ShortTimeouts, connected, send_and_read, statuses

SECONDS = float(os.environ.get("SLUICE_FUZZ_SECONDS", "0"))
INPUTS = 400
HANG_S = 60.0
REQUEST = b'{"messages":[{"role":"user","content":"hi"}]}'
SEEDS = [raw.sent for raw in (*ACCEPTED, *REFUSED)]
PIECES = (
    b"\r\n", b"\n", b"\r", b"\x00", b" ", b"\t", b":", b",", b";", b"\xff", b"0\r\n\r\n", b"ffffffff\r\n",
    b"content-length: 9\r\n", b"transfer-encoding: chunked\r\n", b"connection: upgrade\r\n", b"upgrade: h2c\r\n",
    b"host: a\r\n", b"expect: 100-continue\r\n", b"GET * HTTP/1.1\r\n", b"OPTIONS * HTTP/1.1\r\n", b"%00", b"//", b"\xc3\x28",
)  # fmt: skip
FOUND: tuple[bytes, ...] = ()
FOUND_FRAMES: tuple[bytes, ...] = ()


def request(chance: random.Random) -> bytes:
    """A seed, or two, with a few bytes changed."""
    raw = bytearray(b"".join(chance.sample(SEEDS, chance.choice((1, 1, 2)))))
    for _ in range(chance.randrange(5)):
        at = chance.randrange(len(raw))
        match chance.randrange(5):
            case 0:
                raw[at] = chance.randrange(256)
            case 1:
                raw[at:at] = chance.choice(PIECES)
            case 2:
                del raw[at : at + chance.randrange(1, 20)]
            case 3:
                raw[at:at] = raw[at : at + chance.randrange(1, 60)]
            case _:
                raw[at:] = b""
        raw = raw or bytearray(b"\r\n")
    return bytes(raw)


def frame(first: int, payload: bytes, *, masked: bool = True, length: int | None = None) -> bytes:
    """One frame; ``length`` is what it claims."""
    size = len(payload) if length is None else length
    flag = 0x80 if masked else 0
    if size < 126:
        head = bytes((first, flag | size))
    elif size < 65_536:
        head = bytes((first, flag | 126)) + struct.pack("!H", size)
    else:
        head = bytes((first, flag | 127)) + struct.pack("!Q", size)
    return head + (bytes(4) if masked else b"") + payload


FRAMES = [
    frame(0x81, REQUEST),
    frame(0x01, REQUEST[:9]) + frame(0x80, REQUEST[9:]),
    frame(0x01, REQUEST[:9]) + frame(0x89, b"ping") + frame(0x80, REQUEST[9:]),
    frame(0x81, REQUEST, masked=False),
    frame(0x82, REQUEST),
    frame(0x81, b'{"a":"\xc3\x28"}'),
    frame(0x80, REQUEST),
    frame(0x01, b"{") + frame(0x81, REQUEST),
    frame(0x09, b"fragmented control"),
    frame(0x89, b"a" * 126),
    frame(0x89, b"ping"),
    frame(0x8A, b"pong"),
    frame(0x88, b""),
    frame(0x88, b"\x03"),
    frame(0x88, struct.pack("!H", 1000) + b"bye"),
    frame(0x88, struct.pack("!H", 1005)),
    frame(0x88, struct.pack("!H", 999)),
    frame(0x88, struct.pack("!H", 1000) + b"\xff"),
    frame(0xC1, REQUEST),
    frame(0x83, REQUEST),
    frame(0x81, b"", length=1 << 40),
    frame(0x81, b"", length=(1 << 63) + 1),
    b"\x81\xff" + struct.pack("!Q", 5) + bytes(4) + b"12345",
    frame(0x81, b""),
]


def frames(chance: random.Random) -> bytes:
    """A few frames, and a byte of them changed."""
    raw = bytearray(b"".join(chance.choices(FRAMES, k=chance.randrange(1, 5))))
    if chance.random() < 0.5:
        raw[chance.randrange(len(raw))] = chance.randrange(256)
    if chance.random() < 0.2:
        del raw[chance.randrange(len(raw)) :]
    return bytes(raw)


def exchanged(sock: socket.socket, raw: bytes, chance: random.Random | None) -> bytes:
    """Send ``raw``, with ``chance`` in two pieces, and close the sending side; all bytes of the answer.

    A server that closes between two pieces resets the connection, and its answer may be lost.
    """
    answer = []
    try:
        cut = len(raw) if chance is None else chance.randrange(len(raw) + 1)
        for piece in (raw[:cut], raw[cut:]):
            sock.sendall(piece)
        sock.shutdown(socket.SHUT_WR)
        while piece := sock.recv(65_536):
            answer.append(piece)
    except TimeoutError:
        pytest.fail(f"the connection hangs: {raw!r}")
    except OSError:
        pass
    return b"".join(answer)


class ErrorLog(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "Invalid UTF-8" not in record.getMessage():
            self.messages.append(record.getMessage())


@contextmanager
def attacked() -> Iterator[str]:
    """Run a gateway and ping it during the block; then check that no request, connection or error is left."""
    journey, errors, done = FakeJourney(), ErrorLog(), threading.Event()
    slowest = [0.0]

    def ping(url: str) -> None:
        while not done.is_set():
            begun = time.monotonic()
            assert statuses(send_and_read(url, LAST_PING)) == [200]
            slowest.append(time.monotonic() - begun)
            done.wait(0.05)

    logger = logging.getLogger("uvicorn.error")
    with serving(fake_services(journey), http=ShortTimeouts) as url:
        logger.addHandler(errors)
        prober = threading.Thread(target=ping, args=(url,))
        prober.start()
        try:
            yield url
        finally:
            done.set()
            prober.join()
            logger.removeHandler(errors)
        eventually(lambda: journey.running == 0 and len(ShortTimeouts.table) == 0)
    assert errors.messages == []
    # In a quiet run 20 ms; a stall of the loop would take much longer than a busy machine does.
    assert 0 < max(slowest) < 10.0


def drive(
    found: tuple[bytes, ...],
    made: Callable[[random.Random], bytes],
    send: Callable[[bytes, random.Random], None],
) -> None:
    """Send the inputs found before, then ``INPUTS`` new ones, or more until ``SECONDS`` have passed."""
    chance = random.Random(19) if not SECONDS else random.Random()
    for raw in found:
        send(raw, chance)
    end = time.monotonic() + SECONDS
    number = 0
    while number < INPUTS or time.monotonic() < end:
        send(made(chance), chance)
        number += 1
    print(f"{number} inputs")


def test_requests_that_are_nearly_right_get_an_answer_or_an_end() -> None:
    with attacked() as url:

        def send(raw: bytes, chance: random.Random) -> None:
            with connected(url) as sock:
                sock.settimeout(HANG_S)
                answer = exchanged(sock, raw, chance)
            assert b"HTTP/1.1 500" not in answer, raw

        drive(FOUND, request, send)


def test_frames_that_are_nearly_right_get_an_event_or_a_close() -> None:
    with attacked() as url:

        def send(raw: bytes, chance: random.Random) -> None:
            with connected(url) as sock:
                sock.settimeout(HANG_S)
                answer = b""
                sock.sendall(SOCKET_GET + b"\r\n")
                while b"\r\n\r\n" not in answer:
                    answer += sock.recv(4_096)
                assert statuses(answer) == [101]
                answer = exchanged(sock, raw, chance)
            # The gateway itself failed if it closes with 1011 and does not just return the client's code.
            failed = b"\x88\x02\x03\xf3" in answer and b"\x03\xf3" not in raw
            assert b'"internal"' not in answer and not failed, raw

        drive(FOUND_FRAMES, frames, send)


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (frame(0x81, REQUEST, masked=False), 1002),
        (frame(0x83, REQUEST), 1002),
        (frame(0xC1, REQUEST), 1002),
        (frame(0x80, REQUEST), 1002),
        (frame(0x01, b"{") + frame(0x81, REQUEST), 1002),
        (frame(0x09, b"fragmented control"), 1002),
        (frame(0x89, b"a" * 126), 1002),
        (frame(0x88, b"\x03"), 1002),
        (frame(0x88, struct.pack("!H", 1005)), 1002),
        (frame(0x81, b'{"a":"\xc3\x28"}'), 1007),
        (frame(0x81, b"", length=1 << 40), 1009),
        (frame(0x88, struct.pack("!H", 1000) + b"bye"), 1000),
    ],
)
def test_a_frame_that_breaks_a_rule_is_closed_with_the_rules_code(sent: bytes, code: int) -> None:
    with serving(fake_services()) as url, connected(url) as sock:
        sock.sendall(SOCKET_GET + b"\r\n")
        answer = b""
        while b"\r\n\r\n" not in answer:
            answer += sock.recv(4_096)
        answer = exchanged(sock, sent, None)
    assert answer[0] == 0x88 and struct.unpack("!H", answer[2:4]) == (code,), answer
