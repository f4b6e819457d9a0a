"""The OpenAPI document of the gateway as it is wired: every path, what it asks for, what it answers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from starlette.routing import Route

from gateway.app import create_app
from gateway.config.settings import load_settings
from gateway.http.routes import CallerRoute, CreationRoute, DirectRoute
from gateway.http.surfaces import for_callers
from gateway.testing import CALLER_KEY, fake_services
from gateway.wiring.build import build

ROOT = Path(__file__).parents[2]
KEY = "a-key-for-tests-0123456789abcdef0123456789abcdef"
# The pages about the paths are not in the document.
FRAMEWORK = {"/openapi.json", "/docs"}
# Paths whose POST reads no body.
BODILESS = ("/admin/drain",)


@pytest.fixture
def services(tmp_path: Path) -> Any:
    (tmp_path / "sluice.json").write_text(
        json.dumps(
            {
                "engine": {"kind": "none", "model": str(ROOT / "models/demo"), "max_model_len": 4096},
                "backends": {
                    "local": {"kind": "openai", "base_urls": ["http://127.0.0.1:9/v1"], "model": "base"}
                },
                "routing": {"file": str(ROOT / "routing.yaml")},
                "prompts": {"folder": str(ROOT / "prompts")},
                "chaos": {"enabled": True},
                "state": {"url": f"sqlite:///{tmp_path}/state.db"},
                "ledger": {"url": f"sqlite+aiosqlite:///{tmp_path}/ledger.db"},
            }
        )
    )
    return build(load_settings(tmp_path / "sluice.json", {}), admin_key=KEY)


def routes_of(app: Any) -> set[tuple[str, str]]:
    return {
        (route.path_format, method)
        for route in app.routes
        if isinstance(route, Route) and route.path not in FRAMEWORK and not route.path.startswith("/console")
        for method in (route.methods or set()) - {"HEAD"}
    }


def documented_routes(document: Any) -> set[tuple[str, str]]:
    return {(path, method.upper()) for path, found in document["paths"].items() for method in found}


async def test_the_document_has_every_path_and_method_that_there_is_and_no_other(services: Any) -> None:
    whole = create_app(services.services)
    document = whole.openapi()
    assert documented_routes(document) == routes_of(whole)
    assert {"/admin/chaos", "/admin/adapters", "/admin/canary", "/admin/drain"} <= set(document["paths"])
    callers = create_app(services.services, shown=for_callers)
    assert documented_routes(callers.openapi()) == routes_of(callers)
    assert not any(path.startswith("/admin") for path in callers.openapi()["paths"])


async def test_each_operators_path_tells_the_shape_of_what_it_asks_for_and_answers(services: Any) -> None:
    document = create_app(services.services).openapi()
    for path, operations in document["paths"].items():
        for method, operation in operations.items() if path.startswith("/admin") else ():
            asks = method in ("post", "put", "patch") and not path.endswith(BODILESS)
            assert ("requestBody" in operation) == asks, path
            good = [one for one in operation["responses"] if one.startswith("2")]
            assert good, path
            for status in good:
                assert status == "204" or "application/json" in operation["responses"][status]["content"], (
                    path
                )
            named = {one["name"] for one in operation.get("parameters", ()) if one["in"] == "path"}
            assert named == ({"id"} if "{id}" in path else set()), path
    text = json.dumps(document)
    used = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert used <= set(document["components"]["schemas"])


def checked(document: Any, method: str, path: str, answer: httpx.Response) -> Any:
    """The answer's JSON, checked against the document at ``path``, such as ``/admin/keys/{id}``."""
    responses = document["paths"][path][method]["responses"]
    assert str(answer.status_code) in responses, (path, answer.status_code, answer.text)
    schema = responses[str(answer.status_code)]["content"]["application/json"]["schema"]
    jsonschema.validate(answer.json(), {**schema, "components": document["components"]})
    return answer.json()


async def test_what_the_operators_paths_answer_has_the_shape_that_is_told(services: Any) -> None:
    app = create_app(services.services)
    document = app.openapi()
    headers = {"authorization": f"Bearer {KEY}"}
    async with (
        services.running(),
        httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app), base_url="http://gateway", headers=headers, timeout=60
        ) as client,
    ):

        async def asked(method: str, path: str, body: Any = None, at: str = "") -> Any:
            answer = await client.request(method, at or path, json=body)
            return checked(document, method.lower(), path.split("?")[0], answer)

        for path in ("prompts", "adapters", "keys", "routing", "audit", "canary", "admission", "chaos"):
            await asked("GET", f"/admin/{path}")
        config = (await asked("GET", "/admin/routing"))["config"]
        route = next(iter(config["routes"]))
        await asked("PUT", "/admin/routing", {"config": config, "comment": "again"})
        await asked("PUT", "/admin/routing", {"config": config, "dry_run": True})
        await asked("GET", "/admin/routing/history")
        await asked("GET", "/admin/routing/diff", at="/admin/routing/diff?a=1&b=2")
        await asked("POST", "/admin/routing/weights", {"route": route, "backend": "mars", "percent": 5})
        await asked("POST", "/admin/canary/start", {"route": route, "backend": "mars"})
        made = await asked("POST", "/admin/keys", {"tenant": "acme", "limits": {"requests_per_minute": 5}})
        assert made["key"] and (await asked("GET", "/admin/keys"))["keys"][0]["id"] == made["id"]
        prompt = (await asked("GET", "/admin/prompts"))["prompts"][0]["id"]
        await asked("GET", "/admin/prompts/{id}", at=f"/admin/prompts/{prompt}")
        await asked("GET", "/admin/adapters/{id}", at="/admin/adapters/nobody")
        for path in ("usage", "usage/rows", "usage/reconcile"):
            await asked("GET", f"/admin/{path}")
        await asked("POST", "/admin/chaos", {"faults": [{"backend": "local", "kind": "slow"}]})
        body = {"messages": [{"role": "user", "content": "hi"}]}
        await asked("POST", "/admin/budget/preview", body)
        assert (await asked("POST", "/admin/drain"))["draining"]
        await asyncio.sleep(0)


async def test_the_errors_of_models_have_the_shape_that_is_told_in_each_contract() -> None:
    app = create_app(fake_services())
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        for headers in ({}, {"anthropic-version": "2023-06-01"}):
            refused = await client.get("/v1/models", headers=headers)
            checked(app.openapi(), "get", "/v1/models", refused)


def test_a_form_is_told_with_its_file_and_its_required_field() -> None:
    document = create_app(fake_services()).openapi()
    for path, field in (
        ("files", "purpose"),
        ("audio/transcriptions", "model"),
        ("audio/translations", "model"),
    ):
        asked = document["paths"][f"/v1/{path}"]["post"]["requestBody"]
        assert asked["content"]["multipart/form-data"]["schema"]["required"] == ["file", field]


async def test_an_operators_path_refuses_a_parameter_that_its_document_does_not_name(services: Any) -> None:
    app = create_app(services.services)
    headers = {"authorization": f"Bearer {KEY}"}
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=headers) as client:
        for path, operations in app.openapi()["paths"].items():
            for method, told in operations.items() if path.startswith("/admin") else ():
                known = [one["name"] for one in told.get("parameters", ()) if one["in"] == "query"]
                unknown = await client.request(method, f"{path}?limt=5&key%0A=secret")
                assert unknown.status_code == 422, (method, path)
                found = unknown.json()["error"]
                assert found["param"] == "limt", (method, path)
                told_allowed = found["message"].removeprefix("limt is not a known field; allowed: ")
                assert set(told_allowed.split(", ")) == set(known or ["none"]), (method, path)
                for name in known:
                    twice = await client.request(method, f"{path}?{name}=1&{name}=2")
                    assert twice.json()["error"]["message"] == f"{name} is repeated; allowed: once"


async def test_a_callers_path_refuses_a_parameter_that_its_document_does_not_name() -> None:
    app = create_app(fake_services())
    headers = {"authorization": f"Bearer {CALLER_KEY}"}
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=headers) as client:
        for route in app.routes:
            if isinstance(route, DirectRoute) or not isinstance(route, CallerRoute | CreationRoute):
                continue
            [method] = route.methods
            told = app.openapi()["paths"][route.path_format][method.lower()]
            known = [one["name"] for one in told.get("parameters", ()) if one["in"] == "query"]
            for query, error in (
                (
                    "limt=5",
                    f"limt is not a known field; allowed: {', '.join([*known, 'beta', 'api-version'])}",
                ),
                ("beta=true&beta=true", "beta is repeated; allowed: once"),
            ):
                refused = await client.request(method, f"{route.path_format}?{query}")
                assert (refused.status_code, refused.json()["error"]["message"]) == (400, error), route.path
                assert refused.json()["error"]["param"] == query.partition("=")[0]
            # What the clients of Anthropic's beta and of Azure add is known everywhere.
            added = await client.request(method, f"{route.path_format}?beta=true&api-version=2025-04-01")
            assert "known field" not in added.text, route.path


@pytest.mark.slow
async def test_other_requests_do_not_wait_while_the_document_is_written() -> None:
    app, turns = create_app(fake_services()), 0
    app.add_api_route("/of/this/test", lambda: None)  # no other app has the same document
    transport = httpx.ASGITransport(app)
    async with (
        httpx.AsyncClient(transport=transport, base_url="http://gw") as client,
        asyncio.TaskGroup() as tasks,
    ):
        asked = tasks.create_task(client.get("/openapi.json"))
        while not asked.done():
            turns += 1
            await asyncio.sleep(0.001)
    assert turns > 5, "the event loop had no turns meanwhile"
    assert asked.result().status_code == 200
