"""Bad input never makes a 500 and never shows a traceback; each answer names the field."""

from __future__ import annotations

import json
import socket
from urllib.parse import urlsplit

import httpx
import pytest

from tests.integration.live import LiveGateway

MESSAGE = {"role": "user", "content": "hi"}

BODIES: list[tuple[bytes | dict[str, object], int, str, str | None]] = [
    (b"{", 400, "invalid_json", None),
    (b"", 400, "invalid_json", None),
    (b"\xff\xfe", 400, "invalid_json", None),
    (b"[" * 100_000, 400, "invalid_json", None),
    (b"[]", 422, "invalid_request", None),
    ({}, 422, "invalid_request", "messages"),
    ({"messages": []}, 422, "invalid_request", "messages"),
    ({"messages": [{"role": "user", "content": ""}]}, 422, "invalid_request", "messages.0.content"),
    ({"messages": [{"role": "user", "content": "   "}]}, 422, "invalid_request", "messages.0.content"),
    ({"messages": [{"role": "user", "content": "a\x00b"}]}, 422, "invalid_request", "messages.0.content"),
    (b'{"messages":[{"role":"user","content":"\\ud800"}]}', 422, "invalid_request", None),
    ({"messages": [MESSAGE] * 10_000}, 422, "invalid_request", "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, 422, "invalid_request", "messages.0.role"),
    ({"messages": [{"role": "assistant", "content": "x"}]}, 422, "invalid_request", "messages.0.role"),
    ({"messages": "hi"}, 422, "invalid_request", "messages"),
    ({"messages": [MESSAGE], "surprise": 1}, 422, "invalid_request", "surprise"),
    ({"messages": [MESSAGE], "sampling": {"max_tokens": -1}}, 422, "invalid_request", "sampling.max_tokens"),
    ({"messages": [MESSAGE], "sampling": {"max_tokens": 0}}, 422, "invalid_request", "sampling.max_tokens"),
    ({"messages": [MESSAGE], "sampling": {"max_tokens": "9"}}, 422, "invalid_request", "sampling.max_tokens"),
    ({"messages": [MESSAGE], "sampling": {"max_tokens": 4096}}, 422, "invalid_request", None),
    (
        b'{"messages":[{"role":"user","content":"x"}],"sampling":{"temperature":NaN}}',
        422,
        "invalid_request",
        "sampling.temperature",
    ),
    (
        b'{"messages":[{"role":"user","content":"x"}],"sampling":{"temperature":1e999}}',
        422,
        "invalid_request",
        "sampling.temperature",
    ),
    ({"messages": [MESSAGE], "sampling": {"top_p": 0}}, 422, "invalid_request", "sampling.top_p"),
    ({"messages": [MESSAGE], "sampling": {"stop": ""}}, 422, "invalid_request", "sampling.stop"),
    ({"messages": [MESSAGE], "priority": 7}, 422, "invalid_request", "priority"),
    ({"messages": [MESSAGE], "deadline_ms": 0}, 422, "invalid_request", "deadline_ms"),
    ({"messages": [MESSAGE], "request_id": "x" * 129}, 422, "invalid_request", "request_id"),
    ({"messages": [MESSAGE], "route": "nowhere"}, 404, "unknown_route", "route"),
    ({"messages": [MESSAGE], "adapter_id": "none"}, 404, "unknown_adapter", "adapter_id"),
    ({"messages": [MESSAGE], "prompt_version": "none"}, 422, "unknown_prompt_version", None),
    ({"messages": [MESSAGE], "response_format": {"type": "xml"}}, 422, "invalid_request", None),
    ({"messages": [{"role": "user", "content": "volume " * 9000}]}, 422, "context_too_long", "messages"),
]


@pytest.mark.parametrize(("body", "status", "code", "param"), BODIES)
def test_a_bad_native_body_is_refused_with_its_code_and_field(
    live: LiveGateway, body: bytes | dict[str, object], status: int, code: str, param: str | None
) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = httpx.post(f"{live.url}/v1/generate", content=content, headers=live.headers, timeout=60)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (status, code)
    if param is not None:
        assert error["param"] == param
    assert error["request_id"] and "Traceback" not in response.text
    assert response.headers["x-request-id"]


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/invocations"]
)
@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b'{"a":1}', b"\x00", b'{"model":5}', b'{"messages":[1]}']
)
def test_no_path_answers_rubbish_with_a_500(live: LiveGateway, path: str, content: bytes) -> None:
    response = httpx.post(f"{live.url}{path}", content=content, headers=live.headers, timeout=60)
    assert 400 <= response.status_code < 500
    assert response.json()["error"]["message"]


def test_a_body_over_the_limit_is_413_by_header_and_by_counting(live: LiveGateway) -> None:
    big = b'{"messages":[{"role":"user","content":"' + b"x" * 5_000_000 + b'"}]}'
    by_header = httpx.post(f"{live.url}/v1/generate", content=big, headers=live.headers, timeout=60)
    assert (by_header.status_code, by_header.json()["error"]["code"]) == (413, "body_too_large")

    def pieces() -> object:
        for start in range(0, len(big), 65_536):
            yield big[start : start + 65_536]

    counted = httpx.post(f"{live.url}/v1/generate", content=pieces(), headers=live.headers, timeout=60)  # type: ignore[arg-type]
    assert (counted.status_code, counted.json()["error"]["code"]) == (413, "body_too_large")


def test_openais_contract_says_400_and_names_the_parameter(live: LiveGateway) -> None:
    for body, param in (
        ({"model": "demo"}, "messages"),
        ({"model": "demo", "messages": [MESSAGE], "tools": [{}]}, "tools.0.type"),
        ({"model": "demo", "messages": [MESSAGE], "n": 129}, "n"),
        ({"model": "demo", "messages": [MESSAGE], "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"model": "demo", "messages": [MESSAGE], "prompt_logprobs": 1}, "prompt_logprobs"),
        (
            {"model": "demo", "messages": [MESSAGE], "response_format": {"type": "xml"}},
            "response_format.type",
        ),
        ({"model": "demo", "messages": [MESSAGE], "max_tokens": -5}, "max_tokens"),
    ):
        response = httpx.post(f"{live.url}/v1/chat/completions", json=body, headers=live.headers, timeout=60)
        error = response.json()["error"]
        assert (response.status_code, error["type"], error["param"]) == (
            400,
            "invalid_request_error",
            param,
        ), body


def test_a_request_without_a_valid_key_is_401(live: LiveGateway) -> None:
    body = {"messages": [MESSAGE]}
    missing = httpx.post(f"{live.url}/v1/generate", json=body, timeout=60)
    assert (missing.status_code, missing.json()["error"]["code"]) == (401, "missing_key")
    wrong = httpx.post(
        f"{live.url}/v1/generate", json=body, headers={"Authorization": "Bearer nope"}, timeout=60
    )
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (401, "invalid_key")
    assert httpx.get(f"{live.url}/ready", timeout=60).status_code == 200


def test_an_unknown_path_and_a_wrong_method_have_our_error_shape(live: LiveGateway) -> None:
    for method, path, status in (
        ("GET", "/nowhere", 404),
        ("GET", "/v1/generate", 405),
        ("DELETE", "/v1/models", 405),
    ):
        response = httpx.request(method, f"{live.url}{path}", headers=live.headers, timeout=60)
        assert response.status_code == status
        assert response.json()["error"]["message"]


def test_a_request_line_of_rubbish_does_no_harm(live: LiveGateway) -> None:
    where = urlsplit(live.url)
    with socket.create_connection((where.hostname, where.port), 5) as connection:
        connection.sendall(b"\x16\x03\x01 rubbish\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 400 ")
    assert httpx.get(f"{live.url}/ping", timeout=60).status_code == 200


def test_an_error_does_not_contain_the_prompts_text(live: LiveGateway) -> None:
    secret = "my-credit-card-4111"
    body = {"messages": [{"role": "user", "content": secret}, {"role": "user", "content": 5}], secret: secret}
    response = httpx.post(f"{live.url}/v1/generate", json=body, headers=live.headers, timeout=60)
    assert response.status_code == 422
    assert "4111" not in json.dumps(response.json()["error"]["message"])
