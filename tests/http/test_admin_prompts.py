"""``/admin/prompts`` and ``/admin/budget/preview`` over HTTP, with fake services."""

from __future__ import annotations

import httpx
import pytest

from gateway.contracts.values import Caller, CallerRole
from gateway.testing import ADMIN_KEY, CALLER_KEY, FakeJourney, FakeKeys, fake_services
from tests.http.conftest import Connect
from tests.http.fakes import FakePrompts

ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}
NATIVE = {"messages": [{"role": "user", "content": "hi"}]}
CHAT = {"openai": {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}}


class OperatorKeys(FakeKeys):
    """Every key is an operator's."""

    def authenticate(self, bearer: str | None) -> Caller:
        return Caller("ops", CallerRole.OPERATOR, "key_4")


@pytest.mark.parametrize("path", ["/admin/prompts", "/admin/prompts/v1"])
async def test_prompts_are_shown_to_operators_and_admins_alone(connect: Connect, path: str) -> None:
    async with connect(fake_services(prompts=FakePrompts())) as client:
        refused = await client.get(path)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
        assert (await client.get(path, headers={"authorization": ""})).status_code == 401
        assert (await client.get(path, headers=ADMIN)).status_code == 200
    async with connect(fake_services(keys=OperatorKeys(), prompts=FakePrompts())) as client:
        assert (await client.get(path)).status_code == 200


async def test_prompts_are_listed_and_shown(connect: Connect) -> None:
    async with connect(fake_services(prompts=FakePrompts())) as client:
        listed = (await client.get("/admin/prompts", headers=ADMIN)).json()
        assert [one["id"] for one in listed["prompts"]] == ["v1"]
        assert (await client.get("/admin/prompts/v1", headers=ADMIN)).json()["system"] == "Hi."


async def test_a_prompt_version_that_is_not_there_is_404(connect: Connect) -> None:
    async with connect(fake_services(prompts=FakePrompts())) as client:
        missing = await client.get("/admin/prompts/v2", headers=ADMIN)
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "unknown_prompt_version")


async def test_a_preview_takes_either_contracts_body_and_generates_nothing(connect: Connect) -> None:
    journey = FakeJourney()
    async with connect(fake_services(journey, prompts=FakePrompts())) as client:
        native = await client.post("/admin/budget/preview", json=NATIVE, headers=ADMIN)
        chat = await client.post("/admin/budget/preview", json=CHAT, headers=ADMIN)
    for answer, contract in ((native, "native"), (chat, "chat")):
        shown = answer.json()
        assert shown["route"] == contract and [one["content"] for one in shown["messages"]] == ["hi"]
    assert journey.requests == []


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"{", 400, None),
        (b"{}", 422, "messages"),
        (b"[]", 422, None),
        (b'{"openai": null}', 422, None),
        (b'{"openai": {"model": "demo"}}', 422, "messages"),
        (b'{"openai": {}, "messages": []}', 422, "openai"),
    ],
)
async def test_what_the_contract_would_refuse_a_preview_refuses(
    connect: Connect, body: bytes, status: int, param: str | None
) -> None:
    async with connect(fake_services(prompts=FakePrompts())) as client:
        answer = await client.post("/admin/budget/preview", content=body, headers=ADMIN)
    assert answer.status_code == status
    if param is not None:
        assert answer.json()["error"]["param"] == param


async def test_callers_may_not_preview(connect: Connect) -> None:
    async with connect(fake_services(prompts=FakePrompts())) as client:
        headers = {"authorization": f"Bearer {CALLER_KEY}"}
        answer: httpx.Response = await client.post("/admin/budget/preview", json=NATIVE, headers=headers)
    assert answer.status_code == 403


async def test_the_paths_are_documented(connect: Connect) -> None:
    async with connect(fake_services(prompts=FakePrompts())) as client:
        paths = (await client.get("/openapi.json")).json()["paths"]
    assert {"/admin/prompts", "/admin/prompts/{id}", "/admin/budget/preview"} <= set(paths)
