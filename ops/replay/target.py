"""The HTTP client of the gateway under load."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from gateway.contracts.sse import EventReader
from ops.replay.contract import ReplayContract
from ops.replay.options import ReplayError
from ops.replay.outcome import ReplayedRequest
from ops.replay.shape import Planned
from ops.session import CONNECT_TIMEOUT_S, GatewaySession, client_failures, error_code, mapping_of

SHORT_CALL_TIMEOUT_S = 30.0  # calls that are not generations: /tokenize, /v1/models
# The header of requests that get errors instead of fallback answers.
NO_FALLBACK = {"prefer": "sluice-no-fallback"}
MAX_ERROR_BYTES = 65_536  # most bytes read of an error's body


@dataclass(frozen=True, slots=True)
class TokenCount:
    """The answer of ``/tokenize``."""

    count: int
    max_model_len: int | None


class ReplayTarget(GatewaySession):
    """Calls one gateway; use as ``async with``."""

    async def tokenize(self, body: Mapping[str, object]) -> TokenCount | None:
        """The token count of a prompt or of messages; ``None`` if it cannot be had. Raises ReplayError."""
        answer = await self._call("POST", "/tokenize", body)
        if answer is None:
            return None
        count, longest = answer.get("count"), answer.get("max_model_len")
        if not isinstance(count, int):
            raise ReplayError(f"{self._url}/tokenize: the answer has no count")
        return TokenCount(count, longest if isinstance(longest, int) else None)

    async def first_model(self) -> str:
        """The first id of ``/v1/models``. Raises ReplayError."""
        answer = await self._call("GET", "/v1/models", None)
        models = answer.get("data") if answer else None
        if not isinstance(models, list) or not models:
            raise ReplayError(f"{self._url}/v1/models: no model is listed; name one with --model")
        return str(models[0]["id"])

    async def generate(
        self, contract: ReplayContract, planned: Planned, text: str, started_at: float
    ) -> ReplayedRequest:
        """Send one request now and read its stream; failures, except cancellation, are in the outcome."""
        body = orjson.dumps(contract.body(text, planned.max_tokens))
        sent_at = self._clock()
        found = ReplayedRequest(
            planned.index, planned.due_s, sent_at - started_at, planned.prompt_tokens, planned.max_tokens
        )
        with client_failures(found):
            async with self.session.post(self._url + contract.path, data=body) as response:
                if response.status >= 400:
                    found.code = await _reported_code(response) or f"http_{response.status}"
                else:
                    reader = EventReader()
                    async for chunk in response.content.iter_any():
                        before = found.texts
                        for event in reader.feed(chunk):
                            if event == b"[DONE]":
                                found.ended = True
                            else:
                                contract.read(mapping_of(orjson.loads(event)), found)
                        if found.texts > before:
                            found.last_token_s = self._clock() - sent_at
                            found.ttft_s = found.last_token_s if found.ttft_s is None else found.ttft_s
        found.total_s = self._clock() - sent_at
        return found

    async def _call(self, method: str, path: str, body: Mapping[str, object] | None) -> dict[str, Any] | None:
        data = None if body is None else orjson.dumps(body)
        timeout = aiohttp.ClientTimeout(total=SHORT_CALL_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S)
        try:
            async with self.session.request(method, self._url + path, data=data, timeout=timeout) as response:
                if response.status in (400, 404, 405, 501):  # 400: Sluice, of workers without a tokenizer
                    return None
                if response.status >= 400:
                    code = await _reported_code(response) or "no code"
                    refused = response.status in (401, 403)
                    hint = "; give a key with --key or SLUICE_ADMIN_KEY" if refused else ""
                    raise ReplayError(f"{self._url}{path}: HTTP {response.status} ({code}){hint}")
                answer: object = orjson.loads(await response.read())
        except TimeoutError as error:
            raise ReplayError(f"{self._url}{path}: no answer within {SHORT_CALL_TIMEOUT_S:g} s") from error
        except orjson.JSONDecodeError as error:
            raise ReplayError(f"{self._url}{path}: the answer is not JSON; is this a gateway?") from error
        except (aiohttp.ClientError, ConnectionError, ValueError) as error:
            raise ReplayError(
                f"{self._url}: cannot be reached ({error}); is the gateway running? "
                "Start it with `make run`, or name another with --url"
            ) from error
        if not isinstance(answer, dict):
            raise ReplayError(f"{self._url}{path}: the answer is not a JSON object; is this a gateway?")
        return answer


async def _reported_code(response: aiohttp.ClientResponse) -> str | None:
    raw = await response.content.read(MAX_ERROR_BYTES)
    try:
        return error_code(orjson.loads(raw))
    except orjson.JSONDecodeError:
        return None
