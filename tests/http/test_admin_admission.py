"""``/admin/admission`` over HTTP, with a fake service."""

from __future__ import annotations

from gateway.testing import ADMIN_KEY, fake_services
from tests.http.conftest import Connect
from tests.http.fakes import FakeAdmission

ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}


async def test_admission_is_shown_to_operators_and_admins_alone(connect: Connect) -> None:
    async with connect(fake_services(admission=FakeAdmission())) as client:
        refused = await client.get("/admin/admission")
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
        assert (await client.get("/admin/admission", headers={"authorization": ""})).status_code == 401
        shown = await client.get("/admin/admission", headers=ADMIN)
    assert shown.status_code == 200
    assert set(shown.json()) == {"backends", "limits", "decisions"}


async def test_the_api_document_has_the_path_of_admission(connect: Connect) -> None:
    async with connect(fake_services(admission=FakeAdmission())) as client:
        assert "/admin/admission" in (await client.get("/openapi.json")).json()["paths"]
