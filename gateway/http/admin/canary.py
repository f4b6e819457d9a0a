"""``/admin/canary`` and ``/admin/evaluations``: the canary, and comparisons of backends, for operators."""

from fastapi import APIRouter

from gateway.admin.canary import CanaryAbortBody, CanaryBody, CanaryShownBody, CanaryStartBody
from gateway.admin.evaluations import EvaluationBody, EvaluationsBody
from gateway.contracts.values import CallerRole
from gateway.http.authorize import require_role
from gateway.http.routes import OPERATORS, ExchangeDep, Json, OperatorRoute, ServicesDep

router = APIRouter(prefix="/admin", route_class=OperatorRoute, **OPERATORS)


@router.get("/canary")
async def show_canary(services: ServicesDep) -> CanaryShownBody:
    """The current or last canary."""
    return services.canary.show()


@router.post("/canary/start")
async def start_canary(given: Json[CanaryStartBody], by: ExchangeDep) -> CanaryShownBody:
    """Start a canary: shift a route's traffic to a backend, step by step."""
    if given.force:
        require_role(by, CallerRole.ADMIN)
    return await by.services.canary.start(given, who=by.who)


@router.post("/canary/pause")
async def pause_canary(given: Json[CanaryBody], by: ExchangeDep) -> CanaryShownBody:
    """Pause the canary: its share stays, and it is not judged."""
    return await by.services.canary.pause(given, who=by.who)


@router.post("/canary/resume")
async def resume_canary(given: Json[CanaryBody], by: ExchangeDep) -> CanaryShownBody:
    """Resume judging the canary."""
    return await by.services.canary.resume(given, who=by.who)


@router.post("/canary/abort")
async def abort_canary(given: Json[CanaryAbortBody], by: ExchangeDep) -> CanaryShownBody:
    """End the canary and restore the previous weights."""
    return await by.services.canary.abort(given, who=by.who)


@router.get("/evaluations")
async def show_evaluations(services: ServicesDep) -> EvaluationsBody:
    """Each backend's digest and last evaluation."""
    return services.evaluations.show()


@router.post("/evaluations")
async def store_evaluation(given: Json[EvaluationBody], by: ExchangeDep) -> EvaluationsBody:
    """Store a signed evaluation report."""
    return await by.services.evaluations.add(given, who=by.who)
