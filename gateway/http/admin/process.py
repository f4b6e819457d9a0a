"""``/admin/admission``, ``/admin/drain`` and ``/admin/console``: this process, for operators."""

from typing import Annotated, Any

from fastapi import APIRouter, Query

from gateway.admin.admission import AdmissionBody
from gateway.admin.console import RequestsBody
from gateway.admin.drain import DrainBody
from gateway.errors import NotFound
from gateway.http.routes import OPERATORS, ExchangeDep, OperatorRoute, ServicesDep

router = APIRouter(prefix="/admin", route_class=OperatorRoute, **OPERATORS)


@router.get("/admission")
async def show_admission(services: ServicesDep) -> AdmissionBody:
    """This process' queues, limits and last admission decisions."""
    return services.admission.show()


@router.post("/drain")
async def drain(by: ExchangeDep) -> DrainBody:
    """Drain this process: it takes no new requests."""
    return await by.services.drain.begin(by.who)


@router.get("/console/requests")
async def requests(
    services: ServicesDep,
    text: Annotated[str | None, Query(max_length=128)] = None,
    errors: bool = False,
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
) -> RequestsBody:
    """The last requests of this process."""
    return services.console.requests(text=text or None, errors=errors, limit=limit)


@router.get("/console/requests/{id}")
async def request(id: str, services: ServicesDep) -> dict[str, Any]:
    """One of the last requests, with each stage; its texts are not stored."""
    found = services.console.request(id)
    if found is None:
        raise NotFound(f"this gateway has no record of request {id!r}", param="id")
    return dict(found)
