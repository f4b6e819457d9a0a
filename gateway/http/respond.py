"""HTTP answers for errors, in the format of the path's contract, and helpers for whole answers."""

import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import orjson
from starlette.responses import Response

from gateway.contracts import native_answer, openai_answer
from gateway.contracts.dialect import Header
from gateway.contracts.messages.answer import messages_error_json
from gateway.errors import LEAF_ERRORS, DuplicateRequest, GatewayError, PublicError, public_error
from gateway.http.exchange import Exchange, Reply

ErrorShape = Callable[[PublicError, str], tuple[int, bytes]]

CALLER_ERRORS: Final[tuple[type[Exception], ...]] = (GatewayError, *LEAF_ERRORS)
"""Errors that callers see; any other is a defect, logged and answered as ``internal``."""

_OPENAI_PATHS: Final = ("/v1/", "/v2/", "/tokenize", "/detokenize")
_NATIVE_PATHS: Final = ("/v1/generate",)
_FRAMES_LOGGED: Final = 6
# The longest Retry-After that OpenAI's Python client obeys, in seconds. Anthropic's and the Node clients
# sleep for any time, such as until the end of a day, unless ``x-should-retry`` is false.
_LONGEST_RETRY_S: Final = 120

_log = logging.getLogger("gateway.http")


def shape_of(exchange: Exchange, path: str) -> ErrorShape:
    """The error format of the path's contract; OpenAI's also on unknown paths below ``/v1``."""
    if exchange.is_anthropic:
        return messages_error_json
    if path.startswith(_OPENAI_PATHS) and not path.startswith(_NATIVE_PATHS):
        return openai_answer.error_json
    return native_answer.error_json


def error_reply(error: PublicError, request_id: str, shape: ErrorShape) -> Reply:
    status, body = shape(error, request_id)
    headers: list[Header] = []
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % error.retry_after_s))
    if _is_final(error):
        headers.append((b"x-should-retry", b"false"))
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return Reply(status, body, headers=tuple(headers), keep=False)


def _is_final(error: PublicError) -> bool:
    """Whether a repeated request would be in vain, although clients repeat it because of its status."""
    if error.status == 409:
        return error.code != DuplicateRequest.code
    # A 429 without a time asks for more than is ever allowed.
    is_too_much = error.status == 429 and error.retry_after_ms is None
    return is_too_much or (error.retry_after_s or 0) > _LONGEST_RETRY_S


def response_of(reply: Reply) -> Response:
    headers = {name.decode(): value.decode() for name, value in reply.headers}
    return Response(reply.body, reply.status, headers, media_type=reply.content_type.decode())


def json_of(body: object) -> Response:
    """A 200 response with a JSON body, which FastAPI neither validates nor copies."""
    return Response(orjson.dumps(body), media_type="application/json")


def page_of(found: Sequence[Mapping[str, Any]], limit: int) -> Response:
    """OpenAI's page of objects: the first ``limit`` of those found; more mean that a page follows."""
    page = found[:limit]
    return json_of(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(found) > limit,
        }
    )


async def refuse(exchange: Exchange, error: Exception, path: str) -> None:
    """Answer with ``error``; an error that is none of :data:`CALLER_ERRORS` is logged and not shown."""
    if not isinstance(error, CALLER_ERRORS):
        log_defect(error, exchange.request_id)
    exchange.error = public = public_error(error)
    await exchange.reply(error_reply(public, exchange.request_id, shape_of(exchange, path)))


def log_defect(error: BaseException, request_id: str) -> None:
    """Log the type and place of an unexpected error, but not its message: it may contain a caller's text."""
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES_LOGGED:]
    place = " < ".join(f"{frame.name} ({frame.filename}:{frame.lineno})" for frame in reversed(frames))
    _log.error("unexpected %s in request %s at %s", type(error).__name__, request_id, place or "no frame")
