"""The paths that monitors read: ``/ping``, ``/health``, ``/ready``, ``/health/deep``, ``/metrics``."""

import asyncio
from collections.abc import Mapping
from typing import Any, Final

from fastapi import APIRouter, Request, Response

from gateway.contracts.values import CallerRole
from gateway.errors import BackendUnavailable
from gateway.http.authorize import require_role
from gateway.http.exchange import Exchange
from gateway.http.routes import KEY, AdminRoute, ServicesDep, errors

PROMETHEUS: Final = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of Prometheus' text format, the version that every scraper reads."""
DEEP_TIMEOUT_S: Final = 30.0
"""Longest time of the deep check's tiny generation; a slower one counts as not healthy."""

router = APIRouter(tags=["monitors"])
deep_router = APIRouter(tags=["monitors"], route_class=AdminRoute, dependencies=[KEY])


@router.get("/", summary="Liveness, as Anthropic's clients probe it")
@router.get("/api/hello", summary="Liveness, as Claude Code warms its connection up")
@router.get("/ping")
@router.get("/health", summary="Liveness, by the name that vLLM's clients know")
async def ping(services: ServicesDep) -> dict[str, Any]:
    """Liveness."""
    return dict(services.health.ping())


@router.get("/ready", responses={503: {"description": "Not ready"}})
async def ready(response: Response, services: ServicesDep) -> dict[str, Any]:
    """Readiness."""
    return _shown(response, *services.health.ready())


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request, services: ServicesDep) -> Response:
    """Prometheus metrics; the configuration may require a key of any role but caller."""
    if not services.open_metrics:
        require_role(Exchange.of(request.scope), CallerRole.VIEWER, CallerRole.OPERATOR, CallerRole.FRONT)
    return Response(services.metrics(), media_type=PROMETHEUS)


@deep_router.get("/health/deep", responses={**errors(401, 403), 503: {"description": "Not healthy"}})
async def deep(response: Response, services: ServicesDep) -> dict[str, Any]:
    """Check health with a tiny real generation."""
    try:
        async with asyncio.timeout(DEEP_TIMEOUT_S) as bound:
            healthy, body = await services.health.deep()
    except TimeoutError:
        if not bound.expired():
            raise
        raise BackendUnavailable(f"no generation ended within {DEEP_TIMEOUT_S:g} s") from None
    return _shown(response, healthy, body)


def _shown(response: Response, good: bool, body: Mapping[str, object]) -> dict[str, Any]:
    response.status_code = 200 if good else 503
    if not good:
        response.headers["retry-after"] = "1"
    return dict(body)
