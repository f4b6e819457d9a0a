"""One HTTP session to a gateway, for the tools that put load on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

import aiohttp

CONNECT_TIMEOUT_S = 10.0


class GatewaySession:
    """The base of a load tool's caller; use as ``async with``.

    Args:
        url: the gateway's base address.
        key: sent as a bearer key when given.
        timeout_s: longest that one request may take, connecting included.
        clock: seconds, monotonic.
        headers: further headers of every request.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str | None,
        timeout_s: float,
        clock: Callable[[], float],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._url = url.rstrip("/")
        self._headers = {"content-type": "application/json", **(headers or {})}
        if key:
            self._headers["authorization"] = f"Bearer {key}"
        self._timeout_s = timeout_s
        self._clock = clock
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            # The load bounds the connections; a second bound here would hide waiting inside TTFT.
            connector=aiohttp.TCPConnector(limit=0),
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=CONNECT_TIMEOUT_S),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()
