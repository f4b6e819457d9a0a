"""The console over HTTP: its files, its sessions, and what a viewer may do."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute

from gateway.admin.console import GONE_S, KEPT, MOST_GATEWAYS, STREAM, ConsoleAdmin
from gateway.app import create_app
from gateway.config.settings import ServerConfig
from gateway.contracts.origin import EdgeRequest
from gateway.contracts.values import Caller, CallerRole
from gateway.errors import InvalidKey
from gateway.health.rolling_stats import RollingStats
from gateway.keys.sessions import COOKIE, SESSION_S, ConsoleSessions
from gateway.state.memory import MemoryStateStore, MemoryStreams
from gateway.testing import FakeKeys, fake_services, serving
from observability.collectors import WorkerStatus
from observability.events import RequestRecord
from observability.slo_metrics import SloTargets
from tests.http.conftest import Connect

FOLDER = Path(__file__).parents[2] / "gateway" / "bundled" / "console"
ORIGIN = {"origin": "http://gw"}
NO_KEY = {"authorization": ""}
ROLES = {
    "view": CallerRole.VIEWER,
    "operate": CallerRole.OPERATOR,
    "admin": CallerRole.ADMIN,
    "call": CallerRole.CALLER,
}


class Keys(FakeKeys):
    """A key for each role; revoked ones are no longer known."""

    def __init__(self) -> None:
        self.known = {name: Caller("ops", role, f"key_{name}") for name, role in ROLES.items()}

    def authenticate(self, bearer: str | None) -> Caller:
        if bearer not in self.known:
            raise InvalidKey("the key is not known")
        return self.known[bearer]

    def by_id(self, key_id: str) -> Caller:
        for caller in self.known.values():
            if caller.key_id == key_id:
                return caller
        raise InvalidKey("the key was revoked")


class Recorded:
    """An audit log in a list."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, str]] = []

    async def record(self, who: str, action: str, target: str, **more: Any) -> None:
        self.entries.append((who, action))


class ConsoleRig:
    """A gateway with a console; ``now`` is its Unix time, and its clock.

    Args:
        name: the gateway's name.
        streams: streams of the state store, which several gateways may share.
    """

    def __init__(self, name: str = "gw:1", streams: MemoryStreams | None = None, **limits: Any) -> None:
        self.now = 1_800_000_000.0
        self.stats = RollingStats(lambda: self.now)
        self.waiting, self.in_flight = 0, 0
        self.streams = streams or MemoryStreams()
        self.keys, self.audit, self.aggregates = Keys(), Recorded(), 0
        self.console = ConsoleAdmin(
            admission=self.admission,
            in_flight=lambda: self.in_flight,
            figures=self.stats.figures,
            backends=lambda: [{"name": "local"}],
            workers=lambda: {"pool": [WorkerStatus("http://w1", "ejected", 0.0, 1, 1, 2, kv_usage=0.5)]},
            targets=lambda: {"chat": SloTargets(200.0, 1_400.0)},
            store=MemoryStateStore(self.streams, unix_time=lambda: self.now),
            audit=self.audit,  # type: ignore[arg-type]
            name=name,
            version="1.0",
            clock=lambda: self.now,
            unix_time=lambda: self.now,
        )
        self.services = fake_services(
            keys=self.keys,
            console=self.console,
            sessions=ConsoleSessions(b"secret", self.keys.by_id, lambda: self.now),
            limits=ServerConfig(**limits),
        )

    def admission(self) -> Mapping[str, Any]:
        self.aggregates += 1
        gate = {"in_flight": {"requests": 3}, "queue": {"requests": self.waiting}}
        return {"backends": {"local": gate}, "decisions": []}

    def finished(self, number: int, **changes: Any) -> None:
        fields: dict[str, Any] = {
            "tenant": "acme",
            "contract": "chat",
            "status": 200,
            "total_ms": 1.0,
            **changes,
        }
        record = RequestRecord(f"req_{number}", f"gen_{number}", f"{number:032}", **fields)
        self.console.observe(record)
        self.stats.observe(record)


async def signed_in(client: Any, key: str = "admin") -> Any:
    return await client.post("/console/session", json={"key": key}, headers={**NO_KEY, **ORIGIN})


async def test_the_page_loads_nothing_from_elsewhere_and_runs_no_inline_script(connect: Connect) -> None:
    async with connect(ConsoleRig().services) as client:
        page = await client.get("/console", headers=NO_KEY)
        for path in ("console.js", "records.js", "routing.js", "console.css", "preact.js"):
            file = await client.get(f"/console/assets/{path}", headers=NO_KEY)
            assert file.status_code == 200
            assert file.headers["content-security-policy"] == page.headers["content-security-policy"]
            assert file.headers["x-content-type-options"] == "nosniff"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    assert "require-trusted-types-for 'script'" in policy and "frame-ancestors 'none'" in policy
    assert not re.search(r"<script(?![^>]* src=)|\son\w+=|style=", page.text)
    assert "http" not in page.text.replace("http-equiv", "")


def test_the_files_are_small_and_the_vendored_one_is_what_its_readme_says() -> None:
    files = [one for one in FOLDER.iterdir() if one.suffix in (".html", ".js", ".css")]
    assert sum(len(gzip.compress(one.read_bytes())) for one in files) < 150_000
    digest = base64.b64encode(hashlib.sha384((FOLDER / "preact.js").read_bytes()).digest()).decode()
    assert f"sha384-{digest}" in (FOLDER / "README.md").read_text()
    own = "".join(one.read_text() for one in FOLDER.glob("*.js") if one.name != "preact.js")
    assert not re.search(r"innerHTML|dangerouslySet|insertAdjacent|document\.write|eval\(|new Function", own)


async def test_a_key_is_exchanged_for_a_cookie_that_only_the_page_can_use(connect: Connect) -> None:
    rig = ConsoleRig()
    async with connect(rig.services) as client:
        made = await signed_in(client)
        assert made.json() == {"key_id": "key_admin", "role": "admin", "tenant": "ops"}
        cookie = made.headers["set-cookie"]
        assert all(
            word in cookie for word in ("HttpOnly", "SameSite=strict", "Path=/", f"Max-Age={SESSION_S}")
        )
        assert rig.audit.entries == [("key_admin", "console.sign_in")]
        assert (await client.get("/console/session", headers=NO_KEY)).json()["role"] == "admin"
        assert (await client.get("/admin/console/requests", headers=NO_KEY)).status_code == 200
        for foreign in ({}, {"origin": "http://evil"}, {**ORIGIN, "sec-fetch-site": "cross-site"}):
            refused = await client.post("/admin/drain", headers={**NO_KEY, **foreign})
            assert refused.status_code == 403, foreign
        assert (
            await client.get("/admin/keys", headers={**NO_KEY, "origin": "http://evil"})
        ).status_code == 403
        left = await client.delete("/console/session", headers=NO_KEY)
        proxied = {**NO_KEY, **ORIGIN, "x-forwarded-proto": "https"}
        behind = await client.post("/console/session", json={"key": "admin"}, headers=proxied)
        assert "Secure" in behind.headers["set-cookie"] and "Secure" not in cookie
        assert f'{COOKIE}=""' in left.headers["set-cookie"] and "Max-Age=0" in left.headers["set-cookie"]


async def test_a_session_ends_with_its_time_with_its_key_and_when_it_is_forged(connect: Connect) -> None:
    rig = ConsoleRig()
    async with connect(rig.services) as client:
        token = (await signed_in(client, "operate")).cookies[COOKIE]

        async def status(value: str) -> int:
            client.cookies.clear()
            asked = {b"authorization": b"", b"cookie": f"{COOKIE}={value}".encode("latin-1")}
            return int((await client.get("/admin/console/requests", headers=asked)).status_code)

        assert await status(token) == 200
        key_id, until, signature = token.split(".")
        for forged in (
            f"key_admin.{until}.{signature}",
            f"{key_id}.{int(until) + 1}.{signature}",
            f"{key_id}.{until}.{'0' * 64}",
            "",
            "x",
            "..",
            "\xff",
        ):
            assert await status(forged) == 401, forged
        rig.now += SESSION_S
        assert await status(token) == 401
        rig.now -= SESSION_S
        del rig.keys.known["operate"]
        assert await status(token) == 401


async def test_an_open_console_ends_with_its_key_and_only_so_many_are_open() -> None:
    rig = ConsoleRig()
    rig.console.pause_s, rig.console.most_streams = 0.01, 1
    with serving(rig.services) as url:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            view = {"authorization": "Bearer view"}
            async with client.stream("GET", "/console/live", headers=view) as live:
                lines = live.aiter_lines()
                assert (await anext(lines)).startswith("data: ")
                full = await client.get("/console/live", headers=view)
                assert (full.status_code, full.json()["error"]["code"]) == (429, "rate_limited")
                del rig.keys.known["view"]
                async for _ in lines:
                    pass
            assert (await client.get("/console/live", headers=view)).status_code == 401
            assert rig.console.streams == 0


@pytest.mark.parametrize("body", ["", "[]", "{}", '{"key": 7}', '{"key": ""}'])
async def test_a_console_session_needs_a_valid_key_and_refuses_a_callers(connect: Connect, body: str) -> None:
    async with connect(ConsoleRig().services) as client:
        wrong = await client.post("/console/session", content=body, headers={**NO_KEY, **ORIGIN})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (422, "key")
        assert (await signed_in(client, "call")).status_code == 403
        assert (await signed_in(client, "unknown")).status_code == 401
        assert (await client.get("/console/session", headers=NO_KEY)).json() is None
        foreign = await client.post("/console/session", json={"key": "admin"}, headers=NO_KEY)
        assert foreign.status_code == 403


async def test_a_viewer_reads_and_changes_nothing(connect: Connect) -> None:
    rig = ConsoleRig()
    app = create_app(rig.services)
    changing = [
        (method, re.sub(r"\{[^}]*\}", "x", route.path))
        for route in app.router.routes
        if isinstance(route, APIRoute)
        for method in route.methods - {"GET", "HEAD"}
    ]
    assert len(changing) > 30
    view = {"authorization": "Bearer view"}
    async with connect(rig.services) as client:
        for method, path in changing:
            refused = await client.request(method, path, json={}, headers=view)
            assert refused.status_code == 403, (method, path, refused.text)
        for path in ("/v1/chat/completions", "/v1/generate", "/v1/responses", "/v1/messages"):
            assert (await client.post(path, json={}, headers=view)).status_code == 403
        assert (await client.get("/admin/console/requests", headers=view)).status_code == 200
        for path in ("/admin/keys", "/health/deep"):  # like an operator, a viewer may use neither
            assert (await client.get(path, headers=view)).status_code == 403, path
        assert (await signed_in(client, "view")).json()["role"] == "viewer"


async def test_metrics_that_ask_for_a_key_are_for_every_role_but_callers(connect: Connect) -> None:
    async with connect(replace(ConsoleRig().services, open_metrics=False)) as client:
        statuses = {
            key: (await client.get("/metrics", headers={"authorization": f"Bearer {key}"})).status_code
            for key in ROLES
        }
    assert statuses == {key: 403 if key == "call" else 200 for key in ROLES}


async def test_a_request_that_the_keys_role_does_not_allow_is_reported_with_the_key(connect: Connect) -> None:
    reported: list[EdgeRequest] = []
    services = replace(ConsoleRig().services, emit_edge=reported.append)
    async with connect(services) as client:
        for key in ("view", "call"):
            await client.post("/admin/drain", headers={"authorization": f"Bearer {key}"})
    named = [(one.status, one.caller and one.caller.key_id) for one in reported]
    assert named == [(403, "key_view"), (403, "key_call")]


async def test_requests_are_found_by_their_names_and_bounded(connect: Connect) -> None:
    rig = ConsoleRig()
    for number in range(KEPT + 10):
        rig.finished(number)
    rig.finished(
        7_000, tenant="umbra", key_id="key_9", status=503, error_code="queue_full", stage_ms={"admit": 1.0}
    )
    async with connect(rig.services) as client:

        async def found(**asked: Any) -> list[str]:
            answer = await client.get(
                "/admin/console/requests", params=asked, headers={"authorization": "Bearer view"}
            )
            return [one["request_id"] for one in answer.json()["requests"]]

        assert await found(limit=2) == ["req_7000", f"req_{KEPT + 9}"]
        assert (
            await found(text="umbra")
            == await found(errors="true")
            == await found(text="queue_f")
            == await found(text="key_9")
            == ["req_7000"]
        )
        assert await found(text="req_0") == []  # the oldest request was dropped
        shown = await client.get("/admin/console/requests/gen_7000", headers={"authorization": "Bearer view"})
        assert shown.json()["stage_ms"] == {"admit": 1.0}
        gone = await client.get("/admin/console/requests/req_0", headers={"authorization": "Bearer view"})
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "not_found")


def test_many_consoles_share_one_aggregate() -> None:
    rig = ConsoleRig()
    for _ in range(50):
        rig.console.live()
    assert rig.aggregates == 1
    rig.now += 2
    assert rig.console.live()["gateway"] == "gw:1" and rig.aggregates == 2


def test_requests_that_wait_for_a_backend_to_come_back_are_in_flight() -> None:
    rig = ConsoleRig()
    rig.in_flight, rig.waiting = 60, 5  # the gates have 3 of them, and 5 in queues
    [own] = rig.console.live()["fleet"]
    assert (own["in_flight"], own["waiting"]) == (55, 5)


def test_the_last_minute_is_compared_with_the_routes_targets() -> None:
    rig = ConsoleRig()
    rig.finished(1, route="chat", ttft_ms=150.0, total_ms=1_000.0)  # older than a minute: not counted
    rig.now += 61
    rig.finished(2, route="chat", ttft_ms=150.0, total_ms=1_000.0, backend_name="local", input_tokens=30)
    rig.finished(3, route="chat", ttft_ms=250.0, total_ms=1_000.0)
    rig.finished(4, route="chat", ttft_ms=150.0, total_ms=2_000.0, backend_name="local", input_tokens=10,
                   cached_tokens=10)  # fmt: skip
    rig.finished(5, route="chat", status=422, error_code="invalid_request")
    rig.finished(6, route="chat", status=503, error_code="queue_full")
    rig.finished(7, route="other")
    shown = rig.console.live()
    (chat,) = shown["targets"]
    assert (chat["route"], chat["requests"], chat["goodput"]) == ("chat", 5, round(1 / 60, 3))
    assert (chat["ttft_met"], chat["total_met"]) == (0.5, 0.5)
    assert shown["prefix_hits"] == {"local": 0.25}
    assert shown["workers"][0]["url"] == "http://w1" and shown["workers"][0]["pool"] == "pool"


@asynccontextmanager
async def announcing(*houses: ConsoleRig) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as loops:
        tasks = [loops.create_task(rig.console.run()) for rig in houses]
        yield
        for task in tasks:
            task.cancel()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - the condition moves the fake's clock
            await asyncio.sleep(0.005)


async def test_a_live_view_shows_every_gateway_of_the_store_and_which_is_gone() -> None:
    streams = MemoryStreams()
    houses = one, two = ConsoleRig("gw:1", streams), ConsoleRig("gw:2", streams)
    for rig in houses:
        rig.console.pause_s = 0.01
    two.waiting = 7

    def fleet() -> dict[str, tuple[int, bool]]:
        one.now += 2
        return {entry["gateway"]: (entry["waiting"], entry["gone"]) for entry in one.console.live()["fleet"]}

    async with announcing(one):
        async with announcing(two):
            await until(lambda: len(fleet()) == 2)
            assert fleet() == {"gw:1": (0, False), "gw:2": (7, False)}
        last_seen = one.now
        one.now += GONE_S
        assert fleet() == {"gw:1": (0, False), "gw:2": (7, True)}
        (gone,) = (entry for entry in one.console.live()["fleet"] if entry["gone"])
        assert gone["at"] <= last_seen
        async with announcing(two):
            await until(lambda: not fleet()["gw:2"][1])


async def test_nothing_is_announced_while_no_view_is_open() -> None:
    streams = MemoryStreams()
    announced: list[str] = []
    listener = MemoryStateStore(streams, unix_time=lambda: 0.0)
    listener.on_announcement(STREAM, announced.append)
    one, two = ConsoleRig("gw:1", streams), ConsoleRig("gw:2", streams)
    one.console.pause_s = two.console.pause_s = 0.01
    async with announcing(one, two):
        for _ in range(20):
            await asyncio.sleep(0)
        assert announced == [] and one.aggregates == two.aggregates == 0
        one.console.live()
        await until(lambda: len(announced) == 2)
        await asyncio.sleep(0.1)  # ten times ``pause_s``
    assert len(announced) == 2
    assert ["".join(announced).count(f'"asks":{value}') for value in ("true", "false")] == [1, 1]


async def test_what_is_no_summary_is_ignored_and_the_gateways_are_bounded() -> None:
    rig = ConsoleRig()
    other = MemoryStateStore(rig.streams, unix_time=lambda: 0.0)
    for text in ("", "[]", "{", '{"gateway": 7}', "x" * 10_000):
        await other.announce(STREAM, text)
    assert [entry["gateway"] for entry in rig.console.live()["fleet"]] == ["gw:1"]
    rig.now += 2
    for number in range(MOST_GATEWAYS + 5):
        fields = ["version", "in_flight", "waiting", "requests_per_second", "errors", "fallbacks", "refused"]
        summary: dict[str, Any] = {**dict.fromkeys(fields, 0), "version": "", "asks": False}
        await other.announce(STREAM, json.dumps({**summary, "gateway": f"other:{number}"}))
    names = {entry["gateway"] for entry in rig.console.live()["fleet"]}
    assert len(names) == MOST_GATEWAYS + 1 and "other:4" not in names and "other:5" in names


async def test_a_gateway_without_a_console_has_no_page(connect: Connect) -> None:
    async with connect(ConsoleRig(console=False).services) as client:
        assert (await client.get("/console", headers=NO_KEY)).status_code == 404
