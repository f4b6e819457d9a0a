"""``/admin/canary``: the canary, for operators."""

from fastapi import APIRouter, Request

from gateway.admin.canary import CanaryAbortBody, CanaryBody, CanaryShownBody, CanaryStartBody
from gateway.contracts.values import CallerRole
from gateway.http.authorize import require_role
from gateway.http.exchange import Exchange
from gateway.http.routes import OPERATORS, Author, Json, OperatorRoute, ServicesDep

router = APIRouter(prefix="/admin/canary", route_class=OperatorRoute, **OPERATORS)


@router.get("")
async def show_canary(services: ServicesDep) -> CanaryShownBody:
    """The current or last canary."""
    return services.canary.show()


@router.post("/start")
async def start_canary(
    given: Json[CanaryStartBody], request: Request, services: ServicesDep, who: Author
) -> CanaryShownBody:
    """Start a canary: shift a route's traffic to a backend, step by step."""
    if given.force:
        require_role(services, Exchange.of(request.scope), CallerRole.ADMIN)
    return await services.canary.start(given, who=who)


@router.post("/pause")
async def pause_canary(given: Json[CanaryBody], services: ServicesDep, who: Author) -> CanaryShownBody:
    """Pause the canary: its share stays, and it is not judged."""
    return await services.canary.pause(given, who=who)


@router.post("/resume")
async def resume_canary(given: Json[CanaryBody], services: ServicesDep, who: Author) -> CanaryShownBody:
    """Resume judging the canary."""
    return await services.canary.resume(given, who=who)


@router.post("/abort")
async def abort_canary(given: Json[CanaryAbortBody], services: ServicesDep, who: Author) -> CanaryShownBody:
    """End the canary and restore the previous weights."""
    return await services.canary.abort(given, who=who)
