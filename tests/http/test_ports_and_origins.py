"""Ways around the operators' port and the list of origins: each is refused."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any, cast

import httpx
import pytest

from accounting.keys import KeyRing
from gateway.config.settings import ServerConfig, Settings
from gateway.http.local_protocol import LocalProtocol
from gateway.http.protocol import GatewayProtocol
from gateway.http.security import MAX_HEAD_BYTES
from gateway.http.surfaces import for_callers
from gateway.keys.authenticate import Keys
from gateway.server import protocol_of
from gateway.testing import ADMIN_KEY, CALLER_KEY, fake_services, serving

CONSOLE = "https://console.example"
BODY = {"messages": [{"role": "user", "content": "hi"}]}
# Spellings that a proxy, a router or a file system might read as /admin/keys or /metrics.
TARGETS = [
    *(
        "/admin/keys",
        "//admin/keys",
        "///admin/keys",
        "/./admin/keys",
        "/v1/../admin/keys",
        "/v1/..;/admin/keys",
    ),
    *("/%61dmin/keys", "/%2561dmin/keys", "/admin%2fkeys", "/%2fadmin/keys", "/v1/%2e%2e/admin/keys"),
    *("/ADMIN/keys", "/admin;/keys", "/admin\\keys", "\\admin\\keys", "/admin/keys/", "/admin/./keys"),
    *("http://gw/admin/keys", "http://127.0.0.1/admin/keys", "/admin/keys%00", "/admin/keys?x=/v1/models"),
    *("/metrics", "/%6detrics", "//metrics", "http://gw/metrics", "/openapi.json", "/%6fpenapi.json", "*"),
]
# Origins that are not the one in the list, however alike.
STRANGERS = [
    *(
        "https://evil.example",
        "null",
        "",
        "https://console.example.evil.example",
        "https://evilconsole.example",
    ),
    *(
        "http://console.example",
        "https://console.example:444",
        "https://console.example/",
        "https://CONSOLE.example",
    ),
    *(
        "https://sub.console.example",
        "https://console.example https://evil.example",
        "file://console.example",
    ),
]


def status_of(url: str, raw: bytes) -> int:
    """The status of the one answer to these bytes; 0 when the connection ends without one."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as sock:
        sock.sendall(raw)
        answer = b"".join(iter(lambda: sock.recv(65_536), b""))
    assert answer.count(b"HTTP/1.1 ") <= 1
    return int(answer[9:12] or 0)


def asked(url: str, target: str, key: str, *further: str, method: str = "GET") -> int:
    head = [f"{method} {target} HTTP/1.1", "host: gw", f"authorization: Bearer {key}", *further]
    return status_of(url, "\r\n".join([*head, "connection: close", "", ""]).encode())


@pytest.fixture(scope="module")
def callers_port() -> Iterator[str]:
    """The callers' port of a gateway whose operators have another."""
    with serving(fake_services(), shown=for_callers) as url:
        yield url


@pytest.fixture(scope="module")
def one_port() -> Iterator[str]:
    with serving(fake_services()) as url:
        yield url


@pytest.fixture(scope="module")
def with_console() -> Iterator[str]:
    with serving(fake_services(limits=ServerConfig(cors_origins=(CONSOLE,)))) as url:
        yield url


@pytest.mark.parametrize("target", TARGETS)
def test_no_spelling_of_an_operators_path_is_found_on_the_callers_port(
    callers_port: str, target: str
) -> None:
    for method in ("GET", "POST", "DELETE"):
        assert asked(callers_port, target, ADMIN_KEY, method=method) in (400, 404)


def test_no_header_moves_a_request_to_the_operators_port(callers_port: str) -> None:
    for header in ("x-forwarded-port: 8001", "x-original-url: /admin/keys", "x-rewrite-url: /admin/keys"):
        assert asked(callers_port, "/admin/keys", ADMIN_KEY, header) == 404
        assert asked(callers_port, "/v1/models", CALLER_KEY, header) == 200
    assert asked(callers_port, "/v1/models", CALLER_KEY, "x-http-method-override: DELETE") == 200


@pytest.mark.parametrize("target", [one for one in TARGETS if "admin" in one.lower()])
def test_no_spelling_opens_an_operators_path_to_a_callers_key(one_port: str, target: str) -> None:
    assert asked(one_port, target, CALLER_KEY) in (400, 403, 404)
    assert asked(one_port, target, "none") in (400, 401, 404)


@pytest.mark.parametrize("origin", STRANGERS)
def test_a_page_of_another_origin_is_told_nothing(with_console: str, origin: str) -> None:
    ask = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    preflight = httpx.options(f"{with_console}/v1/generate", headers=ask)
    assert preflight.status_code in (400, 405)
    answer = httpx.post(
        f"{with_console}/v1/generate",
        json=BODY,
        headers={"Origin": origin, "Authorization": f"Bearer {CALLER_KEY}"},
    )
    for response in (preflight, answer):
        assert "access-control-allow-origin" not in response.headers
        assert "access-control-allow-credentials" not in response.headers


def test_the_listed_origin_may_ask_with_a_key_but_not_with_a_browsers_credentials(with_console: str) -> None:
    ask = {
        "Origin": CONSOLE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    preflight = httpx.options(f"{with_console}/v1/generate", headers=ask)
    answer = httpx.get(
        f"{with_console}/v1/models", headers={"Origin": CONSOLE, "Authorization": f"Bearer {CALLER_KEY}"}
    )
    for response in (preflight, answer):
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == CONSOLE
        assert "access-control-allow-credentials" not in response.headers
        # Else a cache would give one origin's permission to another.
        assert "origin" in response.headers["vary"].lower()


@pytest.mark.parametrize("path", ["/v1/generate", "/v1/chat/completions", "/v1/embeddings", "/v1/responses"])
@pytest.mark.parametrize("key", [CALLER_KEY, "none"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_page_of_a_listed_origin_may_read_every_answer(
    with_console: str, path: str, key: str, stream: bool
) -> None:
    body = {
        "/v1/generate": {**BODY, "stream": stream},
        "/v1/chat/completions": {**BODY, "model": "demo", "stream": stream},
        "/v1/responses": {"model": "demo", "input": "hi", "stream": stream},
    }.get(path, {"model": "demo", "input": "hi"})
    headers = {"Origin": CONSOLE, "Authorization": f"Bearer {key}"}
    with httpx.Client() as client:
        for _ in range(2):  # on one connection
            answer = client.post(f"{with_console}{path}", json=body, headers=headers)
            assert answer.status_code == (200 if key == CALLER_KEY else 401) and answer.content
            assert answer.headers["access-control-allow-origin"] == CONSOLE
            assert answer.headers["vary"] == "Origin"


def test_an_open_list_of_origins_does_not_reflect_the_asking_one() -> None:
    with serving(fake_services(limits=ServerConfig(cors_origins=("*",)))) as url:
        cookie = {"Origin": "https://evil.example", "Cookie": "a=b", "Authorization": f"Bearer {CALLER_KEY}"}
        answer = httpx.get(f"{url}/v1/models", headers=cookie)
        refused = httpx.get(f"{url}/v1/models", headers={"Origin": "https://evil.example", "Cookie": "a=b"})
    assert "access-control-allow-credentials" not in answer.headers
    # A cookie of the browser gives no access: the page must send a key in a header.
    assert refused.status_code == 401
    assert json.loads(refused.content)["error"]["code"]


def protocol(auth: bool, **server: Any) -> type[GatewayProtocol]:
    """The protocol of a gateway that listens on loopback, on port 8000."""
    settings = Settings.model_validate({"auth": {"enabled": auth}, "server": server})
    return protocol_of(settings, cast("socket.socket", Listener()), None, 4_096)


class Listener:
    def getsockname(self) -> tuple[str, int]:
        return ("127.0.0.1", 8000)


def test_with_keys_off_a_page_whose_name_resolves_to_loopback_may_do_nothing() -> None:
    found = protocol(False, host="gw.internal", cors_origins=[CONSOLE])
    with serving(fake_services(), http=found) as url:
        port = int(url.rpartition(":")[2])
        found.local_ports = frozenset({port})  # type: ignore[attr-defined]

        def status(host: str, *further: str) -> int:
            head = [
                "GET /v1/models HTTP/1.1",
                f"host: {host}",
                f"authorization: Bearer {CALLER_KEY}",
                *further,
            ]
            return status_of(url, "\r\n".join([*head, "connection: close", "", ""]).encode())

        own = ("localhost", "LOCALHOST.", "app.localhost", "127.0.0.1", "127.1.2.3", "[::1]", "gw.internal")
        for host in (*own, "console.example"):
            assert status(host) == status(f"{host}:{port}") == 200, host
        upgrade = (
            "upgrade: websocket",
            "sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==",
            "sec-websocket-version: 13",
        )
        for host in (
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "10.0.0.1",
            "[::1",
            "",
        ):
            assert status(host) == status(f"{host}:{port}") == 403, host
            assert status(host, *upgrade, "connection: upgrade") == 403, host
        answer = httpx.get(f"{url}/docs", headers={"host": "evil.example"}).json()["error"]
    assert answer["param"] == "host" and "evil.example" in answer["message"]


@pytest.mark.parametrize(
    ("allowed", "shown"), [((CONSOLE,), [CONSOLE, None]), (("*",), ["*", "*"]), ((), [None, None])]
)
def test_the_listed_origin_may_read_an_answer_of_the_protocol_itself(
    allowed: tuple[str, ...], shown: list[str | None]
) -> None:
    with serving(fake_services(), http=protocol(True, cors_origins=list(allowed))) as url:
        answers = [
            httpx.get(f"{url}/ping", headers={"Origin": origin, "x-long": "a" * MAX_HEAD_BYTES})
            for origin in (CONSOLE, "https://evil.example")
        ]
    assert [one.status_code for one in answers] == [431, 431]
    assert [one.headers.get("access-control-allow-origin") for one in answers] == shown


def test_with_keys_or_with_all_origins_allowed_the_host_is_not_looked_at() -> None:
    for one in (protocol(True), protocol(False, cors_origins=["*"])):
        assert not issubclass(one, LocalProtocol)


@pytest.mark.parametrize("path", ["/v1/generate", "/tokenize"])
async def test_with_keys_off_a_page_of_another_origin_may_do_nothing(connect: Any, path: str) -> None:
    off = Keys(KeyRing(None, enabled=False, unix_time=time.time))
    services = fake_services(keys=off, limits=ServerConfig(cors_origins=(CONSOLE,)))
    body = json.dumps({**BODY, "model": "demo"} if path == "/tokenize" else BODY)
    async with connect(services) as client:

        async def status(**headers: str) -> int:
            # As a page sends it without a preflight.
            sent = {"authorization": "", "content-type": "text/plain", **headers}
            answer = await client.post(path, content=body, headers=sent)
            assert answer.status_code == 200 or "origin" in answer.text
            return int(answer.status_code)

        for stranger in STRANGERS:
            assert await status(origin=stranger) == 403, stranger
        for allowed in ({}, {"origin": "http://gw"}, {"origin": CONSOLE}):
            assert await status(**allowed) == 200, allowed
        assert await status(origin=STRANGERS[0], authorization="Bearer any") == 200
