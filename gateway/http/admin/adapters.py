"""``/admin/adapters``: the LoRA registry, for operators; only admins may force a promotion."""

from fastapi import APIRouter, Response

from gateway.admin.adapters import (
    AdapterBody,
    AdapterOrAlias,
    AdaptersBody,
    AddBody,
    CommentBody,
    PromoteBody,
    ReportBody,
    RollbackBody,
    VerifiedBody,
)
from gateway.contracts.fields import Body
from gateway.contracts.values import CallerRole
from gateway.http.authorize import require_role
from gateway.http.routes import OPERATORS, CancellableRoute, ExchangeDep, Json, OperatorRoute, ServicesDep

NOTHING = Body()  # default body of changes without fields; a body with fields is refused
PREFIX = "/admin/adapters"
router = APIRouter(prefix=PREFIX, route_class=OperatorRoute, **OPERATORS)
slow = APIRouter(prefix=PREFIX, route_class=CancellableRoute, **OPERATORS)
"""What fetches, checks or loads an adapter."""


@router.get("")
async def list_adapters(services: ServicesDep) -> AdaptersBody:
    """Versions, aliases, and what this process has loaded."""
    return services.adapters.show_all()


@slow.post("", status_code=201, responses={200: {"model": AdapterOrAlias, "description": "A dry run"}})
async def add_adapter(given: Json[AddBody], response: Response, by: ExchangeDep) -> AdapterOrAlias:
    """Add a version, or only check it with ``dry_run``."""
    if given.dry_run:
        response.status_code = 200
    return await by.services.adapters.add(given, who=by.who)


@router.get("/{id}")
async def show_adapter(id: str, services: ServicesDep) -> AdapterOrAlias:
    """One version or alias."""
    return services.adapters.show(id)


@slow.post("/{id}/verify")
async def verify_adapter(id: str, by: ExchangeDep, _: Json[Body] = NOTHING) -> VerifiedBody:
    """Check a version's copy on this machine again."""
    return await by.services.adapters.verify(id, who=by.who)


@slow.post("/{id}/preload")
async def preload_adapter(id: str, by: ExchangeDep, _: Json[Body] = NOTHING) -> AdapterBody:
    """Load a version in every gateway."""
    return await by.services.adapters.preload(id, who=by.who)


@router.post("/{id}/promote")
async def promote_adapter(id: str, given: Json[PromoteBody], by: ExchangeDep) -> AdapterOrAlias:
    """Promote a version."""
    if given.force:
        require_role(by, CallerRole.ADMIN)
    return await by.services.adapters.promote(id, given, who=by.who)


@router.post("/{id}/retire")
async def retire_adapter(id: str, given: Json[CommentBody], by: ExchangeDep) -> AdapterOrAlias:
    """Stop serving a version."""
    return await by.services.adapters.retire(id, given, who=by.who)


@router.post("/{id}/pin")
async def pin_adapter(id: str, by: ExchangeDep, _: Json[Body] = NOTHING) -> AdapterOrAlias:
    """Keep a version loaded."""
    return await by.services.adapters.pin(id, True, who=by.who)


@router.post("/{id}/unpin")
async def unpin_adapter(id: str, by: ExchangeDep, _: Json[Body] = NOTHING) -> AdapterOrAlias:
    """Remove a version's pin."""
    return await by.services.adapters.pin(id, False, who=by.who)


@router.post("/{id}/evaluation")
async def report_evaluation(id: str, given: Json[ReportBody], by: ExchangeDep) -> AdapterOrAlias:
    """Store an evaluation's report with a version."""
    return await by.services.adapters.evaluated(id, given, who=by.who)


@router.post("/aliases/{id}/rollback")
async def roll_alias_back(id: str, given: Json[RollbackBody], by: ExchangeDep) -> AdapterOrAlias:
    """Point an alias to its previous version, or to a given one."""
    return await by.services.adapters.roll_back(id, given, who=by.who)


@router.post("/aliases/{id}/end-canary")
async def end_alias_canary(id: str, given: Json[CommentBody], by: ExchangeDep) -> AdapterOrAlias:
    """End an alias' canary."""
    return await by.services.adapters.end_canary(id, given, who=by.who)
