from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute

import gateway.app
from gateway.app import create_app
from gateway.ports import Services
from gateway.testing import CALLER_KEY

Connect = Callable[[Services], AbstractAsyncContextManager[httpx.AsyncClient]]

# FastAPI takes 0.6 s of a core to write the OpenAPI document. Most apps share their routes: it is cached.
# The routes are stored too, so that no later route gets the ``id`` of a freed one.
_described: dict[tuple[int, ...], tuple[list[BaseRoute], dict[str, Any]]] = {}


def _described_once(*, routes: list[BaseRoute], **about: Any) -> dict[str, Any]:
    same = tuple(id(route) for route in routes if isinstance(route, APIRoute))
    if same not in _described:
        _described[same] = routes, get_openapi(routes=routes, **about)
    return _described[same][1]


gateway.app.get_openapi = _described_once  # type: ignore[attr-defined, assignment]


@pytest.fixture
def connect() -> Connect:
    """A client of the app in this process, with a caller's key."""

    @asynccontextmanager
    async def connected(services: Services) -> AsyncIterator[httpx.AsyncClient]:
        transport = httpx.ASGITransport(create_app(services), raise_app_exceptions=True)
        headers = {"authorization": f"Bearer {CALLER_KEY}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://gw", headers=headers) as client:
            yield client

    return connected
