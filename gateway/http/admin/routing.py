"""``/admin/routing`` and ``/admin/audit``: routing revisions, and the actions of operators; for operators."""

from typing import Annotated

from fastapi import APIRouter, Query
from typing_extensions import TypedDict

from gateway.admin import routing
from gateway.http.routes import OPERATORS, ExchangeDep, FromJson, Json, OperatorRoute, ServicesDep
from gateway.routing.change import ConfigChange
from gateway.state.port import MAX_RECORD_BYTES

# A configuration that the state store takes may have any number of routes.
Configuration = Annotated[routing.RouteApplyBody, FromJson(uncounted_bytes=MAX_RECORD_BYTES)]
router = APIRouter(prefix="/admin", route_class=OperatorRoute, **OPERATORS)
Limit = Annotated[int, Query(ge=1, le=1_000, description="How many.")]
Revision = Annotated[int, Query(ge=1, le=10**9, description="A revision's number.")]


class RevisionsBody(TypedDict):
    """Routing revisions, newest first."""

    revisions: list[routing.RevisionBody]


class ChangesBody(TypedDict):
    """The differences of two revisions."""

    changes: list[ConfigChange]


class AuditBody(TypedDict):
    """Entries of the audit log, newest first; with ``after``, oldest first."""

    entries: list[routing.AuditEntry]


@router.get("/routing")
async def show_routing(services: ServicesDep) -> routing.RevisionInForceBody:
    """The current routing revision."""
    return services.routing.show()


@router.put("/routing")
async def apply_routing(given: Configuration, by: ExchangeDep) -> routing.RevisionMadeBody:
    """Apply a configuration."""
    return await by.services.routing.apply(given, who=by.who)


@router.post("/routing/weights")
async def set_weight(given: Json[routing.RouteWeightBody], by: ExchangeDep) -> routing.RevisionMadeBody:
    """Set a backend's share of a route."""
    return await by.services.routing.set_weight(given, who=by.who)


@router.post("/routing/promote")
async def promote_backend(given: Json[routing.RoutePromoteBody], by: ExchangeDep) -> routing.RevisionMadeBody:
    """Give a backend all of a route's traffic."""
    return await by.services.routing.promote(given, who=by.who)


@router.post("/routing/rollback")
async def roll_routing_back(
    given: Json[routing.RouteRollbackBody], by: ExchangeDep
) -> routing.RevisionMadeBody:
    """Apply an earlier revision's configuration as a new revision."""
    return await by.services.routing.roll_back(given, who=by.who)


@router.get("/routing/history")
async def list_revisions(services: ServicesDep, limit: Limit = 50) -> RevisionsBody:
    """Revisions, newest first."""
    return {"revisions": await services.routing.history(limit)}


@router.get("/routing/diff")
async def compare_revisions(a: Revision, b: Revision, services: ServicesDep) -> ChangesBody:
    """The differences of two revisions."""
    return {"changes": await services.routing.diff(a, b)}


@router.get("/audit")
async def list_audit(
    services: ServicesDep,
    limit: Limit = 50,
    after: Annotated[int | None, Query(ge=0, le=10**9, description="Those after this number.")] = None,
) -> AuditBody:
    """The operators' actions, newest first; each record contains the hash of the previous one."""
    return {"entries": await services.routing.audit(limit, after)}
