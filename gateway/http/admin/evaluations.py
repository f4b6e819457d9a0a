"""``/admin/evaluations``: comparisons of backends, for operators."""

from fastapi import APIRouter

from gateway.admin.evaluations import EvaluationBody, EvaluationsBody
from gateway.http.routes import OPERATORS, Author, Json, OperatorRoute, ServicesDep

router = APIRouter(prefix="/admin/evaluations", route_class=OperatorRoute, **OPERATORS)


@router.get("")
async def show_evaluations(services: ServicesDep) -> EvaluationsBody:
    """Each backend's digest and last evaluation."""
    return services.evaluations.show()


@router.post("")
async def store_evaluation(
    given: Json[EvaluationBody], services: ServicesDep, who: Author
) -> EvaluationsBody:
    """Store a signed evaluation report."""
    return await services.evaluations.add(given, who=who)
