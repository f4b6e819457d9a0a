"""``/admin/keys``: callers' and operators' keys, for admins."""

from fastapi import APIRouter, Response
from typing_extensions import TypedDict

from accounting.keys import KeyLimits
from gateway.admin.keys import KeyBody, KeyMadeBody, KeyShown
from gateway.http.routes import OPERATORS, AdminRoute, Author, Edge, Json
from gateway.keys.ceilings import NANOUSD
from gateway.keys.rate_limits import budget_of
from gateway.ports import Services

router = APIRouter(prefix="/admin/keys", route_class=AdminRoute, **OPERATORS)


class KeyListed(KeyShown):
    """A key, and how much of its limits and its budget is used now."""

    used: dict[str, int]
    spent: dict[str, float]


class KeysBody(TypedDict):
    """Those that are not revoked, oldest first."""

    keys: list[KeyListed]


@router.get("")
async def list_keys(services: Edge) -> KeysBody:
    """Keys."""
    return {"keys": [await _with_use(services, key) for key in services.key_admin.show_all()]}


@router.post("", status_code=201)
async def make_key(given: Json[KeyBody], services: Edge, who: Author) -> KeyMadeBody:
    """Make a key."""
    return await services.key_admin.create(given, who=who)


@router.delete("/{id}", status_code=204)
async def revoke_key(id: str, services: Edge, who: Author) -> Response:
    """Revoke a key."""
    await services.key_admin.revoke(id, who=who)
    return Response(status_code=204)


async def _with_use(services: Services, key: KeyShown) -> KeyListed:
    """One query of the store for each limited key: 100 of them are some 30 ms."""
    used = await services.limiter.used(key["id"], KeyLimits(**key["limits"]))
    budget = budget_of(key["budget"].get("usd_per_day"), key["budget"].get("usd_per_month"))
    spent = await services.limiter.spent(key["id"], budget)
    return {**key, "used": used, "spent": {name: one / NANOUSD for name, one in spent.items()}}
