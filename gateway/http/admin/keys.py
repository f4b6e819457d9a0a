"""``/admin/keys``: callers' and operators' keys, for admins."""

from collections.abc import Mapping

from fastapi import APIRouter, Response
from typing_extensions import TypedDict

from gateway.admin.keys import KeyBody, KeyMadeBody, KeyShown, limits_of
from gateway.http.routes import OPERATORS, AdminRoute, ExchangeDep, Json, ServicesDep
from gateway.keys.ceilings import NANOUSD
from gateway.keys.rate_limits import budget_of
from gateway.ports import Services

router = APIRouter(prefix="/admin/keys", route_class=AdminRoute, **OPERATORS)


class KeyListed(KeyShown):
    """A key, and the used part of its limits, its budget and its limits per model."""

    used: dict[str, int]
    spent: dict[str, float]
    model_used: dict[str, dict[str, float]]


class KeysBody(TypedDict):
    """All keys that are not revoked, oldest first."""

    keys: list[KeyListed]


@router.get("")
async def list_keys(services: ServicesDep) -> KeysBody:
    """All keys that are not revoked, with what each has used."""
    return {"keys": [await _with_use(services, key) for key in services.key_admin.show_all()]}


@router.post("", status_code=201)
async def make_key(given: Json[KeyBody], by: ExchangeDep) -> KeyMadeBody:
    """Make a key."""
    return await by.services.key_admin.create(given, who=by.who)


@router.delete("/{id}", status_code=204)
async def revoke_key(id: str, by: ExchangeDep) -> Response:
    """Revoke a key."""
    await by.services.key_admin.revoke(id, who=by.who)
    return Response(status_code=204)


async def _with_use(services: Services, key: KeyShown) -> KeyListed:
    """The key with its use. Each limited key costs a query of the store: 100 keys take about 30 ms."""
    used, spent = await _use(services, key["id"], {**key["limits"], **key["budget"]})
    by_model: dict[str, dict[str, float]] = {}
    for model, limits in key["model_limits"].items():
        of_limits, of_budget = await _use(services, key["id"], limits, model)
        by_model[model] = {**of_limits, **of_budget}
    return {**key, "used": used, "spent": spent, "model_used": by_model}


async def _use(
    services: Services, key_id: str, limits: Mapping[str, float], model: str | None = None
) -> tuple[dict[str, int], dict[str, float]]:
    used = await services.limiter.used(key_id, limits_of(limits), model)
    budget = budget_of(limits.get("usd_per_day"), limits.get("usd_per_month"))
    spent = await services.limiter.spent(key_id, budget, model)
    return used, {name: one / NANOUSD for name, one in spent.items()}
