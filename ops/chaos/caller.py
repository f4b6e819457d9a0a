"""Asks the gateway over HTTP as any caller would."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import aiohttp
import orjson

from gateway.contracts.sse import EventReader, EventTooLarge
from ops.chaos.heard import Heard
from ops.chaos.workload import ChaosRequest

PATH = "/v1/generate"
CONNECT_TIMEOUT_S = 10.0
# What `/ready` calls an engine that is lost and being started again.
AWAY = frozenset({"restarting", "starting"})
# Codes of what no gateway told.
TIMEOUT, CONNECT, CUT_OFF, BAD_ANSWER = (
    "client_timeout",
    "client_connect",
    "client_cut_off",
    "client_bad_answer",
)


class ChaosCaller:
    """One gateway's caller; use as ``async with``.

    Args:
        url: the gateway.
        key: sent as a bearer key when given.
        timeout_s: longest that one request may take.
        clock: seconds since the load began.
        on_piece: called with each piece of a stream, at once.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str | None,
        timeout_s: float,
        clock: Callable[[], float],
        on_piece: Callable[[], None],
    ) -> None:
        self._url = url.rstrip("/")
        self._headers = {
            "content-type": "application/json",
            **({"authorization": f"Bearer {key}"} if key else {}),
        }
        self._timeout_s = timeout_s
        self._clock = clock
        self._on_piece = on_piece
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            # The scenario bounds the requests.
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

    async def ask(self, question: ChaosRequest, max_tokens: int, deadline_ms: int | None) -> Heard:
        """Ask, and hear to the end; every failure but cancellation is in what was heard."""
        assert self._session is not None, "a ChaosCaller is used inside `async with`"
        heard = Heard(question, self._clock())
        body = orjson.dumps(question.body(max_tokens, deadline_ms))
        try:
            async with self._session.post(self._url + PATH, data=body) as response:
                heard.status = response.status
                if response.content_type == "text/event-stream":
                    await self._stream(response, heard)
                else:
                    self._whole(orjson.loads(await response.read()), heard)
        except TimeoutError:
            heard.code = TIMEOUT
        except (EventTooLarge, orjson.JSONDecodeError):
            heard.code = BAD_ANSWER
        except aiohttp.ClientConnectorError:
            heard.code = CONNECT
        except (aiohttp.ClientError, ConnectionError):
            heard.code = CUT_OFF
        if not heard.ended and heard.code is None:
            heard.code = CUT_OFF
        heard.ended_s = self._clock()
        return heard

    async def call(self, path: str, body: object = None) -> Any:
        """An operator's path, as JSON or text. Raises aiohttp.ClientError, TimeoutError, OSError."""
        assert self._session is not None, "a ChaosCaller is used inside `async with`"
        method = "GET" if body is None else "POST"
        data = None if body is None else orjson.dumps(body)
        async with (
            asyncio.timeout(CONNECT_TIMEOUT_S),
            self._session.request(method, self._url + path, data=data) as response,
        ):
            response.raise_for_status()
            raw = await response.read()
            return orjson.loads(raw) if response.content_type == "application/json" else raw.decode()

    async def unready(self) -> frozenset[str]:
        """The checks of ``/ready`` that fail; empty when it is ready, ``no answer`` when it says nothing.

        ``engine`` is one of them while the engine restarts, though other backends may keep the gateway ready.
        """
        assert self._session is not None, "a ChaosCaller is used inside `async with`"
        try:
            async with (
                asyncio.timeout(CONNECT_TIMEOUT_S),
                self._session.get(self._url + "/ready") as response,
            ):
                reported = orjson.loads(await response.read())
        except (aiohttp.ClientError, TimeoutError, OSError, orjson.JSONDecodeError):
            return frozenset({"no answer"})
        failing = frozenset(name for name, good in reported.get("checks", {}).items() if not good)
        if (reported.get("engine") or {}).get("state") in AWAY:
            failing |= {"engine"}
        return failing if reported.get("ready") else failing or frozenset({"not ready"})

    def _whole(self, answer: Any, heard: Heard) -> None:
        if not isinstance(answer, dict):
            heard.code = BAD_ANSWER
            return
        heard.ended = True
        if "error" in answer:
            heard.code = _code(answer)
            return
        heard.first_s = self._clock()
        heard.pieces.append(str(answer.get("output_text", "")))
        heard.answer = answer

    async def _stream(self, response: aiohttp.ClientResponse, heard: Heard) -> None:
        reader, last_s = EventReader(), heard.sent_s
        async for chunk in response.content.iter_any():
            now_s = self._clock()
            heard.longest_pause_s = max(heard.longest_pause_s, now_s - last_s)
            last_s = now_s
            for raw in reader.feed(chunk):
                event = orjson.loads(raw)
                match event.get("type"):
                    case "token":
                        heard.first_s = now_s if heard.first_s is None else heard.first_s
                        heard.pieces.append(event["delta"])
                        self._on_piece()
                    case "done":
                        heard.answer, heard.ended = event, True
                    case "error":
                        heard.code, heard.ended = _code(event), True
                        heard.partial = bool(event.get("partial"))


def _code(answer: Mapping[str, Any]) -> str:
    error = answer.get("error")
    return str(error.get("code", "error")) if isinstance(error, Mapping) else "error"
