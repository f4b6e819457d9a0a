"""The OpenAPI entries of the endpoints that are plain ASGI apps, so that ``/docs`` shows them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode, models_json_schema

from gateway.contracts.native import NativeRequest
from gateway.contracts.native_answer import AnswerBody, ErrorBody
from gateway.contracts.openai import ChatRequest, CompletionRequest
from gateway.contracts.openai_answer import CompletionBody, OpenAIErrorBody
from gateway.contracts.tokenizing import DetokenizeBody, DetokenizeRequest, TokenizeBody, TokenizeRequest
from gateway.http.admin_adapters import AddBody, PromoteBody, RollbackBody
from gateway.http.admin_canary import CanaryBody, CanaryStartBody
from gateway.http.admin_keys import KeyBody
from gateway.http.admin_routing import (
    RouteApplyBody,
    RoutePromoteBody,
    RouteRollbackBody,
    RouteWeightBody,
)
from gateway.http.openai import ModelBody, ModelListBody

_REF: Final = "#/components/schemas/{model}"
_KEY: Final = "key"

_REQUESTS: Final = (
    NativeRequest,
    ChatRequest,
    CompletionRequest,
    TokenizeRequest,
    DetokenizeRequest,
    AddBody,
    PromoteBody,
    RollbackBody,
    CanaryBody,
    CanaryStartBody,
    RouteApplyBody,
    RoutePromoteBody,
    RouteRollbackBody,
    RouteWeightBody,
    KeyBody,
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
)


def add_paths(document: dict[str, Any]) -> dict[str, Any]:
    """``document`` with our paths, their schemas and the key's scheme added."""
    components = document.setdefault("components", {})
    components.setdefault("schemas", {}).update(_schemas())
    components.setdefault("securitySchemes", {})[_KEY] = {"type": "http", "scheme": "bearer"}
    document.setdefault("paths", {}).update(_paths())
    return document


def _schemas() -> dict[str, Any]:
    _, requests = models_json_schema([(model, "validation") for model in _REQUESTS], ref_template=_REF)
    mode: JsonSchemaMode = "serialization"
    adapters: Iterable[tuple[str, JsonSchemaMode, TypeAdapter[Any]]] = [
        (answer.__name__, mode, TypeAdapter(answer)) for answer in _ANSWERS
    ]
    _, answers = TypeAdapter.json_schemas(adapters, ref_template=_REF, schema_generator=GenerateJsonSchema)
    return {**requests["$defs"], **answers["$defs"]}


def _paths() -> dict[str, Any]:
    alive = {"200": {"description": "Alive"}}
    ready = {"200": {"description": "Ready"}, "503": {"description": "Not ready"}}
    deep = {"200": {"description": "Healthy"}, "503": {"description": "Not healthy"}}
    text = {"200": {"description": "Text format", "content": {"text/plain": {}}}}
    return {
        "/v1/generate": _post("Generate", "NativeRequest", "AnswerBody", _NATIVE, stream=True),
        "/invocations": _post("Generate (SageMaker)", "NativeRequest", "AnswerBody", _NATIVE, stream=True),
        "/v1/chat/completions": _post("Chat", "ChatRequest", "CompletionBody", _OPENAI, stream=True),
        "/v1/completions": _post("Text", "CompletionRequest", "CompletionBody", _OPENAI, stream=True),
        "/tokenize": _post("Text to token ids", "TokenizeRequest", "TokenizeBody", _OPENAI),
        "/detokenize": _post("Token ids to text", "DetokenizeRequest", "DetokenizeBody", _OPENAI),
        "/v1/models": _get("Served models", _json(200, "ModelListBody"), tag="openai", key=True),
        "/v1/models/{id}": _get(
            "One served model", _json(200, "ModelBody"), tag="openai", key=True, parameters=[_MODEL_ID]
        ),
        "/admin/prompts": _get("Registered prompt versions", _OBJECT, tag="operators", key=True),
        "/admin/prompts/{id}": _get(
            "One prompt version", _OBJECT, tag="operators", key=True, parameters=[_PROMPT_ID]
        ),
        "/admin/adapters": _get(
            "LoRA adapters: versions, aliases, loaded", _OBJECT, tag="operators", key=True
        )
        | _post("Add a version", "AddBody", None, _OPERATORS),
        "/admin/adapters/{id}": _get(
            "One version or alias", _OBJECT, tag="operators", key=True, parameters=[_ADAPTER_ID]
        ),
        "/admin/adapters/{id}/promote": _post("Promote a version", "PromoteBody", None, _OPERATORS),
        "/admin/adapters/aliases/{id}/rollback": _post(
            "Lead an alias back", "RollbackBody", None, _OPERATORS
        ),
        "/admin/keys": _get("Keys", _OBJECT, tag="operators", key=True)
        | _post("Make a key", "KeyBody", None, _OPERATORS),
        "/admin/keys/{id}": {
            "delete": _get("Revoke a key", _REVOKED, tag="operators", key=True, parameters=[_KEY_ID])["get"]
        },
        "/admin/routing": _get("The routing revision in force", _OBJECT, tag="operators", key=True)
        | {"put": _post("Apply a configuration", "RouteApplyBody", None, _OPERATORS)["post"]},
        "/admin/routing/weights": _post("Set a share", "RouteWeightBody", None, _OPERATORS),
        "/admin/routing/promote": _post("Give a route whole", "RoutePromoteBody", None, _OPERATORS),
        "/admin/routing/rollback": _post("Go back", "RouteRollbackBody", None, _OPERATORS),
        "/admin/routing/history": _get("Revisions, newest first", _OBJECT, tag="operators", key=True),
        "/admin/routing/diff": _get("What two revisions differ in", _OBJECT, tag="operators", key=True),
        "/admin/usage": _get("Sums of the ledger", _OBJECT, tag="operators", key=True),
        "/admin/usage/rows": _get("The ledger's rows, page by page", _OBJECT, tag="operators", key=True),
        "/admin/usage/reconcile": _get(
            "The ledger beside the engines' own counters", _OBJECT, tag="operators", key=True
        ),
        "/admin/shadow": _get("How shadowed requests compare", _OBJECT, tag="operators", key=True),
        "/admin/canary": _get("The canary", _OBJECT, tag="operators", key=True),
        "/admin/canary/start": _post("Start a canary", "CanaryStartBody", None, _OPERATORS),
        "/admin/canary/pause": _post("Judge nothing", "CanaryBody", None, _OPERATORS),
        "/admin/canary/resume": _post("Judge again", "CanaryBody", None, _OPERATORS),
        "/admin/canary/abort": _post("End it, as before", "CanaryBody", None, _OPERATORS),
        "/admin/audit": _get("What operators did, newest first", _OBJECT, tag="operators", key=True),
        "/admin/admission": _get("Queues, limits, last decisions", _OBJECT, tag="operators", key=True),
        "/admin/budget/preview": _post("What would be sent", "NativeRequest", None, _OPERATORS),
        "/ping": _get("Liveness", alive),
        "/ready": _get("Readiness", ready),
        "/health/deep": _get("A tiny real generation", deep, key=True),
        "/metrics": _get("Prometheus metrics", text),
    }


@dataclass(frozen=True, slots=True)
class _Contract:
    """How a contract tells errors: the schema, and the status of what does not validate."""

    tag: str
    error: str
    invalid: int


_NATIVE: Final = _Contract("native", "ErrorBody", 422)
_OPENAI: Final = _Contract("openai", "OpenAIErrorBody", 400)
_OPERATORS: Final = _Contract("operators", "ErrorBody", 422)
_OBJECT: Final[dict[str, Any]] = {
    "200": {"description": "An object", "content": {"application/json": {"schema": {"type": "object"}}}}
}
_PROMPT_ID: Final = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
_ADAPTER_ID: Final = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
_KEY_ID: Final = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
_REVOKED: Final[dict[str, Any]] = {"204": {"description": "Revoked"}}
_MODEL_ID: Final = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}


def _header(name: str, description: str) -> dict[str, Any]:
    return {"name": name, "in": "header", "schema": {"type": "string"}, "description": description}


_HEADERS: Final = [
    _header("Idempotency-Key", "Whole answers only: the same key and body give the stored answer again."),
    _header("Prefer", "sluice-no-fallback: an error instead of a fallback's answer."),
    _header("traceparent", "W3C Trace Context."),
]


def _post(
    summary: str, request: str, answer: str | None, contract: _Contract, *, stream: bool = False
) -> dict[str, Any]:
    responses = _json(200, answer) if answer else dict(_OBJECT)
    if stream:
        responses["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    for status in (400, contract.invalid, 401, 403, 404, 409, 413, 429, 503, 504):
        responses.update(_json(status, contract.error))
    return {
        "post": {
            "summary": summary,
            "tags": [contract.tag],
            "security": [{_KEY: []}],
            "parameters": _HEADERS,
            "requestBody": {"required": True, "content": _content(request)},
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
            "security": [{_KEY: []}] if key else [],
            "parameters": parameters or [],
            "responses": responses,
        }
    }


def _json(status: int, schema: str) -> dict[str, Any]:
    return {str(status): {"description": schema, "content": _content(schema)}}


def _content(schema: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(model=schema)}}}
