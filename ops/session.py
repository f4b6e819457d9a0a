"""An HTTP session with a gateway, for the tools that generate load."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Protocol, Self

import aiohttp
import orjson

from gateway.contracts.sse import EventTooLarge

CONNECT_TIMEOUT_S = 10.0
# Codes of failures that the gateway did not report; all other codes are the gateway's.
TIMEOUT, CONNECT, CUT_OFF = "client_timeout", "client_connect", "client_cut_off"
BAD_ANSWER = "client_bad_answer"


class Call(Protocol):
    """The outcome of a call: its error code if there is one, and whether the answer's end was received."""

    code: str | None
    ended: bool


@contextmanager
def client_failures(call: Call) -> Iterator[None]:
    """Set the code of a call that fails or is cut off; cancellation is not caught."""
    try:
        yield
    except TimeoutError:
        call.code = TIMEOUT
    except (EventTooLarge, orjson.JSONDecodeError):
        call.code = BAD_ANSWER
    except aiohttp.ClientConnectorError:
        call.code = CONNECT
    except (aiohttp.ClientError, ConnectionError):
        call.code = CUT_OFF
    if not call.ended and call.code is None:
        call.code = CUT_OFF


def error_code(body: object) -> str | None:
    """The stable code of an error in either API contract; ``None`` if there is none."""
    error = mapping_of(mapping_of(body).get("error"))
    code = error.get("sluice_code") or error.get("code")
    return code if isinstance(code, str) and code else None


def mapping_of(value: object) -> Mapping[str, Any]:
    """The value if it is a JSON object, otherwise an empty mapping."""
    return value if isinstance(value, Mapping) else {}


class GatewaySession:
    """The base of a load tool's caller; made in a coroutine, and used as ``async with``.

    ``timeout_s`` is the longest time of one request, connecting included; ``headers`` are added to every
    request.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str | None,
        timeout_s: float,
        clock: Callable[[], float],
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._url = url.rstrip("/")
        self._clock = clock
        authorization = {"authorization": f"Bearer {key}"} if key else {}
        self.session = aiohttp.ClientSession(
            # The load bounds the connections; a second bound here would add hidden waits to TTFT.
            connector=aiohttp.TCPConnector(limit=0),
            headers={"content-type": "application/json", **headers, **authorization},
            timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()
