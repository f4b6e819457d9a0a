"""``/admin/console``: the last requests, for the console of operators and viewers."""

from typing import Annotated, Any

from fastapi import APIRouter, Query

from gateway.admin.console import RequestsBody
from gateway.errors import UnknownRequest
from gateway.http.routes import OPERATORS, OperatorRoute, ServicesDep

router = APIRouter(prefix="/admin/console", route_class=OperatorRoute, **OPERATORS)


@router.get("/requests")
async def requests(
    services: ServicesDep,
    text: Annotated[str | None, Query(max_length=128)] = None,
    errors: bool = False,
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
) -> RequestsBody:
    """The last requests of this process."""
    return services.console.requests(text=text or None, errors=errors, limit=limit)


@router.get("/requests/{id}")
async def request(id: str, services: ServicesDep) -> dict[str, Any]:
    """One of the last requests, with each stage; its texts are not stored."""
    found = services.console.request(id)
    if found is None:
        raise UnknownRequest(f"this gateway has no record of request {id!r}", param="id")
    return dict(found)
