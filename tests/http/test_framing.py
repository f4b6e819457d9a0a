"""Every request of the corpus over a socket of its own: what is answered, what runs, and that the connection ends."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from gateway.testing import FakeJourney, fake_services, serving
from tests.http.raw_corpus import ACCEPTED, CHUNK, CHUNKED, END, ONE, PING, REFUSED, Raw, post
from tests.http.test_hostile_clients import ShortTimeouts, connected, read_all, send_and_read, statuses


@pytest.fixture(scope="module")
def journey() -> FakeJourney:
    return FakeJourney()


@pytest.fixture(scope="module")
def url(journey: FakeJourney) -> Iterator[str]:
    with serving(fake_services(journey), http=ShortTimeouts) as found:
        yield found


@pytest.mark.parametrize("raw", ACCEPTED, ids=lambda raw: raw.name)
def test_what_is_one_thing_to_every_server_is_answered(url: str, journey: FakeJourney, raw: Raw) -> None:
    before = len(journey.requests)
    with connected(url) as sock:
        sock.sendall(raw.sent)
        answer = b""
        while len(statuses(answer)) < len(raw.statuses) and (piece := sock.recv(65_536)):
            answer += piece
    assert tuple(statuses(answer)) == raw.statuses, answer[:300]
    assert len(journey.requests) - before == raw.generations


@pytest.mark.parametrize("raw", REFUSED, ids=lambda raw: raw.name)
def test_what_two_servers_may_read_differently_ends_the_connection(
    url: str, journey: FakeJourney, raw: Raw
) -> None:
    before = len(journey.requests)
    answer = send_and_read(url, raw.sent)
    assert tuple(statuses(answer)) == raw.statuses, answer[:300]
    assert len(journey.requests) - before == raw.generations
    if raw.statuses[-1] != 200 and b"application/json" in answer:
        error = json.loads(answer.rpartition(b"\r\n\r\n")[2])["error"]
        assert error["code"] in ("invalid_request", "headers_too_large") and error["request_id"]


def test_chunk_extensions_are_bounded(url: str, journey: FakeJourney) -> None:
    """Without a bound, a caller may send chunk extensions until the body's timeout, and almost no body."""
    before = len(journey.requests)
    with connected(url) as sock:
        sock.sendall(post(CHUNKED))
        try:
            for _ in range(400):
                sock.sendall(b"1;" + b"a" * 8_192 + b"\r\n \r\n")
        except OSError:
            pass
        assert statuses(read_all(sock)) in ([400], [])
    assert len(journey.requests) == before
    many_small = b"".join(b"1\r\n%c\r\n" % one for one in b" " * 40_000)
    answer = send_and_read(url, post(CHUNKED + b"connection: close\r\n", many_small + CHUNK + END))
    assert statuses(answer) == [200]


def test_requests_that_wait_on_one_connection_are_bounded(url: str) -> None:
    """Each waiting request would take about 3 KB, and one read may bring thousands of requests."""
    answered = len(statuses(send_and_read(url, PING * 5_000)))
    assert 1 <= answered <= 20
    closing = ONE.replace(b"\r\n", b"\r\nconnection: close\r\n", 1)
    assert len(statuses(send_and_read(url, PING * 10 + closing))) == 11
