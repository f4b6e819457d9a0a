"""The OpenAPI entries of the endpoints that are plain ASGI apps, so that ``/docs`` shows them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode, models_json_schema
from starlette.routing import BaseRoute, Route

from gateway.contracts.native import NativeRequest
from gateway.contracts.native_answer import AnswerBody, ErrorBody
from gateway.contracts.openai import ChatRequest, CompletionRequest
from gateway.contracts.openai_answer import CompletionBody, OpenAIErrorBody
from gateway.contracts.tokenizing import DetokenizeBody, DetokenizeRequest, TokenizeBody, TokenizeRequest
from gateway.http.admin_adapters import (
    AddBody,
    CommentBody,
    LabelsBody,
    PromoteBody,
    ReportBody,
    RollbackBody,
)
from gateway.http.admin_canary import CanaryAbortBody, CanaryBody, CanaryStartBody
from gateway.http.admin_chaos import FaultsRequest
from gateway.http.admin_keys import KeyBody
from gateway.http.admin_routing import (
    RouteApplyBody,
    RoutePromoteBody,
    RouteRollbackBody,
    RouteWeightBody,
)
from gateway.http.openai import ModelBody, ModelListBody
from gateway.http.schema_admin import admin_paths
from gateway.http.schema_admin_answers import ANSWERS
from gateway.http.schema_parts import (
    CALLERS_HEADERS,
    KEY,
    NATIVE,
    OPENAI,
    REF,
    ErrorSchema,
    answers,
    content,
    in_path,
    refusals,
)

_REQUESTS: Final = (
    NativeRequest,
    ChatRequest,
    CompletionRequest,
    TokenizeRequest,
    DetokenizeRequest,
    AddBody,
    PromoteBody,
    RollbackBody,
    CommentBody,
    LabelsBody,
    ReportBody,
    CanaryAbortBody,
    CanaryBody,
    CanaryStartBody,
    RouteApplyBody,
    RoutePromoteBody,
    RouteRollbackBody,
    RouteWeightBody,
    KeyBody,
    FaultsRequest,
)
_ANSWERS: Final[tuple[Any, ...]] = (
    AnswerBody,
    ErrorBody,
    CompletionBody,
    OpenAIErrorBody,
    TokenizeBody,
    DetokenizeBody,
    ModelBody,
    ModelListBody,
    *ANSWERS,
)


def add_paths(document: dict[str, Any], routes: Iterable[BaseRoute]) -> dict[str, Any]:
    """``document`` with those of our paths that ``routes`` has, their schemas and the key's scheme added."""
    there = {
        (route.path_format, method.lower())
        for route in routes
        if isinstance(route, Route)
        for method in route.methods or ()
    }
    components = document.setdefault("components", {})
    components.setdefault("schemas", {}).update(_schemas())
    components.setdefault("securitySchemes", {})[KEY] = {"type": "http", "scheme": "bearer"}
    paths = document.setdefault("paths", {})
    for path, operations in _paths().items():
        found = {method: told for method, told in operations.items() if (path, method) in there}
        if found:
            paths[path] = found
    return document


def _schemas() -> dict[str, Any]:
    _, requests = models_json_schema([(model, "validation") for model in _REQUESTS], ref_template=REF)
    mode: JsonSchemaMode = "serialization"
    adapters: Iterable[tuple[str, JsonSchemaMode, TypeAdapter[Any]]] = [
        (answer.__name__, mode, TypeAdapter(answer)) for answer in _ANSWERS
    ]
    _, answered = TypeAdapter.json_schemas(adapters, ref_template=REF, schema_generator=GenerateJsonSchema)
    return {**requests["$defs"], **answered["$defs"]}


def _paths() -> dict[str, Any]:
    alive = {"200": {"description": "Alive"}}
    ready = {"200": {"description": "Ready"}, "503": {"description": "Not ready"}}
    deep = {"200": {"description": "Healthy"}, "503": {"description": "Not healthy"}}
    text = {"200": {"description": "Text format", "content": {"text/plain": {}}}}
    return {
        "/v1/generate": _post("Generate", "NativeRequest", "AnswerBody", NATIVE, stream=True),
        "/invocations": _post("Generate (SageMaker)", "NativeRequest", "AnswerBody", NATIVE, stream=True),
        "/v1/chat/completions": _post("Chat", "ChatRequest", "CompletionBody", OPENAI, stream=True),
        "/v1/completions": _post("Text", "CompletionRequest", "CompletionBody", OPENAI, stream=True),
        "/tokenize": _post("Text to token ids", "TokenizeRequest", "TokenizeBody", OPENAI),
        "/detokenize": _post("Token ids to text", "DetokenizeRequest", "DetokenizeBody", OPENAI),
        "/v1/models": _get("Served models", answers(200, "ModelListBody"), tag="openai", key=True),
        "/v1/models/{id}": _get(
            "One served model", answers(200, "ModelBody"), tag="openai", key=True, parameters=[_MODEL_ID]
        ),
        **admin_paths(),
        "/ping": _get("Liveness", alive),
        "/ready": _get("Readiness", ready),
        "/health/deep": _get("A tiny real generation", deep, key=True),
        "/metrics": _get("Prometheus metrics", text),
    }


_MODEL_ID: Final = in_path("id")


def _post(
    summary: str, request: str, answer: str, contract: ErrorSchema, *, stream: bool = False
) -> dict[str, Any]:
    responses = answers(200, answer)
    if stream:
        responses["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    responses.update(refusals(contract, 400, contract.invalid, 401, 403, 404, 409, 413, 429, 503, 504))
    return {
        "post": {
            "summary": summary,
            "tags": [contract.tag],
            "security": [{KEY: []}],
            "parameters": CALLERS_HEADERS,
            "requestBody": {"required": True, "content": content(request)},
            "responses": responses,
        }
    }


def _get(
    summary: str,
    responses: dict[str, Any],
    *,
    tag: str = "monitors",
    key: bool = False,
    parameters: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    return {
        "get": {
            "summary": summary,
            "tags": [tag],
            "security": [{KEY: []}] if key else [],
            "parameters": parameters or [],
            "responses": responses,
        }
    }
