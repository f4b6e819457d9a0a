"""Whether a value follows a JSON schema that a caller sent.

The schema comes from a caller: its patterns are not run, since a pattern may run without end, and no
reference is fetched.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any


def schema_faults(asked: Any, value: Any) -> bool:
    """Whether ``value`` breaks the schema; OpenAI's ``{name, schema}`` object or the bare schema.

    False for an invalid schema: the contract has accepted or rejected it before.
    """
    from jsonschema.exceptions import SchemaError
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    wrapped = isinstance(asked, dict) and isinstance(asked.get("schema"), dict) and "name" in asked
    schema = asked["schema"] if wrapped else asked
    kind = _validator()
    try:
        kind.check_schema(schema)
        return not kind(schema, registry=Registry()).is_valid(value)
    except (SchemaError, Unresolvable, RecursionError):
        return False


@cache
def _validator() -> Any:
    from jsonschema import Draft202012Validator
    from jsonschema.validators import extend

    def nothing(*_: Any) -> Iterator[Any]:
        return iter(())

    return extend(Draft202012Validator, {"pattern": nothing, "patternProperties": nothing})
