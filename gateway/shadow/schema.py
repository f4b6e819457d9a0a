"""Whether a value follows a JSON schema that a caller sent.

The schema is not ours: its patterns are not run, since one may take for ever, and nothing that it refers to
is fetched.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any


def schema_faults(asked: Any, value: Any) -> bool:
    """Whether ``value`` breaks the schema; OpenAI's ``{name, schema}`` object or the bare schema.

    A schema that is none has no faults to tell of: whoever took the request has refused it or let it pass.
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
