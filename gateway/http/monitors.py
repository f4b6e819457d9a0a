"""What watches the gateway asks: ``/ping``, ``/ready``, ``/health/deep``, ``/metrics``."""

from __future__ import annotations

import asyncio
from typing import Final

import orjson
from starlette.types import Receive, Scope

from gateway.contracts.native_answer import error_json
from gateway.contracts.values import CallerRole
from gateway.errors import BackendUnavailable
from gateway.http.disconnect_watch import run_until_gone
from gateway.http.endpoint import Endpoint, require_role
from gateway.http.exchange import Exchange, Reply
from gateway.ports import Services

PROMETHEUS: Final = b"text/plain; version=0.0.4; charset=utf-8"
"""Content type of Prometheus' text format, the version that every scraper reads."""
DEEP_TIMEOUT_S: Final = 30.0
"""Longest time of the deep check's tiny generation; slower is a finding."""


def monitors(services: Services) -> dict[str, Endpoint]:
    """The endpoints by path; all are read with GET. The deep one asks for a key, the metrics when told to."""

    async def ping(exchange: Exchange, scope: Scope, receive: Receive) -> Reply:
        return Reply(200, orjson.dumps(dict(services.health.ping())))

    async def ready(exchange: Exchange, scope: Scope, receive: Receive) -> Reply:
        is_ready, body = services.health.ready()
        return Reply(200 if is_ready else 503, orjson.dumps(dict(body)))

    async def deep(exchange: Exchange, scope: Scope, receive: Receive) -> Reply:
        require_role(services, exchange, CallerRole.ADMIN)
        try:
            async with asyncio.timeout(DEEP_TIMEOUT_S) as bound:
                healthy, body = await run_until_gone(
                    services.health.deep(), exchange, receive, services.clock
                )
        except TimeoutError:
            if not bound.expired():
                raise
            raise BackendUnavailable(f"no generation ended within {DEEP_TIMEOUT_S:g} s") from None
        return Reply(200 if healthy else 503, orjson.dumps(dict(body)))

    async def metrics(exchange: Exchange, scope: Scope, receive: Receive) -> Reply:
        if not services.open_metrics:
            require_role(services, exchange, CallerRole.OPERATOR)
        return Reply(200, services.metrics(), PROMETHEUS)

    handlers = {"/ping": ping, "/ready": ready, "/health/deep": deep, "/metrics": metrics}
    return {path: Endpoint(handler, error_json) for path, handler in handlers.items()}
