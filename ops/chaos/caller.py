"""Sends requests to the gateway over HTTP, as any caller does."""

from collections.abc import Callable
from typing import Any

import aiohttp
import orjson

from gateway.contracts.sse import EventReader
from ops.chaos.workload import ChaosRequest, ObservedAnswer
from ops.session import BAD_ANSWER, CONNECT_TIMEOUT_S, GatewaySession, client_failures, error_code

PATH = "/v1/generate"
# Engine states that `/ready` reports while the engine restarts.
RESTARTING = frozenset({"restarting", "starting"})
SHORT_CALL = aiohttp.ClientTimeout(total=CONNECT_TIMEOUT_S)


class ChaosCaller(GatewaySession):
    """A caller of one gateway; ``clock`` counts from the load's start."""

    async def ask(
        self,
        question: ChaosRequest,
        max_tokens: int,
        deadline_ms: int | None,
        on_piece: Callable[[], object] = bool,
    ) -> ObservedAnswer:
        """Send a request and receive its answer; failures, except cancellation, are part of the result.

        ``on_piece`` is called for each piece of a streamed answer.
        """
        observed = ObservedAnswer(question, self._clock())
        body = orjson.dumps(question.body(max_tokens, deadline_ms))
        with client_failures(observed):
            async with self.session.post(self._url + PATH, data=body) as response:
                if response.content_type == "text/event-stream":
                    await self._stream(response, observed, on_piece)
                else:
                    self._whole(orjson.loads(await response.read()), observed)
        observed.ended_s = self._clock()
        return observed

    async def unready(self) -> frozenset[str]:
        """The failing checks of ``/ready``; empty if the gateway is ready, ``no answer`` without an answer.

        While the engine restarts, ``engine`` is included, even if other backends keep the gateway ready.
        """
        try:
            async with self.session.get(self._url + "/ready", timeout=SHORT_CALL) as response:
                reported = orjson.loads(await response.read())
        except (aiohttp.ClientError, TimeoutError, OSError, orjson.JSONDecodeError):
            return frozenset({"no answer"})
        failing = frozenset(name for name, good in reported.get("checks", {}).items() if not good)
        if (reported.get("engine") or {}).get("state") in RESTARTING:
            failing |= {"engine"}
        return failing if reported.get("ready") else failing or frozenset({"not ready"})

    def _whole(self, answer: Any, observed: ObservedAnswer) -> None:
        if not isinstance(answer, dict):
            observed.code = BAD_ANSWER
            return
        observed.ended = True
        if "error" in answer:
            observed.code = error_code(answer) or "error"
            return
        observed.first_s = self._clock()
        observed.pieces.append(str(answer.get("output_text", "")))
        observed.answer = answer

    async def _stream(
        self, response: aiohttp.ClientResponse, observed: ObservedAnswer, on_piece: Callable[[], object]
    ) -> None:
        reader, last_s = EventReader(), observed.sent_s
        async for chunk in response.content.iter_any():
            now_s = self._clock()
            observed.longest_pause_s = max(observed.longest_pause_s, now_s - last_s)
            last_s = now_s
            for raw in reader.feed(chunk):
                event = orjson.loads(raw)
                match event.get("type"):
                    case "token":
                        observed.first_s = now_s if observed.first_s is None else observed.first_s
                        observed.pieces.append(event["delta"])
                        on_piece()
                    case "done":
                        observed.answer, observed.ended = event, True
                    case "error":
                        observed.code, observed.ended = error_code(event) or "error", True
                        observed.partial = bool(event.get("partial"))
