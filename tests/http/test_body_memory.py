"""Memory of bodies that arrive at the same time, and of bodies that never end."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from gateway.errors import RateLimited
from gateway.requests.body_memory import BodyMemory, TooManyBodies
from gateway.testing import OTHER_KEY, FakeJourney, fake_services, serving
from tests.http.fakes import eventually
from tests.http.raw_corpus import KEY, SOCKET_GET, post
from tests.http.test_hostile_clients import connected, read_all, send_and_read, statuses

BODY = json.dumps({"messages": [{"role": "user", "content": "x" * 100_000}]}).encode()
LENGTH = b"connection: close\r\ncontent-length: %d\r\n" % len(BODY)
WHOLE = post(LENGTH, BODY)
UNFINISHED = WHOLE[:-1]
OTHERS = WHOLE.replace(KEY, b"authorization: Bearer %b\r\n" % OTHER_KEY.encode())


@contextmanager
def gateway() -> Iterator[tuple[str, BodyMemory]]:
    """Start a gateway with memory for three bodies of each tenant, six in all."""
    memory = BodyMemory(7 * 100_000)
    with serving(fake_services(FakeJourney(), bodies=memory)) as url:
        yield url, memory
        eventually(lambda: memory.held_bytes == 0)


def test_unfinished_bodies_take_their_tenants_share_and_no_more() -> None:
    with gateway() as (url, memory), ExitStack() as stack:
        senders = [stack.enter_context(connected(url)) for _ in range(3)]
        for sock in senders:
            sock.sendall(UNFINISHED)
        eventually(lambda: memory.held_bytes > 3 * 100_000 - 3 * 100)
        answer = send_and_read(url, WHOLE)
        assert statuses(answer) == [429] and b"rate_limited" in answer and b"retry-after: 1" in answer
        assert statuses(send_and_read(url, OTHERS)) == [200]
        for sock in senders:
            sock.sendall(BODY[-1:])
            assert statuses(read_all(sock)) == [200]
        eventually(lambda: statuses(send_and_read(url, WHOLE)) == [200])


def test_the_memory_for_all_is_bounded_too() -> None:
    memory = BodyMemory(100)
    memory.hold("a", 50)
    memory.hold("b", 40)
    with pytest.raises(RateLimited):
        memory.hold("a", 1)
    with pytest.raises(TooManyBodies):
        memory.hold("c", 11)
    memory.release("a", 50)
    memory.hold("c", 11)
    memory.release("b", 40)
    memory.release("c", 11)
    assert memory.held_bytes == 0


@contextmanager
def upgraded(url: str) -> Iterator[socket.socket]:
    with connected(url) as sock:
        sock.sendall(SOCKET_GET + b"\r\n")
        answer = b""
        while b"\r\n\r\n" not in answer:
            answer += sock.recv(4_096)
        assert statuses(answer) == [101]
        yield sock


def test_an_unfinished_frame_counts_as_a_body() -> None:
    frame = b"\x81\xff" + struct.pack("!Q", len(BODY)) + bytes(4) + BODY
    with gateway() as (url, memory), ExitStack() as stack:
        senders = [stack.enter_context(upgraded(url)) for _ in range(3)]
        for sock in senders:
            sock.sendall(frame[:-1])
        eventually(lambda: memory.held_bytes > 3 * 100_000 - 3 * 100)
        with upgraded(url) as refused:
            refused.sendall(frame)
            answer = read_all(refused)
        assert answer[0] == 0x88 and struct.unpack("!H", answer[2:4]) == (1013,)
        senders[0].sendall(frame[-1:])
        answer = b""
        while not answer.endswith(b"\x03\xe8"):  # close code 1000, after the last event
            answer += (more := senders[0].recv(4_096))
            assert more, answer


def test_a_message_of_many_small_frames_is_refused() -> None:
    with gateway() as (url, _), upgraded(url) as sock:
        sock.sendall(b"\x01\x81\0\0\0\0{" + b"\x00\x81\0\0\0\0 " * 2_000)
        answer = read_all(sock)
    assert answer[0] == 0x88 and struct.unpack("!H", answer[2:4]) == (1009,)
