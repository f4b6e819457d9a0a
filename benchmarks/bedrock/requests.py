"""Checks a request against botocore's description of the service, as Bedrock does."""

from __future__ import annotations

import functools
import itertools
import re
from typing import Any

import botocore.session
from botocore.validate import ParamValidator


@functools.cache
def _shapes() -> dict[str, Any]:
    """Return the parameters of the operations; reading the description takes a second."""
    model = botocore.session.get_session().get_service_model("bedrock-runtime")
    return {
        "converse": model.operation_model("Converse").input_shape,
        "converse-stream": model.operation_model("ConverseStream").input_shape,
    }


class RequestChecker:
    """Checks requests of the operations Converse and ConverseStream."""

    def __init__(self) -> None:
        self._shapes = _shapes()

    def faults(self, operation: str, request: dict[str, Any]) -> list[str]:
        """Return the faults: shapes, unknown or missing members, values out of range, turns out of order."""
        shape = self._shapes[operation]
        report = ParamValidator().validate(request, shape)
        found = [report.generate_report()] if report.has_errors() else []
        found += self._beyond(request, shape, "")
        stops = request.get("inferenceConfig", {}).get("stopSequences", ())
        if any(not stop.strip() for stop in stops):
            found.append("stop_sequences: each stop sequence must contain non-whitespace")
        turns = request.get("messages", [])
        roles = [turn["role"] for turn in turns]
        if roles[:1] != ["user"]:
            found.append("A conversation must start with a user message.")
        if any(one == other for one, other in itertools.pairwise(roles)) or "system" in roles:
            found.append("Roles must alternate between user and assistant.")
        for turn in turns:
            results = [
                one for block in turn["content"] for one in block.get("toolResult", {}).get("content", [])
            ]
            for block in [*turn["content"], *results]:
                if "text" in block and not block["text"].strip():
                    found.append("Text content blocks must be non-empty.")
        found += _faults_of_calls(request)
        last = turns[-1]["content"][-1].get("text", "") if roles[-1:] == ["assistant"] else ""
        if last != last.rstrip():
            found.append("Final assistant content cannot end with trailing whitespace.")
        return found

    def _beyond(self, value: Any, shape: Any, path: str) -> list[str]:
        """Check what botocore leaves to the service: upper bounds, and the values of an enumeration."""
        found: list[str] = []
        if shape.type_name == "structure" and isinstance(value, dict):
            for name, inner in value.items():
                if name in shape.members:
                    found += self._beyond(inner, shape.members[name], f"{path}.{name}")
        elif shape.type_name == "list" and isinstance(value, list):
            for number, inner in enumerate(value):
                found += self._beyond(inner, shape.member, f"{path}[{number}]")
        most = shape.metadata.get("max")
        if most is not None:
            size = value if isinstance(value, int | float) else len(value)
            if size > most:
                found.append(f"{path}: {size} is above {most}")
        pattern = shape.metadata.get("pattern")
        if pattern is not None and isinstance(value, str) and not re.fullmatch(pattern, value):
            found.append(f"{path}: {value} does not satisfy the pattern {pattern}")
        if shape.type_name == "string" and shape.enum and value not in shape.enum:
            found.append(f"{path}: not one of {shape.enum}")
        return found


def _faults_of_calls(request: dict[str, Any]) -> list[str]:
    """Return what is wrong with tool calls and their results."""
    found: list[str] = []
    turns = request.get("messages", [])
    asked: list[str] = []
    seen: set[str] = set()
    for turn in turns:
        given = [block["toolResult"]["toolUseId"] for block in turn["content"] if "toolResult" in block]
        if given != asked:
            found.append(f"toolResult blocks {given} do not match the toolUse blocks {asked} before.")
        if any("toolResult" not in block for block in turn["content"][: len(given)]):
            found.append("toolResult blocks must be the first of their turn.")
        asked = [block["toolUse"]["toolUseId"] for block in turn["content"] if "toolUse" in block]
        if turn["role"] == "user" and asked:
            found.append("The user cannot call tools.")
        if len(seen | set(asked)) < len(seen) + len(asked):
            found.append("toolUse ids must be unique.")
        seen.update(asked)
    if asked:
        found.append("A call has no result.")
    specs = [one["toolSpec"] for one in request.get("toolConfig", {}).get("tools", []) if "toolSpec" in one]
    names = [spec["name"] for spec in specs]
    if seen and not names:
        found.append("The toolConfig field must be defined when using toolUse and toolResult content blocks.")
    if len(set(names)) < len(names):
        found.append("Tool names must be unique.")
    if any(spec["inputSchema"]["json"].get("type") != "object" for spec in specs):
        found.append("The value of inputSchema.json.type must be object.")
    named = request.get("toolConfig", {}).get("toolChoice", {}).get("tool", {}).get("name")
    if named is not None and named not in names:
        found.append("toolChoice names no tool.")
    return found
