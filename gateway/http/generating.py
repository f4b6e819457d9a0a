"""The paths that generate, as plain ASGI apps; docs/decisions/015 explains why."""

from typing import Final

from starlette.types import ASGIApp

from gateway.contracts.dialect import ContractDialect
from gateway.contracts.messages.answer import MessageBody, MessagesErrorBody
from gateway.contracts.messages.body import MessagesRequest
from gateway.contracts.messages.stream import MessagesDialect
from gateway.contracts.native import NativeRequest
from gateway.contracts.native_answer import AnswerBody, NativeDialect
from gateway.contracts.openai import ChatRequest, CompletionRequest
from gateway.contracts.openai_answer import CompletionBody, OpenAIErrorBody
from gateway.contracts.openai_stream import OpenAIDialect
from gateway.contracts.responses.answer import ResponseBody
from gateway.contracts.responses.body import CompactBody, ResponsesBody
from gateway.contracts.responses.compact import CompactedBody
from gateway.http.generate import GenerationEndpoint
from gateway.http.idempotency import Idempotency
from gateway.http.responses import COMPACT, CompactEndpoint, ResponsesEndpoint
from gateway.http.responses import PATH as RESPONSES
from gateway.http.routes import RawRoute, errors
from gateway.ports import Services

_NATIVE: Final = (
    "native",
    NativeRequest,
    AnswerBody,
    errors(400, 401, 403, 404, 409, 413, 422, 429, 503, 504),
)
_REFUSED: Final = errors(400, 401, 403, 404, 409, 413, 429, 503, 504, model=OpenAIErrorBody)

_REFUSED_MESSAGES: Final = errors(400, 401, 403, 404, 409, 413, 429, 504, model=MessagesErrorBody)

ROUTES: Final = (
    RawRoute("/v1/generate", "Generate", *_NATIVE),
    RawRoute("/invocations", "Generate (SageMaker)", *_NATIVE),
    RawRoute("/v1/chat/completions", "Chat", "openai", ChatRequest, CompletionBody, _REFUSED),
    RawRoute("/v1/completions", "Text", "openai", CompletionRequest, CompletionBody, _REFUSED),
    RawRoute("/v1/messages", "Messages", "anthropic", MessagesRequest, MessageBody, _REFUSED_MESSAGES),
    RawRoute(RESPONSES, "Response", "openai", ResponsesBody, ResponseBody, _REFUSED),
    RawRoute(COMPACT, "Compact", "openai", CompactBody, CompactedBody, _REFUSED),
)


def dialects_of(services: Services) -> dict[str, ContractDialect]:
    """The dialect of each path whose requests are self-contained; Responses has its own endpoint."""
    return {
        "/v1/generate": NativeDialect(),
        "/invocations": NativeDialect(),
        "/v1/chat/completions": OpenAIDialect(chat=True, reasoning_fields=services.reasoning_fields),
        "/v1/completions": OpenAIDialect(chat=False),
        "/v1/messages": MessagesDialect(),
    }


def generating(services: Services, idempotency: Idempotency) -> dict[str, ASGIApp]:
    """The app of each path that generates; SageMaker posts every request to ``/invocations``."""
    endpoints = {
        path: GenerationEndpoint(services, dialect, idempotency)
        for path, dialect in dialects_of(services).items()
    }
    return {
        **endpoints,
        RESPONSES: ResponsesEndpoint(services, idempotency),
        COMPACT: CompactEndpoint(services, idempotency),
    }
