"""The check of a value by a caller's schema ends in time, whatever the schema."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.generation.json_schema import breaks_schema

INTEGER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("schema", "value", "breaks"),
    [
        (INTEGER, {"a": 1}, False),
        (INTEGER, {"a": "1"}, True),
        (INTEGER, {}, True),
        ({"type": "string", "pattern": "^(a+)+$"}, "a" * 64 + "!", False),
        ({"patternProperties": {"^(a+)+$": {}}, "additionalProperties": False}, {"a" * 64 + "!": 1}, False),
        ({"patternProperties": {"^(a+)+$": {}}, "unevaluatedProperties": False}, {"a" * 64 + "!": 1}, False),
        ({"properties": {"a": {}}, "additionalProperties": False}, {"b": 1}, True),
        ({"type": 7}, 1, False),
        ({"type": "integer", "pattern": "a{4294967296}"}, 1, False),
        ({"$ref": "#/foo", "foo": {"minimum": "x"}}, 1, False),
        ({"$ref": "https://example.com/schema.json"}, 1, False),
        ({"$defs": {"a": {"type": "integer"}}, "$ref": "#/$defs/a"}, "x", True),
        ({"$ref": "#"}, 1, False),
    ],
    ids=["valid", "type", "missing", "pattern", "additional", "unevaluated", "other", "invalid", "repeated",
         "no schema", "remote", "reference", "endless"],
)  # fmt: skip
def test_a_value_is_checked_by_all_but_patterns(schema: Any, value: Any, breaks: bool) -> None:
    assert breaks_schema(json.dumps(schema).encode(), value) is breaks


@pytest.mark.parametrize(
    ("factor", "value", "breaks"),
    [(0.01, 19.99, False), (0.01, 0.29, False), (0.1, 3, False), (0.01, 0.005, True), (7, 14, False),
     (7, 2**60, True), (1e-300, 1e300, False), (2, True, False)],
)  # fmt: skip
def test_a_multiple_is_checked_by_the_numbers_as_they_are_written(
    factor: float, value: float, breaks: bool
) -> None:
    assert breaks_schema(json.dumps({"multipleOf": factor}).encode(), value) is breaks


def test_references_that_double_with_each_level_end() -> None:
    levels = {f"l{n}": {"allOf": [{"$ref": f"#/$defs/l{n + 1}"}] * 2} for n in range(60)}
    schema = {"$defs": {**levels, "l60": {"type": "integer"}}, "$ref": "#/$defs/l0"}
    assert breaks_schema(json.dumps(schema).encode(), 1) is False
