"""A real gateway, a real collector: one root span and one log line for each of a thousand mixed requests."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.integration.live import LiveGateway, gateway
from tests.observability.collector import CLIENT, SERVER, Collected, attributes_of, collecting
from tests.workers.raw_worker import DONE, END, STREAM_HEAD, RawWorker, Request, chunk, ending, piece, usage

# Callers send them; they must not be in the gateway's log or spans.
SECRETS = (
    "PROMPT-4f1c the gardener did it",
    "sk-planted-5d2e8c",
    "AKIAPLANTED0SECRET01",
    "wJalrPLANTEDsecretKEY",
    "hunter2-planted",
    "ANSWER-77aa he did not",
)
PROMPT, KEY, AWS_ID, AWS_SECRET, PASSWORD, ANSWER = SECRETS
LEAKY = f"{PROMPT} {KEY} {AWS_ID} aws_secret_access_key={AWS_SECRET} redis://me:{PASSWORD}@host/0"


async def behave(request: Request) -> None:
    """A worker that fails, breaks or stops where the request's text says so."""
    words = request.body["messages"][-1]["content"]
    going_on = request.body.get("continue_final_message", False)
    asked = request.body["messages"][-2]["content"] if going_on else words
    if "[fail]" in asked:
        await request.whole(500, json.dumps({"error": {"message": LEAKY}}).encode())
        return
    if "[break]" not in asked and "[slow]" not in asked:
        await answer(request)
        return
    await request.send(STREAM_HEAD)
    if "[break]" in asked and not going_on:
        await request.send(chunk(piece(f"{ANSWER} in part")))
        await asyncio.sleep(0.02)
        request.reset()
    elif "[slow]" in asked:
        await request.send(chunk(piece(ANSWER)))
        await request.reader.read()
    else:
        await request.send(chunk(piece(" at all") + ending() + usage(5, 1) + DONE), END)


async def answer(request: Request) -> None:
    """A worker that always answers."""
    await request.send(STREAM_HEAD)
    await request.send(chunk(piece(ANSWER) + piece(" at all") + ending() + usage(5, 2) + DONE), END)


@dataclass
class Scene:
    live: LiveGateway
    collected: Collected
    pool: RawWorker
    spare: RawWorker
    client: aiohttp.ClientSession
    expected: list[str] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    with_parent: dict[str, str] = field(default_factory=dict)

    def headers(self, **more: str) -> tuple[dict[str, str], str | None]:
        """Headers of a request, and its trace id if the caller brings one, as half of the callers do."""
        if secrets.randbits(1):
            return {**self.live.headers, **more}, None
        return self.context(**more)

    def context(self, **more: str) -> tuple[dict[str, str], str]:
        trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
        self.with_parent[trace_id] = span_id
        brought = {"traceparent": f"00-{trace_id}-{span_id}-00", "tracestate": "shop=1"}
        return {**self.live.headers, **brought, **more}, trace_id

    async def post(self, name: str, path: str, body: Any, status: int, **more: str) -> str:
        headers, brought = self.headers(**more)
        if "no-key" in headers:
            del headers["no-key"], headers["Authorization"]
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.client.post(f"{self.live.url}{path}", data=data, headers=headers) as answer:
            text = await answer.text()
            assert answer.status == status, (name, answer.status, text)
            trace_id = answer.headers["x-trace-id"]
        assert brought in (None, trace_id)
        self.expected.append(trace_id)
        self.statuses[name] += 1
        return text

    async def leave(self) -> None:
        """Read the first token, and go."""
        headers, trace_id = self.context()
        body = ask("[slow]", stream=True)
        async with self.client.post(f"{self.live.url}/v1/generate", json=body, headers=headers) as answer:
            await answer.content.readline()
            answer.close()
        self.expected.append(trace_id)

    async def socket(self) -> None:
        headers, trace_id = self.context()
        async with self.client.ws_connect(f"{self.live.url}/v1/generate/ws", headers=headers) as ws:
            await ws.send_str(json.dumps(ask("over a socket")))
            events = [json.loads(message.data) async for message in ws]
        assert events[-1]["type"] == "done"
        self.expected.append(trace_id)

    async def settled(self) -> None:
        """Wait until the collector has one root span per request, and then for another batch."""
        deadline = time.monotonic() + 60
        # The collector runs in a thread and has no event to wait for.
        while len(self.collected.roots) < len(self.expected) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)


def ask(words: str, **more: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": f"{LEAKY} {words}"}], **more}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tracing")


@pytest.fixture(scope="module")
def collected() -> Iterator[Collected]:
    with collecting() as collected:
        yield collected


def configuration(folder: Path, pool: RawWorker, spare: RawWorker, endpoint: str) -> Path:
    worker = {
        "kind": "openai", "dialect": "vllm", "model": "base",
        "probe_interval_seconds": 0.2, "probe_timeout_seconds": 30,
        "max_attempts": 1,
    }  # fmt: skip
    config = {
        "engine": {"kind": "none"},
        "server": {"max_body_bytes": 65536},
        "backends": {
            # These requests fail on purpose: the worker must stay in service.
            "pool": {
                **worker, "base_urls": [pool.url], "eject_after_failures": 1000, "eject_error_share": 1,
            },
            "spare": {**worker, "base_urls": [spare.url]},
        },
        "routing": {"file": str(folder / "routing.yaml")},
        "tracing": {"otlp_endpoint": endpoint, "headers": {"x-collector-key": KEY}},
    }  # fmt: skip
    route = {
        "backends": [{"name": "pool", "weight": 100}],
        "fallback": ["spare"],
        "resume": {"commit_chunks": 0},
    }
    recorded = {**route, "record_content": True}
    routing = {"routes": {"self_hosted_generation": route, "recorded": recorded}}
    (folder / "routing.yaml").write_text(yaml.safe_dump(routing))
    (folder / "sluice.yaml").write_text(yaml.safe_dump(config))
    return folder / "sluice.yaml"


@asynccontextmanager
async def scene(folder: Path, collected: Collected) -> AsyncIterator[Scene]:
    pool, spare = RawWorker([behave]), RawWorker([answer])
    await pool.start()
    await spare.start()
    config = configuration(folder, pool, spare, collected.url)
    manager = gateway(folder, config=config)
    live = await asyncio.to_thread(manager.__enter__)
    try:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(60)) as client:
            yield Scene(live, collected, pool, spare, client)
    finally:
        await asyncio.to_thread(manager.__exit__, None, None, None)
        await pool.die()
        await spare.die()


def thousand_requests(scene: Scene) -> list[Any]:
    """One thousand coroutines; each sends one request."""
    post, chat = scene.post, {"model": "pool", "max_tokens": 8}
    made: list[Any] = []
    made += [post("ok", "/v1/generate", ask("fine"), 200) for _ in range(230)]
    made += [post("streamed", "/v1/generate", ask("fine", stream=True), 200) for _ in range(120)]
    made += [post("chat", "/v1/chat/completions", {**ask("fine"), **chat}, 200) for _ in range(60)]
    made += [
        post("chat streamed", "/v1/chat/completions", {**ask("fine"), **chat, "stream": True}, 200)
        for _ in range(60)
    ]
    made += [post("sagemaker", "/invocations", ask("fine"), 200) for _ in range(40)]
    made += [post("no json", "/v1/generate", b"{" + LEAKY.encode(), 400) for _ in range(50)]
    made += [post("invalid", "/v1/generate", ask("fine", nonsense=LEAKY), 422) for _ in range(50)]
    made += [post("no key", "/v1/generate", ask("fine"), 401, **{"no-key": ""}) for _ in range(30)]
    made += [post("bad key", "/v1/generate", ask(""), 401, Authorization=f"Bearer {KEY}") for _ in range(30)]
    made += [post("no route", "/v1/generate", ask("fine", route=KEY), 404) for _ in range(20)]
    made += [post("too large", "/v1/generate", b"x" * 70_000, 413) for _ in range(10)]
    made += [post("no model", "/v1/completions", {"model": KEY, "prompt": PROMPT}, 404) for _ in range(20)]
    made += [post("tokens", "/tokenize", {"model": "base", "prompt": PROMPT}, 200) for _ in range(20)]
    made += [post("nowhere", f"/v1/{AWS_ID}", {}, 404) for _ in range(20)]
    made += [post("admin", "/admin/keys", {"tenant": "t", "nonsense": LEAKY}, 422) for _ in range(20)]
    made += [post("fallback", "/v1/generate", ask("[fail]"), 200) for _ in range(30)]
    made += [
        post("error", "/v1/generate", ask("[fail]"), 503, Prefer="sluice-no-fallback") for _ in range(10)
    ]
    made += [post("resumed", "/v1/generate", ask("[break]", stream=True), 200) for _ in range(50)]
    made += [post("twice", "/v1/generate", ask("x"), 200, **{"Idempotency-Key": "one"}) for _ in range(50)]
    made += [scene.leave() for _ in range(60)]
    made += [scene.socket() for _ in range(20)]
    return made


async def test_each_of_a_thousand_requests_has_one_root_span_and_one_log_line(
    folder: Path, collected: Collected
) -> None:
    async with scene(folder, collected) as here:
        at_once = asyncio.Semaphore(32)

        async def one(work: Any) -> None:
            async with at_once:
                await work

        async with asyncio.TaskGroup() as group:
            for work in thousand_requests(here):
                group.create_task(one(work))
        await here.settled()
        live = here.live
    assert len(here.expected) == len(set(here.expected)) == 1_000
    roots = Counter(span.trace_id.hex() for span in collected.roots)
    assert set(roots) == set(here.expected)
    assert set(roots.values()) == {1}, "a request with two root spans"

    spans_of: dict[str, list[Span]] = {}
    for span in collected.spans:
        spans_of.setdefault(span.trace_id.hex(), []).append(span)
    for trace_id, spans in spans_of.items():
        ids = {span.span_id for span in spans}
        assert len(ids) == len(spans), "two spans of one id"
        for span in spans:
            if span.kind == SERVER:
                assert span.parent_span_id.hex() == here.with_parent.get(trace_id, "")
            else:
                assert span.parent_span_id in ids, f"{span.name} hangs in the air"

    check_worker_trace_headers(here)
    check_failures_in_traces(here, spans_of)
    check_no_secrets(live, collected)

    lines = [json.loads(line) for line in live.log.read_text().splitlines() if line.startswith("{")]
    lines_of_trace = Counter(
        line["trace_id"] for line in lines if line["event"] in ("request", "http request")
    )
    assert set(lines_of_trace) == set(here.expected) and set(lines_of_trace.values()) == {1}


def check_worker_trace_headers(here: Scene) -> None:
    calls = {span.span_id.hex() for span in here.collected.spans if span.name.startswith("call ")}
    asked = [*here.pool.requests, *here.spare.requests]
    assert len(asked) == len(calls) > 600
    for request in asked:
        _, trace_id, parent, _ = request.headers["traceparent"].split("-")
        assert parent in calls
        brought = trace_id in here.with_parent
        assert request.headers.get("tracestate") == ("shop=1" if brought else None)


def check_failures_in_traces(here: Scene, spans_of: dict[str, list[Span]]) -> None:
    seen: Counter[str] = Counter()
    for spans in spans_of.values():
        [root] = [span for span in spans if span.kind == SERVER]
        values = attributes_of(root)
        attempts = [span for span in spans if span.name.startswith("attempt ")]
        assert all(span.kind == CLIENT for span in attempts)
        if values.get("sluice.fallback.kind") == "spare":
            seen["fallback"] += 1
            failed, answered = attempts[0], attempts[-1]
            assert failed.name == "attempt pool" and attributes_of(failed)["error.type"]
            assert answered.name == "attempt spare" and "error.type" not in attributes_of(answered)
            if values.get("sluice.seams"):
                seen["resumed"] += 1
        elif values.get("sluice.seams"):
            seen["resumed"] += 1
            assert "text" in [attributes_of(span).get("sluice.step.mode") for span in attempts]
        if values.get("error.type") == "cancelled":
            seen["cancelled"] += 1
            assert "cancelled" in [attributes_of(span).get("error.type") for span in attempts]
        if values.get("gen_ai.response.finish_reasons") == ["replay"]:
            seen["replayed"] += 1
        seen[str(values["http.response.status_code"])] += 1
    assert seen["resumed"] == 50 and seen["cancelled"] == 60 and seen["replayed"] == 49
    assert seen["fallback"] >= 30
    assert (seen["401"], seen["413"], seen["400"], seen["422"]) == (60, 10, 50, 70)


def check_no_secrets(live: LiveGateway, collected: Collected) -> None:
    log = live.log.read_text()
    spans = "".join(str(request) for request in collected.requests)
    for secret in SECRETS:
        assert secret not in log, f"{secret} is in the log"
        assert secret not in spans, f"{secret} is in a span"
