"""Free JSON inside a request (``context``, schemas): bounded, finite, and text that is text."""

import math
from collections.abc import Mapping
from typing import Any, Final

import orjson

from gateway.contracts.fields import SEED_MAX, SEED_MIN
from gateway.contracts.refusals import given, path_of
from gateway.errors import InvalidRequest

MAX_DEPTH: Final = 32
"""Deepest nesting of a free JSON value; far above any schema in use, far below any stack."""


def check_plain(value: Mapping[str, Any], field: str) -> None:
    """Refuse what cannot be written out again as plain JSON text.

    Raises:
        InvalidRequest: a null character, a number that is not finite or beyond 64 bits, or too deep.
    """
    pending: list[tuple[tuple[int | str, ...], Any]] = [((field,), value)]
    while pending:
        path, item = pending.pop()
        if isinstance(item, str):
            _check_text(item, path)
        elif isinstance(item, float):
            if not math.isfinite(item):
                raise _refused(path, item, "a finite number")
        elif isinstance(item, int):
            if not SEED_MIN <= item <= SEED_MAX:
                raise _refused(path, item, "an integer of 64 bits")
        elif isinstance(item, list | dict):
            if len(path) > MAX_DEPTH:
                raise InvalidRequest(
                    f"{field} is nested deeper than {MAX_DEPTH} levels; allowed: {MAX_DEPTH} or fewer",
                    param=field,
                )
            pairs = enumerate(item) if isinstance(item, list) else item.items()
            for key, inner in pairs:
                if isinstance(key, str):
                    _check_text(key, (*path, key))
                pending.append(((*path, key), inner))


def json_text(value: Any) -> str:
    """Compact JSON text of a value that :func:`check_plain` has passed."""
    return orjson.dumps(value).decode()


def _check_text(text: str, path: tuple[int | str, ...]) -> None:
    if "\x00" in text:
        name = path_of(path)
        message = f"{name} contains a null character (U+0000); allowed: text without it"
        raise InvalidRequest(message, param=name)


def _refused(path: tuple[int | str, ...], value: object, allowed: str) -> InvalidRequest:
    name = path_of(path)
    return InvalidRequest(f"{name} is {given(value)}; allowed: {allowed}", param=name)
