"""``/admin/keys``: callers' and operators' keys, for admins."""

from fastapi import APIRouter, Response
from typing_extensions import TypedDict

from gateway.admin.keys import KeyBody, KeyChangeBody, KeyChangedBody, KeyListed, KeyMadeBody
from gateway.http.routes import OPERATORS, AdminRoute, ExchangeDep, Json, ServicesDep

router = APIRouter(prefix="/admin/keys", route_class=AdminRoute, **OPERATORS)


class KeysBody(TypedDict):
    """All keys that are not revoked, oldest first."""

    keys: list[KeyListed]


@router.get("")
async def list_keys(services: ServicesDep) -> KeysBody:
    """All keys that are not revoked, with what each has used."""
    return {"keys": await services.key_admin.show_all()}


@router.post("", status_code=201)
async def make_key(given: Json[KeyBody], by: ExchangeDep) -> KeyMadeBody:
    """Make a key."""
    return await by.services.key_admin.create(given, who=by.who)


@router.patch("/{id}")
async def change_key(id: str, given: Json[KeyChangeBody], by: ExchangeDep) -> KeyChangedBody:
    """Change a key's rights and limits; its tenant, its role and its secret stay."""
    return await by.services.key_admin.change(id, given, who=by.who)


@router.delete("/{id}", status_code=204)
async def revoke_key(id: str, by: ExchangeDep) -> Response:
    """Revoke a key."""
    await by.services.key_admin.revoke(id, who=by.who)
    return Response(status_code=204)
