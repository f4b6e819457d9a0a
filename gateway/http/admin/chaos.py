"""``/admin/chaos``: deliberate faults, for admins. The path exists only while ``chaos.enabled`` is true."""

from fastapi import APIRouter

from gateway.admin.chaos import FaultsBody, FaultsRequest
from gateway.http.routes import OPERATORS, AdminRoute, ExchangeDep, Json, ServicesDep

router = APIRouter(prefix="/admin/chaos", route_class=AdminRoute, **OPERATORS)


@router.get("")
async def show_faults(services: ServicesDep) -> FaultsBody:
    """The active faults, and how often each was injected."""
    assert services.chaos is not None
    return services.chaos.show()


@router.post("")
async def replace_faults(given: Json[FaultsRequest], by: ExchangeDep) -> FaultsBody:
    """Replace the active faults."""
    assert by.services.chaos is not None
    return await by.services.chaos.replace(given, who=by.who)
