"""How a path is told in the OpenAPI document: what it asks for, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

REF: Final = "#/components/schemas/{model}"
KEY: Final = "key"


@dataclass(frozen=True, slots=True)
class ErrorSchema:
    """How a contract tells errors: the schema, and the status of what does not validate."""

    tag: str
    error: str
    invalid: int


NATIVE: Final = ErrorSchema("native", "ErrorBody", 422)
OPENAI: Final = ErrorSchema("openai", "OpenAIErrorBody", 400)
OPERATORS: Final = ErrorSchema("operators", "ErrorBody", 422)


def _header(name: str, description: str) -> dict[str, Any]:
    return {"name": name, "in": "header", "schema": {"type": "string"}, "description": description}


CALLERS_HEADERS: Final = [
    _header("Idempotency-Key", "Whole answers only: the same key and body give the stored answer again."),
    _header("Prefer", "sluice-no-fallback: an error instead of a fallback's answer."),
    _header("traceparent", "W3C Trace Context."),
]


def answers(status: int, schema: str) -> dict[str, Any]:
    """A JSON answer."""
    return {str(status): {"description": schema, "content": content(schema)}}


def content(schema: str) -> dict[str, Any]:
    """A JSON body."""
    return {"application/json": {"schema": {"$ref": REF.format(model=schema)}}}


def refusals(contract: ErrorSchema, *statuses: int) -> dict[str, Any]:
    """Errors, all of one shape."""
    found: dict[str, Any] = {}
    for status in statuses:
        found.update(answers(status, contract.error))
    return found


def in_path(name: str) -> dict[str, Any]:
    """A part of the path."""
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def in_query(name: str, description: str, kind: str = "string", *, required: bool = False) -> dict[str, Any]:
    """A parameter of the query."""
    told = {"name": name, "in": "query", "required": required, "schema": {"type": kind}}
    return {**told, "description": description}
