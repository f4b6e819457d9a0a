"""`deploy/haproxy/haproxy.cfg`: HAProxy accepts the file and behaves as it says."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.app import create_app
from gateway.http.surfaces import for_callers
from gateway.testing import fake_services

CFG = Path(__file__).resolve().parents[2] / "deploy" / "haproxy" / "haproxy.cfg"
HAPROXY = shutil.which("haproxy", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
WAIT_S = 60.0

pytestmark = pytest.mark.skipif(HAPROXY is None, reason="haproxy is not installed: scripts/test-env does it")


@dataclass
class Gateway:
    """A fake gateway, which records the requests that it receives."""

    server: ThreadingHTTPServer
    paths: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)

    @property
    def port(self) -> int:
        return int(self.server.server_address[1])


def serving() -> Gateway:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = 65_536  # one write: a health check disconnects after the status line

        def log_message(self, *words: Any) -> None:
            """Logs nothing."""

        def answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            if self.path != "/ready":
                gateway.paths.append(self.path)
            self.answer(b"{}")

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            gateway.paths.append(self.path)
            gateway.headers.append({name.lower(): value for name, value in self.headers.items()})
            if self.path == "/v1/stream":
                self.send_response(200)
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                self.wfile.write(b"5\r\nfirst\r\n")
                self.wfile.flush()
                gateway.go_on.wait(WAIT_S)
                self.wfile.write(b"6\r\nsecond\r\n0\r\n\r\n")
            elif self.path == "/v1/never":
                self.connection.settimeout(WAIT_S)
                try:
                    gone = self.connection.recv(1) == b""
                except ConnectionResetError:
                    gone = True
                if gone:
                    gateway.left.set()
                self.close_connection = True
            elif self.path == "/v1/dies":
                self.close_connection = True
            else:
                self.answer(b"{}")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    gateway = Gateway(server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return gateway


def closed_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@dataclass
class Front:
    """A real HAProxy in front of one running gateway and three that do not run."""

    url: str
    gateway: Gateway
    control: Path

    def figure(self, server: str, name: str) -> str:
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as control:
            control.settimeout(WAIT_S)
            control.connect(str(self.control))
            control.sendall(b"show stat\n")
            lines = b"".join(iter(lambda: control.recv(65_536), b"")).decode().splitlines()
        names = lines[0].removeprefix("# ").split(",")
        rows = [dict(zip(names, line.split(","), strict=False)) for line in lines[1:]]
        return next(row[name] for row in rows if row.get("pxname") == "gateways" and row["svname"] == server)


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    assert HAPROXY is not None
    folder, gateway, port = tmp_path_factory.mktemp("haproxy"), serving(), closed_port()
    environ = {
        **os.environ,
        "SLUICE_BIND": f"127.0.0.1:{port}",
        "SLUICE_HAPROXY_SOCKET": str(folder / "control"),
        "SLUICE_GATEWAY_1": f"127.0.0.1:{gateway.port}",
        **{f"SLUICE_GATEWAY_{place}": f"127.0.0.1:{closed_port()}" for place in (2, 3, 4)},
    }
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([HAPROXY, "-db", "-f", str(CFG)], env=environ, stdout=log, stderr=log)
    try:
        url, end = f"http://127.0.0.1:{port}", time.monotonic() + WAIT_S
        while time.monotonic() < end:
            assert process.poll() is None, (folder / "log").read_text()
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/ready", timeout=60).status_code == 200:
                    break
            time.sleep(0.05)
        yield Front(url, gateway, folder / "control")
    finally:
        process.terminate()
        process.wait(WAIT_S)
        gateway.go_on.set()
        gateway.server.shutdown()
        gateway.server.server_close()


def test_haproxy_takes_the_file_as_it_is_shipped() -> None:
    assert HAPROXY is not None
    done = subprocess.run([HAPROXY, "-c", "-f", str(CFG)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr


def test_every_path_for_callers_is_passed_on() -> None:
    acl = [line.split()[2:] for line in CFG.read_text().splitlines() if "acl callers_path" in line]
    begins = tuple(word for match, *words in acl if match == "path_beg" for word in words)
    whole = {word for match, *words in acl if match == "path" for word in words}
    served = set(create_app(fake_services(), shown=for_callers).openapi()["paths"]) - {"/health/deep"}
    assert {path for path in served if not path.startswith(begins)} == whole


@pytest.mark.parametrize(
    "path",
    ["/admin/keys", "/%61dmin/keys", "/metrics", "/health/deep", "//admin/keys", "/docs", "/ready/../admin"],
)
def test_what_is_not_for_callers_does_not_reach_a_gateway(front: Front, path: str) -> None:
    before = list(front.gateway.paths)
    with contextlib.closing(socket.create_connection(("127.0.0.1", httpx.URL(front.url).port or 0))) as raw:
        raw.settimeout(WAIT_S)
        raw.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        head, _, body = b"".join(iter(lambda: raw.recv(65_536), b"")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 404"), head
    assert json.loads(body)["error"]["code"] == "not_found"
    assert front.gateway.paths == before


def test_forwarding_headers_of_callers_are_not_passed_on(front: Front) -> None:
    claimed = {
        "x-forwarded-for": "10.0.0.1", "x-forwarded-host": "h", "x-forwarded-proto": "https",
        "x-real-ip": "10.0.0.1", "forwarded": "for=10.0.0.1",
    }  # fmt: skip
    sent = httpx.post(f"{front.url}/v1/headers", json={}, headers={**claimed, "x-other": "kept"}, timeout=60)
    assert sent.status_code == 200
    got = front.gateway.headers[-1]
    assert got["x-other"] == "kept"
    assert not set(claimed) & set(got)


def test_a_token_is_forwarded_before_the_answer_ends(front: Front) -> None:
    front.gateway.go_on.clear()
    with httpx.stream("POST", f"{front.url}/v1/stream", json={}, timeout=60) as answer:
        pieces = answer.iter_raw()
        assert next(pieces) == b"first", "though the answer is not over"
        front.gateway.go_on.set()
        assert b"".join(pieces) == b"second"


def test_the_gateway_is_told_when_a_caller_leaves_before_the_answer(front: Front) -> None:
    front.gateway.left.clear()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{front.url}/v1/never", json={}, timeout=httpx.Timeout(60, read=0.3))
    assert front.gateway.left.wait(WAIT_S), "the gateway hears of it, so that its sequence is free"


def test_a_request_that_a_gateway_has_seen_is_not_sent_to_another(front: Front) -> None:
    before = front.gateway.paths.count("/v1/dies")
    answer = httpx.post(f"{front.url}/v1/dies", json={}, timeout=60)
    assert answer.status_code == 502
    assert answer.json()["error"]["code"] == "backend_unavailable"
    assert (answer.headers["content-type"], answer.headers["retry-after"]) == ("application/json", "1")
    assert front.gateway.paths.count("/v1/dies") == before + 1


def test_no_request_fails_while_other_gateways_are_down(front: Front) -> None:
    for _ in range(8):
        assert httpx.post(f"{front.url}/v1/generate", json={}, timeout=60).status_code == 200
    deadline = time.monotonic() + WAIT_S
    while any(front.figure(f"gateway-{place}", "status") != "DOWN" for place in (2, 3, 4)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert front.figure("gateway-1", "status") == "UP"
