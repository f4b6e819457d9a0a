"""``/admin/admission`` and ``/admin/drain``: this process, for operators."""

from fastapi import APIRouter

from gateway.admin.admission import AdmissionBody
from gateway.admin.drain import DrainBody
from gateway.http.routes import OPERATORS, Author, OperatorRoute, ServicesDep

router = APIRouter(prefix="/admin", route_class=OperatorRoute, **OPERATORS)


@router.get("/admission")
async def show_admission(services: ServicesDep) -> AdmissionBody:
    """This process' queues, limits and last admission decisions."""
    return services.admission.show()


@router.post("/drain")
async def drain(services: ServicesDep, who: Author) -> DrainBody:
    """Drain this process: it takes no new requests."""
    return await services.drain.begin(who)
