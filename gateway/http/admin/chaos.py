"""``/admin/chaos``: deliberate faults, for admins. The path exists only while ``chaos.enabled`` is true."""

from typing import Annotated

from fastapi import APIRouter, Depends

from gateway.admin.chaos import ChaosAdmin, FaultsBody, FaultsRequest
from gateway.http.routes import OPERATORS, AdminRoute, ExchangeDep, Json, ServicesDep

router = APIRouter(prefix="/admin/chaos", route_class=AdminRoute, **OPERATORS)


async def _chaos(services: ServicesDep) -> ChaosAdmin:
    assert services.chaos is not None
    return services.chaos


Chaos = Annotated[ChaosAdmin, Depends(_chaos)]


@router.get("")
async def show_faults(chaos: Chaos) -> FaultsBody:
    """The active faults, and how often each was injected."""
    return chaos.show()


@router.post("")
async def replace_faults(given: Json[FaultsRequest], chaos: Chaos, by: ExchangeDep) -> FaultsBody:
    """Replace the active faults."""
    return await chaos.replace(given, who=by.who)
