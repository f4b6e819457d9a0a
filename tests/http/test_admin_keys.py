"""``/admin/keys`` over HTTP, with a service that only records what it is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from gateway.admin.keys import KeyBody, KeyChangeBody
from gateway.errors import NoSuchKey
from gateway.testing import ADMIN_KEY, OPERATOR_KEY, fake_services
from ops.cli.keys import Granted
from ops.client import AdminError
from tests.http.conftest import Connect

ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}
OPERATOR = {"authorization": f"Bearer {OPERATOR_KEY}"}


SHOWN: dict[str, Any] = {
    "id": "key_1",
    "prefix": "1",
    "tenant": "acme",
    "org": None,
    "role": "caller",
    "max_priority": 0,
    "routes": None,
    "adapters": None,
    "tools": True,
    "models": None,
    "aliases": {},
    "limits": {},
    "budget": {},
    "model_limits": {"small": {"tokens_per_minute": 10, "usd_per_day": 0.5}},
    "expires_at": None,
    "expired": False,
    "comment": "",
    "created_at": "2026-11-22T00:00:00+00:00",
    "created_by": "key_3",
    "last_used_at": None,
}


LISTED = {
    **SHOWN,
    "used": {},
    "spent": {},
    "model_used": {"small": {"tokens_per_minute": 4, "usd_per_day": 0.25}},
}


@dataclass
class FakeKeyAdmin:
    """Records the keys that are ordered and revoked."""

    orders: list[tuple[KeyBody, str]] = field(default_factory=list)
    revoked: list[tuple[str, str]] = field(default_factory=list)
    changes: list[tuple[str, KeyChangeBody, str]] = field(default_factory=list)

    async def show_all(self) -> list[Mapping[str, object]]:
        return [LISTED]

    async def create(self, given: KeyBody, *, who: str) -> Mapping[str, object]:
        self.orders.append((given, who))
        return {**SHOWN, "key": "slc_1_2", "warnings": []}

    async def change(self, key_id: str, given: KeyChangeBody, *, who: str) -> Mapping[str, object]:
        self.changes.append((key_id, given, who))
        return {**LISTED, "warnings": []}

    async def revoke(self, key_id: str, *, who: str) -> None:
        if key_id != "key_1":
            raise NoSuchKey("there is no such key", param="id")
        self.revoked.append((key_id, who))


def test_the_command_names_the_limits_that_a_model_may_have() -> None:
    limits = Granted(model_limit=["small:rpm=5", "small:usd_per_day=0.5"]).body["model_limits"]
    assert limits == {"small": {"requests_per_minute": 5, "usd_per_day": 0.5}}
    for wrong in ("small:foo=1", "small:rpm=many", "rpm=5"):
        with pytest.raises(AdminError, match="limits: rpm, tpm, tpd, usd_per_day, usd_per_month"):
            _ = Granted(model_limit=[wrong]).body


async def test_a_key_is_made_listed_and_revoked(connect: Connect) -> None:
    admin = FakeKeyAdmin()
    body = {
        "tenant": "acme",
        "role": "operator",
        "max_priority": 1,
        "routes": ["chat"],
        "adapters": ["style"],
        "limits": {"requests_per_minute": 60, "tokens_per_day": 1_000_000},
        "model_limits": {"small": {"tokens_per_minute": 10, "usd_per_day": 0.5}},
        "expires_at": "2030-01-01T00:00:00Z",
        "comment": "why",
    }
    async with connect(fake_services(key_admin=admin)) as client:
        made = await client.post("/admin/keys", json=body, headers=ADMIN)
        assert made.status_code == 201
        assert made.json() == {**SHOWN, "key": "slc_1_2", "warnings": []}
        assert '"tokens_per_minute":10,' in made.text
        assert made.headers["cache-control"] == "no-store"
        [(order, who)] = admin.orders
        assert (order.tenant, order.role, order.max_priority, who) == ("acme", "operator", 1, "key_3")
        assert (order.routes, order.adapters) == (("chat",), ("style",))
        assert order.expires_at is not None and order.expires_at.timestamp() == 1_893_456_000.0
        limits = order.limits
        assert limits.requests_per_minute == 60 and limits.tokens_per_minute is None
        assert limits.tokens_per_day == 10**6
        small = order.model_limits["small"]
        assert (small.tokens_per_minute, small.usd_per_day, small.requests_per_minute) == (10, 0.5, None)
        assert (await client.get("/admin/keys", headers=ADMIN)).json() == {"keys": [LISTED]}
        gone = await client.delete("/admin/keys/key_1", headers=ADMIN)
        assert (gone.status_code, gone.content) == (204, b"") and "content-length" not in gone.headers
        assert admin.revoked == [("key_1", "key_3")]
        unknown = await client.delete("/admin/keys/key_2", headers=ADMIN)
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "unknown_key")
        wrong = await client.put("/admin/keys/key_1", headers=ADMIN)
        assert wrong.status_code == 405
        several = await client.put("/admin/keys", headers=ADMIN)
        assert several.headers["allow"] == "GET, HEAD, POST"
        assert several.json()["error"]["message"] == "PUT is not allowed here; allowed: GET, HEAD, POST"


async def test_keys_are_for_admins_alone(connect: Connect) -> None:
    admin = FakeKeyAdmin()
    async with connect(fake_services(key_admin=admin)) as client:
        for headers, status in ((OPERATOR, 403), ({}, 403), ({"authorization": ""}, 401)):
            for method, path in (("GET", ""), ("POST", ""), ("PATCH", "/key_1"), ("DELETE", "/key_1")):
                refused = await client.request(method, f"/admin/keys{path}", json={}, headers=headers)
                assert refused.status_code == status, (method, headers)
    assert not admin.orders and not admin.revoked and not admin.changes


async def test_a_change_has_the_given_fields_alone(connect: Connect) -> None:
    admin = FakeKeyAdmin()
    body = {"limits": {"tokens_per_minute": None}, "models": None}
    async with connect(fake_services(key_admin=admin)) as client:
        changed = await client.patch("/admin/keys/key_1", json=body, headers=ADMIN)
    assert (changed.status_code, changed.json()) == (200, {**LISTED, "warnings": []})
    [(key_id, given, who)] = admin.changes
    assert (key_id, given.model_dump(exclude_unset=True), who) == ("key_1", body, "key_3")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tenant": "other"}, "tenant is not a known field"),
        ({"role": "admin"}, "role is not a known field"),
        ({"limits": None}, "limits is null; allowed: an object"),
        ({"tools": None}, "tools is null; allowed: true or false"),
    ],
)
async def test_a_change_that_is_not_possible_is_refused_by_its_field(
    connect: Connect, changes: dict[str, Any], message: str
) -> None:
    admin = FakeKeyAdmin()
    async with connect(fake_services(key_admin=admin)) as client:
        refused = await client.patch("/admin/keys/key_1", json=changes, headers=ADMIN)
    assert (refused.status_code, refused.json()["error"]["message"]) == (422, message)
    assert not admin.changes


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"tenant": ""}, "tenant"),
        ({"tenant": "two words"}, "tenant"),
        ({"role": "root"}, "role"),
        ({"max_priority": 2}, "max_priority"),
        ({"max_priority": True}, "max_priority"),
        ({"routes": []}, "routes"),
        ({"adapters": "style"}, "adapters"),
        ({"limits": {"requests_per_minute": 0}}, "limits.requests_per_minute"),
        ({"limits": {"requests_per_minute": "60"}}, "limits.requests_per_minute"),
        ({"limits": {"tokens_per_day": True}}, "limits.tokens_per_day"),
        ({"limits": {"per_hour": 1}}, "limits.per_hour"),
        ({"expires_at": "tomorrow"}, "expires_at"),
        ({"expires_at": "2030-01-01T00:00:00"}, "expires_at"),
        ({"key": "mine"}, "key"),
    ],
)
async def test_a_wrong_field_of_a_key_is_named(connect: Connect, changes: dict[str, Any], param: str) -> None:
    admin = FakeKeyAdmin()
    async with connect(fake_services(key_admin=admin)) as client:
        refused = await client.post("/admin/keys", json={"tenant": "acme", **changes}, headers=ADMIN)
    assert (refused.status_code, refused.json()["error"]["param"]) == (422, param)
    assert not admin.orders


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"role": "root"},
            "role is a string of 4 characters; allowed: 'caller', 'viewer', 'front', 'operator' or 'admin'",
        ),
        ({"expires_at": "tomorrow"}, "expires_at is a string of 8 characters; allowed: an ISO 8601 time"),
        ({"limits": {"per_hour": 1}}, "limits.per_hour is not a known field"),
    ],
)
async def test_a_refusal_names_what_is_allowed(
    connect: Connect, changes: dict[str, Any], message: str
) -> None:
    async with connect(fake_services(key_admin=FakeKeyAdmin())) as client:
        refused = await client.post("/admin/keys", json={"tenant": "acme", **changes}, headers=ADMIN)
    assert refused.json()["error"]["message"].startswith(message)


async def test_a_time_may_be_in_seconds(connect: Connect) -> None:
    admin = FakeKeyAdmin()
    async with connect(fake_services(key_admin=admin)) as client:
        await client.post("/admin/keys", json={"tenant": "acme", "expires_at": 1_893_456_000}, headers=ADMIN)
    expires_at = admin.orders[0][0].expires_at
    assert expires_at is not None and expires_at.timestamp() == 1_893_456_000.0


async def test_a_key_made_with_a_tenant_alone_gets_the_defaults(connect: Connect) -> None:
    admin = FakeKeyAdmin()
    async with connect(fake_services(key_admin=admin)) as client:
        await client.post("/admin/keys", json={"tenant": "acme"}, headers=ADMIN)
    assert admin.orders[0][0] == KeyBody(tenant="acme")


async def test_the_api_document_has_the_paths_of_keys(connect: Connect) -> None:
    async with connect(fake_services(key_admin=FakeKeyAdmin())) as client:
        paths = (await client.get("/openapi.json")).json()["paths"]
    assert set(paths["/admin/keys"]) == {"get", "post"} and set(paths["/admin/keys/{id}"]) == {
        "patch",
        "delete",
    }
