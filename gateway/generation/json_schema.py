"""Checks a value against a caller's JSON schema."""

from collections.abc import Iterator
from contextvars import ContextVar
from fractions import Fraction
from functools import cache, lru_cache
from typing import Any, Final

import msgspec

# The most references of one check. Nested ones can double with each level, and callers write the schemas.
MAX_REFERENCES: Final = 10_000
_KEPT: Final = 64  # the most cached validators: the same tools are sent with each turn

_followed: ContextVar[list[int]] = ContextVar("_followed")


class _TooManyReferences(Exception):
    """The check follows more references than MAX_REFERENCES."""


def breaks_schema(schema: bytes, value: Any) -> bool:
    """Whether ``value`` breaks the caller's schema, given as JSON.

    Patterns are not run, because a pattern may run forever; so unevaluated properties are not checked, nor
    additional ones beside ``patternProperties``. No reference is fetched. False for an invalid schema, and
    for one that takes too long to check: the contract has accepted or refused it before.
    """
    validator = _validator(schema)
    if validator is None:
        return False
    token = _followed.set([0])
    try:
        return not validator.is_valid(value)
    except Exception:  # of many kinds: a reference may lead to what is no schema
        return False
    finally:
        _followed.reset(token)


@lru_cache(_KEPT)
def _validator(schema: bytes) -> Any:
    from referencing import Registry

    kind, decoded = _kind(), msgspec.json.decode(schema)
    try:
        kind.check_schema(decoded)
    except Exception:  # also OverflowError, of a pattern with a large number
        return None
    return kind(decoded, registry=Registry())


@cache
def _kind() -> Any:
    from jsonschema import Draft202012Validator, ValidationError
    from jsonschema.validators import extend

    def nothing(*_: Any) -> Iterator[Any]:
        return iter(())

    standard = Draft202012Validator.VALIDATORS

    def additional(validator: Any, rule: Any, value: object, schema: Any) -> Iterator[ValidationError]:
        if "patternProperties" not in schema:
            yield from standard["additionalProperties"](validator, rule, value, schema) or ()

    def multiple(validator: Any, factor: float, value: object, _: Any) -> Iterator[ValidationError]:
        # By the numbers as they are written: as binary fractions 19.99 is no multiple of 0.01.
        if validator.is_type(value, "number") and Fraction(repr(value)) % Fraction(repr(factor)):
            yield ValidationError("")

    def counted(follow: Any) -> Any:
        def counting(*arguments: Any) -> Iterator[Any]:
            count = _followed.get()
            count[0] += 1
            if count[0] > MAX_REFERENCES:
                raise _TooManyReferences
            return follow(*arguments) or iter(())

        return counting

    own = {name: counted(standard[name]) for name in ("$ref", "$dynamicRef")}
    own |= dict.fromkeys(("pattern", "patternProperties", "unevaluatedProperties"), nothing)
    return extend(Draft202012Validator, {**own, "multipleOf": multiple, "additionalProperties": additional})
