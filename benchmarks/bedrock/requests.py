"""Checks a request against botocore's own description of the service, as Bedrock itself would."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import botocore.session
from botocore.validate import ParamValidator


@functools.cache
def _shapes() -> dict[str, Any]:
    """The operations' parameters; reading the description takes a second."""
    model = botocore.session.get_session().get_service_model("bedrock-runtime")
    return {
        "converse": model.operation_model("Converse").input_shape,
        "converse-stream": model.operation_model("ConverseStream").input_shape,
    }


class RequestChecker:
    """Of the operations Converse and ConverseStream."""

    def __init__(self) -> None:
        self._shapes = _shapes()

    def faults(self, operation: str, request: dict[str, Any]) -> list[str]:
        """What is wrong: shapes, unknown or missing members, values out of range, turns out of order."""
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
            for block in turn["content"]:
                if "text" in block and not block["text"].strip():
                    found.append("Text content blocks must be non-empty.")
        if (
            roles[-1:] == ["assistant"]
            and turns[-1]["content"][-1]["text"] != turns[-1]["content"][-1]["text"].rstrip()
        ):
            found.append("Final assistant content cannot end with trailing whitespace.")
        return found

    def _beyond(self, value: Any, shape: Any, path: str) -> list[str]:
        """What botocore leaves to the service: upper bounds, and the values of an enumeration."""
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
        if shape.type_name == "string" and shape.enum and value not in shape.enum:
            found.append(f"{path}: not one of {shape.enum}")
        return found
