"""Requests that a hostile or broken client might send, drawn from the OpenAPI document and a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

TEXTS = (
    "", " ", "a", "\x00", "\x1b[2J\x9b", "\ud800", "\udfff\ud800", "\u202eabc", "漫画" * 40, "👩‍🚀", "x" * 5_000, "../../etc/passwd",
    "/dev/zero", "s3://b/../a", "hf://a/b", "file:///etc/passwd", "http://127.0.0.1:1/", "-1", "1e999", "NaN", "null", "${jndi:x}",
    "{{7*7}}", "%n%s", "<|eot_id|>", "[INST]", "a.b[0]", "__proto__", "1970-01-01T00:00:00Z", "9999-12-31T23:59:59.999999Z",
    "0001-01-01T00:00:00+14:00", "(a+)+$", "a{1000000}", "2026-02-30", "\r\nx-forged: 1", "'; drop table usage;--", "a" * 64,
)  # fmt: skip
NAMES = ("base", "local", "other", "self_hosted_generation", "chat-manga-2.1", "key_a", "user", "hello")
NUMBERS = (
    0, 1, -1, 2, 7, 100, 4096, 2**31 - 1, 2**31, -(2**31), 2**53, 2**63 - 1, 2**63, 2**64, 10**40, 0.0, -0.0, 0.5, 1.5, 1e-320,
    1e308, -1e308, 253402300799, 253402300800, 1e18,
)  # fmt: skip
ODD_JSON = (
    b"", b"{", b"[]", b"null", b"\xff\xfe", b"\x00", b'"a"', b"[" * 5_000, b'{"a":' * 3_000, b"1" * 10_000, b"NaN", b"Infinity",
    b'{"messages":NaN}', b'{"a":1,"a":2}', b"\xef\xbb\xbf{}", b'{"model":"\\ud800"}', b"{}" + b" " * 50_000, b"{}{}",
)  # fmt: skip
HEADERS = (
    "x-request-id", "idempotency-key", "traceparent", "tracestate", "content-type", "accept", "content-encoding",
    "x-amzn-sagemaker-custom-attributes", "x-amzn-sagemaker-target-model", "if-none-match", "range", "origin", "cookie", "expect",
    "x-forwarded-for", "forwarded", "te", "baggage", "anthropic-version",
)  # fmt: skip
HEADER_VALUES = (
    b"", b"a", b"\xff\xfe", b"a" * 300, b"application/xml", b"multipart/form-data; boundary=x", b"text/event-stream", b"gzip", b"bytes=0-",
    b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-01", b"100-continue", b"*/*", b"null", b"json", b"application/json; charset=utf-16",
)  # fmt: skip
METHODS = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "BREW")


@dataclass(frozen=True, slots=True)
class FuzzRequest:
    """One request, as it is given to the application."""

    method: str
    target: str
    headers: Mapping[str, bytes] = field(default_factory=dict)
    body: bytes = b""


class Fuzzer:
    """Draws requests for the paths of an OpenAPI document; most of them carry ``key``."""

    def __init__(self, document: Mapping[str, Any], key: str, *, without: frozenset[str]) -> None:
        self._document = document
        self._key = key
        self._odd_share = 0.0
        self._operations = [
            (method.upper(), path, operation)
            for path, methods in sorted(document["paths"].items())
            for method, operation in methods.items()
            if path not in without
        ]

    def requests(self, seed: int, count: int) -> Iterator[FuzzRequest]:
        """``count`` requests; each depends on its own seed alone."""
        for number in range(count):
            yield self.request(seed + number)

    def request(self, seed: int) -> FuzzRequest:
        """The request of one seed."""
        draw = random.Random(seed)
        # Half of the bodies have the schema's structure, whatever their values: these get past validation.
        self._odd_share = draw.choice((0.0, 0.0, 0.01, 0.05))
        method, path, operation = self._operations[seed % len(self._operations)]
        target, headers = self._target(draw, path, operation), self._headers(draw)
        body = b""
        if "requestBody" in operation:
            content = operation["requestBody"]["content"].get("application/json", {})
            body = self._body(draw, content.get("schema", {}))
        if draw.random() < 0.03:
            method = draw.choice(METHODS)
        return FuzzRequest(method, target, headers, body)

    def _target(self, draw: random.Random, path: str, operation: Mapping[str, Any]) -> str:
        query = []
        for one in operation.get("parameters", ()):
            value = self._value(draw, one.get("schema", {}), 0)
            text = value if isinstance(value, str) else json.dumps(value)
            escaped = quote(text.encode("utf-8", "surrogatepass"), safe="")[:2_000]
            if one["in"] == "path":
                path = path.replace("{" + one["name"] + "}", escaped or "-")
            elif one["in"] == "query" and (one.get("required") or draw.random() < 0.5):
                query += [f"{one['name']}={escaped}"] * draw.choice((1, 1, 1, 2))
        return path + ("?" + "&".join(query) if query else "")

    def _headers(self, draw: random.Random) -> dict[str, bytes]:
        key = self._key if draw.random() < 0.93 else draw.choice(TEXTS)
        headers = {"authorization": b"Bearer " + key.encode("utf-8", "surrogatepass")}
        if draw.random() < 0.3:
            headers[draw.choice(HEADERS)] = draw.choice(HEADER_VALUES)
        return headers

    def _body(self, draw: random.Random, schema: Mapping[str, Any]) -> bytes:
        kind = draw.random()
        if self._odd_share and kind < 0.1:
            return draw.choice(ODD_JSON)
        body = json.dumps(self._value(draw, schema, 0)).encode()
        if self._odd_share and kind < 0.2:
            at = draw.randrange(len(body))
            return draw.choice(
                (body[:at], body[:at] + bytes([draw.randrange(256)]) + body[at + 1 :], body + body)
            )
        return body

    def _value(self, draw: random.Random, schema: Mapping[str, Any], depth: int) -> Any:
        if "$ref" in schema:
            schema = self._document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        if draw.random() < self._odd_share or depth > 8:
            return self._odd(draw)
        for several in ("anyOf", "oneOf", "allOf"):
            if several in schema:
                return self._value(draw, draw.choice(schema[several]), depth + 1)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return draw.choice(schema["enum"])
        kind = schema.get("type")
        if kind == "object" or "properties" in schema:
            return self._object(draw, schema, depth)
        if kind == "array":
            items = schema.get("items", {})
            number = draw.choice((1, 1, 2, 3)) if draw.random() < 0.95 else draw.choice((0, 300))
            return [self._value(draw, items, depth + 1) for _ in range(number)]
        if kind in ("integer", "number"):
            low, high = (
                schema.get("minimum", schema.get("exclusiveMinimum", -1) + 1),
                schema.get("maximum", 100),
            )
            if kind == "integer":
                low, high = int(low), int(high)
            near = draw.choice((low, high, low - 1, high + 1, low + 1))
            return draw.choice(
                (low, high, near, draw.choice(NUMBERS)) if self._odd_share else (low, low, high)
            )
        if kind == "boolean":
            return draw.random() < 0.5
        if kind == "null":
            return None
        if kind != "string":
            return self._odd(draw)
        return draw.choice(NAMES if draw.random() < 0.8 else TEXTS)

    def _object(self, draw: random.Random, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        required = schema.get("required", ())
        made = {
            name: self._value(draw, one, depth + 1)
            for name, one in schema.get("properties", {}).items()
            if (name in required and draw.random() >= self._odd_share) or draw.random() < 0.15
        }
        further = schema.get("additionalProperties")
        if isinstance(further, Mapping):
            for _ in range(draw.randrange(3)):
                made[draw.choice(TEXTS)] = self._value(draw, further, depth + 1)
        elif draw.random() < self._odd_share:
            made[draw.choice(TEXTS)] = self._odd(draw)
        if not self._odd_share:
            # Not in the schema: the last message is the user's, and there is a prompt or messages, not both.
            if made.get("messages"):
                made.pop("prompt", None)
                made["messages"] = [*made["messages"][:-1], {"role": "user", "content": draw.choice(NAMES)}]
            elif "prompt" in schema.get("properties", {}):
                made.setdefault("prompt", draw.choice(NAMES))
        return made

    def _odd(self, draw: random.Random) -> Any:
        made: Any = draw.choice(
            (
                None,
                True,
                [],
                {},
                draw.choice(TEXTS),
                draw.choice(NUMBERS),
                float("nan"),
                float("inf"),
                {"a": {"type": "b"}},
                [[[[]]]],
            )
        )
        return made
