from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import httpx
import pytest

from gateway.app import create_app
from gateway.ports import Services
from gateway.testing import CALLER_KEY

Connect = Callable[[Services], AbstractAsyncContextManager[httpx.AsyncClient]]


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
