"""Checks the tool calls of an answer before it ends: their arguments, and the schemas of strict tools."""

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from budgeting.values import Tool, ToolCall, ToolKind
from gateway.contracts.values import FinishReason
from gateway.generation.json_schema import breaks_schema


class CallOutcome(StrEnum):
    """The outcome of a tool call; the label of ``sluice_tool_calls_total``."""

    WHOLE = "whole"
    CUT = "cut"  # the answer was cut short inside the call
    NOT_JSON = "not_json"  # the arguments are not a JSON object
    NOT_SCHEMA = "not_schema"  # the arguments break the schema of a strict tool
    RETRIED = "retried"  # a call of the answer was faulty, and the answer was generated again
    FAILED = "failed"  # the answer ended with an error


_FAULTS = {
    CallOutcome.NOT_JSON: "are not a JSON object",
    CallOutcome.NOT_SCHEMA: "break the schema of the strict tool",
}
# The finish reasons of an answer that was not cut short.
TOOL_CALLS = FinishReason.TOOL_CALLS  # as a constant, as in ``gateway.contracts.values``
WHOLE_REASONS = frozenset({FinishReason.STOP, TOOL_CALLS})


def outcomes_of(
    calls: Sequence[ToolCall], tools: Sequence[Tool], reason: FinishReason, *, in_call: bool
) -> list[CallOutcome]:
    """Return the outcome of each call of a choice that ended with ``reason``; ``in_call``: in the last call.

    The calls before the last one are checked even if the answer was cut short.
    """
    schemas = {tool.name: tool.parameters for tool in tools if tool.strict}
    found = [_outcome(call, schemas.get(call.name)) for call in calls]
    if found and (in_call or (reason not in WHOLE_REASONS and found[-1] in _FAULTS)):
        found[-1] = CallOutcome.CUT
    return found


def fault_of(calls: Sequence[ToolCall], outcomes: Sequence[CallOutcome]) -> str | None:
    """Return the first fault as a sentence for the caller; ``None`` if there is none."""
    for number, (call, outcome) in enumerate(zip(calls, outcomes, strict=True)):
        if outcome in _FAULTS:
            return f"the arguments of tool call {number} ({call.name}) {_FAULTS[outcome]}"
    return None


def _outcome(call: ToolCall, schema: str | None) -> CallOutcome:
    if call.kind is ToolKind.CUSTOM:
        return CallOutcome.WHOLE
    try:
        value = msgspec.json.decode(call.arguments)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return CallOutcome.NOT_JSON
    if not isinstance(value, dict):
        return CallOutcome.NOT_JSON
    if schema is not None and breaks_schema(schema.encode(), value):
        return CallOutcome.NOT_SCHEMA
    return CallOutcome.WHOLE
