"""``/admin/usage`` and ``/admin/shadow``: reports from the ledger's database, for operators."""

from typing import Annotated, Any

from fastapi import APIRouter, Query

from gateway.admin.usage import RowsQuery, ShadowQuery, SpanQuery, SumsQuery, UsageRowsBody, UsageSumsBody
from gateway.http.routes import OPERATORS, OperatorRoute, ServicesDep

router = APIRouter(prefix="/admin", route_class=OperatorRoute, **OPERATORS)


@router.get("/usage")
async def sum_usage(query: Annotated[SumsQuery, Query()], services: ServicesDep) -> UsageSumsBody:
    """Sums of the ledger's rows."""
    return await services.usage.report(query)


@router.get("/usage/rows")
async def list_usage(query: Annotated[RowsQuery, Query()], services: ServicesDep) -> UsageRowsBody:
    """The ledger's rows, page by page."""
    return await services.usage.rows(query)


@router.get("/usage/reconcile")
async def reconcile_usage(query: Annotated[SpanQuery, Query()], services: ServicesDep) -> UsageSumsBody:
    """A comparison of the ledger with the engines' own counters."""
    return await services.usage.reconcile(query)


@router.get("/shadow")
async def compare_shadow(query: Annotated[ShadowQuery, Query()], services: ServicesDep) -> dict[str, Any]:
    """A comparison of shadowed requests with the originals."""
    return await services.shadow.report(query)
