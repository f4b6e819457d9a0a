"""``/admin/adapters`` and ``sluice adapters``: permissions, the calls passed on, and the output."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from adapters.catalogue import CatalogueError
from adapters.changes import NotEvaluatedError
from adapters.errors import AdapterRejected, Rejection
from gateway.admin.adapters import (
    AddBody,
    CommentBody,
    PromoteBody,
    ReportBody,
    RollbackBody,
    VerifiedBody,
)
from gateway.app import create_app
from gateway.testing import ADMIN_KEY, CALLER_KEY, OPERATOR_KEY, fake_services, serving
from ops.cli.main import app

ONE: Mapping[str, object] = {
    "id": "v1",
    "state": "active",
    "aliases": ["style"],
    "evaluation": {"passed": True},
    "pinned": True,
    "resident": True,
    "leases": 2,
    "heat": 1.5,
    "rank": 8,
    "size_bytes": 1 << 20,
    "labels": {"domain": "manga"},
    "engine_id": 1,
    "base_model": "demo",
    "base_revision": None,
    "alpha": 16.0,
    "target_modules": ["q_proj"],
    "sha256": "a" * 64,
    "location": "s3://b/v1",
    "author": "key_4",
    "at": "2026-11-22T00:00:00+00:00",
}
VERIFIED: Mapping[str, Any] = {
    "id": "v1",
    "verified": True,
    "rank": 8,
    "alpha": 16.0,
    "target_modules": ["q_proj"],
    "size_bytes": 1 << 20,
    "sha256": "a" * 64,
    "base_name": None,
    "shapes_checked": True,
}
ALL: Mapping[str, object] = {
    "number": 3,
    "adapters": [ONE],
    "aliases": [{"alias": "style", "target": "v1", "canary": "v2", "percent": 25.0, "history": ["v0"]}],
    "refused": [{"id": "bad", "reason": "not_finite: NaN"}],
    "places": 8,
    "resident": ["v1"],
    "fetching": [],
}


@dataclass
class FakeAdapters:
    """Records each call in ``calls``, or raises ``error`` if it is set."""

    calls: list[tuple[Any, ...]] = field(default_factory=list)
    error: Exception | None = None

    def _done(self, *arguments: Any) -> Mapping[str, object]:
        if self.error is not None:
            raise self.error
        self.calls.append(arguments)
        return ONE

    def show_all(self) -> Mapping[str, object]:
        return ALL

    def show(self, adapter_id: str) -> Mapping[str, object]:
        return self._done("show", adapter_id)

    async def add(self, given: AddBody, *, who: str) -> Mapping[str, object]:
        return self._done("add", given, who)

    async def verify(self, adapter_id: str, *, who: str) -> VerifiedBody:
        self._done("verify", adapter_id, who)
        return VerifiedBody(**VERIFIED)

    async def preload(self, adapter_id: str, *, who: str) -> Mapping[str, object]:
        return self._done("preload", adapter_id, who)

    async def promote(self, adapter_id: str, given: PromoteBody, *, who: str) -> Mapping[str, object]:
        return self._done("promote", adapter_id, given, who)

    async def retire(self, adapter_id: str, given: CommentBody, *, who: str) -> Mapping[str, object]:
        return self._done("retire", adapter_id, given, who)

    async def pin(self, adapter_id: str, pinned: bool, *, who: str) -> Mapping[str, object]:
        return self._done("pin", adapter_id, pinned, who)

    async def evaluated(self, adapter_id: str, given: ReportBody, *, who: str) -> Mapping[str, object]:
        return self._done("evaluated", adapter_id, given, who)

    async def roll_back(self, alias: str, given: RollbackBody, *, who: str) -> Mapping[str, object]:
        return self._done("roll_back", alias, given, who)

    async def end_canary(self, alias: str, given: CommentBody, *, who: str) -> Mapping[str, object]:
        return self._done("end_canary", alias, given, who)


async def call(
    adapters: FakeAdapters, method: str, path: str, body: object = None, *, key: str = OPERATOR_KEY
) -> httpx.Response:
    transport = httpx.ASGITransport(create_app(fake_services(adapters=adapters)))
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://gw", headers=headers) as client:
        return await client.request(method, f"/admin/adapters{path}", json=body)


@pytest.mark.parametrize(("method", "path"), [("GET", ""), ("GET", "/v1"), ("POST", ""), ("POST", "/v1/pin")])
async def test_a_callers_key_may_do_none_of_it(method: str, path: str) -> None:
    adapters = FakeAdapters()
    assert (await call(adapters, method, path, {}, key=CALLER_KEY)).status_code == 403
    assert adapters.calls == []


@pytest.mark.parametrize(
    ("path", "body", "recorded"),
    [
        ("/v1/verify", {}, ("verify", "v1")),
        ("/v1/preload", None, ("preload", "v1")),
        ("/v1/pin", {}, ("pin", "v1", True)),
        ("/v1/unpin", {}, ("pin", "v1", False)),
        (
            "/v1/evaluation",
            {"report": {"passed": True}},
            ("evaluated", "v1", ReportBody(report={"passed": True})),
        ),
        (
            "/v1/promote",
            {"alias": "style", "percent": 25},
            ("promote", "v1", PromoteBody(alias="style", percent=25.0)),
        ),
        (
            "/v1/promote",
            {"alias": "style", "dry_run": True},
            ("promote", "v1", PromoteBody(alias="style", dry_run=True)),
        ),
        ("/aliases/style/rollback", {"to": "v0"}, ("roll_back", "style", RollbackBody(to="v0"))),
        ("/aliases/style/end-canary", {}, ("end_canary", "style")),
    ],
)
async def test_each_path_passes_on_what_it_was_given(
    path: str, body: object, recorded: tuple[object, ...]
) -> None:
    adapters = FakeAdapters()
    response = await call(adapters, "POST", path, body)
    assert (response.status_code, response.json()) == (200, VERIFIED if "verify" in path else ONE)
    assert adapters.calls[0][: len(recorded)] == recorded


async def test_a_new_version_is_created_with_what_is_known_of_it() -> None:
    adapters = FakeAdapters()
    body = {"id": "v1", "location": "s3://b/v1", "sha256": "a" * 64, "labels": {"x": "y"}}
    assert (await call(adapters, "POST", "", body)).status_code == 201
    assert adapters.calls == [("add", AddBody.model_validate(body), "key_4")]


class SlowAdapters(FakeAdapters):
    """Finishes a call in the loop's third turn."""

    async def promote(self, adapter_id: str, given: PromoteBody, *, who: str) -> Mapping[str, object]:
        for _ in range(3):
            await asyncio.sleep(0)
        return await super().promote(adapter_id, given, who=who)

    async def add(self, given: AddBody, *, who: str) -> Mapping[str, object]:
        await asyncio.Event().wait()
        raise AssertionError("nothing ends this wait")


@pytest.mark.parametrize(
    ("path", "body", "made"), [("/v1/promote", {}, 1), ("", {"id": "v1", "location": "s3://b/v1"}, 0)]
)
async def test_a_change_is_finished_though_its_operator_leaves_and_a_fetch_is_cancelled(
    path: str, body: object, made: int
) -> None:
    adapters = SlowAdapters()
    arrives = iter([{"type": "http.request", "body": json.dumps(body).encode()}])

    async def receive() -> Any:
        return next(arrives, {"type": "http.disconnect"})

    async def send(message: Any) -> None:
        """The operator has left."""

    scope = {
        "type": "http",
        "method": "POST",
        "path": f"/admin/adapters{path}",
        "query_string": b"",
        "headers": [(b"authorization", f"Bearer {OPERATOR_KEY}".encode())],
    }
    await create_app(fake_services(adapters=adapters)).entry(scope, receive, send)
    assert len(adapters.calls) == made


async def test_promoting_by_force_is_for_admins() -> None:
    adapters = FakeAdapters()
    assert (await call(adapters, "POST", "/v1/promote", {"force": True})).status_code == 403
    assert (await call(adapters, "POST", "/v1/promote", {"force": True}, key=ADMIN_KEY)).status_code == 200


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (AdapterRejected(Rejection.RANK_TOO_HIGH, "r is 512"), 422, "adapter_rejected"),
        (CatalogueError("the name is taken"), 409, "adapter_conflict"),
        (NotEvaluatedError("has not been run"), 409, "not_evaluated"),
    ],
)
async def test_what_is_refused_has_a_code_and_the_reason(error: Exception, status: int, code: str) -> None:
    response = await call(FakeAdapters(error=error), "POST", "/v1/promote", {})
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert response.json()["error"]["message"] == str(error)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("", {"id": "v1"}, "location"),
        ("", {"id": "v1", "location": "x", "sha256": "no"}, "sha256"),
        ("/v1/promote", {"percent": 0}, "percent"),
        ("/v1/promote", {"procent": 5}, "procent"),
    ],
)
async def test_a_wrong_field_is_named(path: str, body: object, param: str) -> None:
    response = await call(FakeAdapters(), "POST", path, body)
    assert response.status_code == 422
    assert response.json()["error"]["param"] == param


def sluice(adapters: FakeAdapters, *words: str) -> Any:
    with serving(fake_services(adapters=adapters)) as url:
        return CliRunner().invoke(app, ["adapters", *words, "--url", url, "--key", ADMIN_KEY])


def test_the_command_lists_versions_aliases_and_what_was_refused() -> None:
    shown = sluice(FakeAdapters(), "list")
    assert shown.exit_code == 0
    for word in (
        "v1",
        "active",
        "style",
        "passed",
        "v2 25%",
        "refused: bad: not_finite",
        "1 of 8 slots used",
    ):
        assert word in " ".join(shown.output.split())


def test_the_command_prints_json_when_asked() -> None:
    assert json.loads(sluice(FakeAdapters(), "list", "--json").stdout) == ALL


def test_the_command_adds_under_the_locations_last_word() -> None:
    adapters = FakeAdapters()
    added = sluice(adapters, "add", "s3://b/manga_v4/", "--label", "a=b")
    assert added.exit_code == 0
    assert "demand          1.5" in added.stdout and "heat" not in added.stdout  # the list's word
    given = adapters.calls[0][1]
    assert (given.id, given.location) == ("manga_v4", "s3://b/manga_v4/")
    assert sluice(adapters, "add", "x", "--label", "nonsense").exit_code == 1


def test_a_command_that_cannot_be_undone_asks_first_and_without_a_terminal_needs_yes() -> None:
    adapters = FakeAdapters()
    for words in (["retire", "v1"], ["rollback", "style"], ["promote", "v1", "--force"]):
        assert sluice(adapters, *words).exit_code == 2
        assert adapters.calls == []
        assert sluice(adapters, *words, "--yes").exit_code == 0
        assert adapters.calls.pop()
        adapters.calls.clear()


def test_a_refusal_is_one_line_and_exit_code_one() -> None:
    refused = sluice(FakeAdapters(error=CatalogueError("the name is taken")), "promote", "v1")
    assert refused.exit_code == 1
    assert "409 adapter_conflict: the name is taken" in refused.output
