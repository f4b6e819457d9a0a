"""Requests that are in flight when the drain's time is up get an error in their own contract."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import signal
import sqlite3
import time
from pathlib import Path

import httpx
import psutil
import pytest
from websockets.sync.client import connect

from tests.fork_server import ImportingPopen
from tests.integration.live import LiveGateway, gateway
from tests.integration.test_faults import ENDLESS
from tests.sse import json_events

CHAT = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Count for me"}],
    "max_tokens": 3000,
    "stream": True,
    "response_format": ENDLESS["response_format"],
}


def under_way(live: LiveGateway, requests: int) -> None:
    deadline = time.monotonic() + 60
    while live.metric("sluice_requests_in_flight") < requests:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_at_the_end_of_the_drain_every_contract_tells_its_caller_and_the_row_is_written(
    tmp_path: Path,
) -> None:
    with gateway(tmp_path, SLUICE_SERVER__DRAIN_SECONDS="1", SLUICE_ENGINE__STOPPED_SECONDS="60") as live:
        engine = live.engine_pid()
        address = f"{live.url}/v1/generate/ws".replace("http", "ws")
        with (
            httpx.Client(headers=live.headers, timeout=60) as client,
            connect(address, additional_headers=live.headers) as socket,
            client.stream("POST", f"{live.url}/v1/generate", json=ENDLESS) as native,
            client.stream("POST", f"{live.url}/v1/chat/completions", json=CHAT) as chat,
        ):
            native_lines, chat_lines = native.iter_lines(), chat.iter_lines()
            next(native_lines), next(chat_lines)
            socket.send(json.dumps({name: value for name, value in ENDLESS.items() if name != "stream"}))
            assert json.loads(socket.recv(60))["type"] == "token"
            os.kill(engine, signal.SIGSTOP)
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                whole = pool.submit(
                    httpx.post, f"{live.url}/v1/generate", json={**ENDLESS, "stream": False},
                    headers=live.headers, timeout=60,
                )  # fmt: skip
                under_way(live, 4)
                live.process.send_signal(signal.SIGTERM)
                refused = whole.result()
            native_events = list(json_events(native_lines))
            chat_events = list(json_events(chat_lines))
            last_frame = [json.loads(frame) for frame in socket][-1]
        os.kill(engine, signal.SIGCONT)
        assert live.process.wait(60) == 0
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert refused.headers["retry-after"] and refused.headers["content-type"] == "application/json"
    for end in (native_events[-1], last_frame):
        assert (end["type"], end["partial"], end["error"]["code"]) == ("error", True, "draining")
    assert chat_events[-1]["error"]["code"] == "draining"
    rows = sqlite3.connect(tmp_path / "ledger.db").execute("select error_code from generations").fetchall()
    assert rows == [("cancelled",)] * 4, "broken off: billed for what was delivered"


@pytest.mark.skipif(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, reason="nohup")
def test_sighup_drains_as_sigterm_does_and_cuts_no_stream(tmp_path: Path) -> None:
    with gateway(tmp_path) as live:
        engine = live.engine_pid()
        body = {"messages": [{"role": "user", "content": "Who wrote Berserk?"}], "stream": True}
        with httpx.stream(
            "POST", f"{live.url}/v1/generate", json=body, headers=live.headers, timeout=60
        ) as stream:
            lines = stream.iter_lines()
            next(lines)
            os.kill(engine, signal.SIGHUP)  # a closed terminal tells every process of the tree
            live.process.send_signal(signal.SIGHUP)
            assert list(json_events(lines))[-1]["type"] == "done"
        assert live.process.wait(60) == 0


def test_a_second_signal_ends_the_drain_at_once_and_the_caller_gets_an_error(tmp_path: Path) -> None:
    with gateway(tmp_path, SLUICE_SERVER__DRAIN_SECONDS="60", SLUICE_ENGINE__STOPPED_SECONDS="60") as live:
        engine = live.engine_pid()
        with (
            httpx.Client(headers=live.headers, timeout=60) as client,
            client.stream("POST", f"{live.url}/v1/generate", json=ENDLESS) as stream,
        ):
            lines = stream.iter_lines()
            next(lines)
            os.kill(engine, signal.SIGSTOP)
            began = time.monotonic()
            live.process.send_signal(signal.SIGTERM)
            while (
                httpx.get(f"{live.url}/ready", timeout=60).status_code != 503
                or time.monotonic() - began < 0.2
            ):
                assert time.monotonic() - began < 30
            live.process.send_signal(signal.SIGTERM)
            events = list(json_events(lines))
            assert time.monotonic() - began < 40, "the drain takes a minute"
        os.kill(engine, signal.SIGCONT)
        assert live.process.wait(60) == 0
    assert events[-1]["type"] == "error" and events[-1]["error"]["code"] == "draining"


def test_a_body_that_never_comes_whole_is_refused_as_json_when_the_gateway_stops(tmp_path: Path) -> None:
    import socket as sockets

    with gateway(tmp_path, ready=False, SLUICE_SERVER__DRAIN_SECONDS="0") as live:
        host, port = live.url.removeprefix("http://").split(":")
        with sockets.create_connection((host, int(port)), timeout=60) as slow:
            head = (
                f"POST /v1/generate HTTP/1.1\r\nhost: x\r\nauthorization: {live.headers['Authorization']}\r\n"
            )
            slow.sendall(head.encode() + b"content-type: application/json\r\ncontent-length: 50\r\n\r\n{")
            for _ in range(3):  # the gateway has read the body's beginning once these are answered
                assert httpx.get(f"{live.url}/ping", timeout=60).status_code == 200
            live.process.send_signal(signal.SIGTERM)
            answer = b""
            while piece := slow.recv(65536):
                answer += piece
        assert answer.startswith(b"HTTP/1.1 503 ") and b'"draining"' in answer
        assert live.process.wait(60) == 0


def test_a_gateway_ends_soon_after_its_last_answer_with_its_lines_and_rows_written_and_no_child_left(
    tmp_path: Path,
) -> None:
    # The process of an operator: a forked one ends without Python's teardown in any case.
    with gateway(tmp_path, start=ImportingPopen) as live:
        children = psutil.Process(live.process.pid).children(recursive=True)
        body = {"messages": [{"role": "user", "content": "Who wrote Berserk?"}], "stream": True}
        with httpx.stream(
            "POST", f"{live.url}/v1/generate", json=body, headers=live.headers, timeout=60
        ) as stream:
            lines = stream.iter_lines()
            next(lines)
            live.process.send_signal(signal.SIGTERM)
            done = list(json_events(lines))[-1]
        answered = time.monotonic()
        assert live.process.wait(60) == 0
        assert time.monotonic() - answered < 15, "it takes a third of a second on a quiet machine"
    assert children and not any(child.is_running() for child in children)
    logged = [json.loads(line) for line in live.log.read_text().splitlines()]
    assert [line["request_id"] for line in logged if line["event"] == "request"] == [done["request_id"]]
    assert [line["event"] for line in logged][-3:-1] == ["stopping", "Shutting down"]
    rows = sqlite3.connect(tmp_path / "ledger.db").execute("select output_tokens from generations").fetchall()
    assert rows == [(done["usage"]["output_tokens"],)]


def test_a_gateway_whose_log_lines_nobody_reads_ends_as_well(tmp_path: Path) -> None:
    log = tmp_path / "gateway.log"
    os.mkfifo(log)
    reader = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(log, os.O_WRONLY | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x")
    with gateway(tmp_path, ready=False) as live:
        live.process.send_signal(signal.SIGTERM)
        assert live.process.wait(60) == 0
    os.close(reader), os.close(writer)
