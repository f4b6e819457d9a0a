"""Rules that types cannot express: for conversations and for free JSON (``context``, schemas)."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final, cast

from msgspec.structs import replace

from budgeting.values import Message, Role
from gateway.contracts.fields import SEED_MAX, SEED_MIN
from gateway.contracts.refusals import Path, given, not_allowed, path_of, walk
from gateway.errors import InvalidRequest


def check_count(count: int, limit: int, field: str = "messages") -> None:
    """Refuse a conversation without messages, or with more than ``limit``."""
    if not 1 <= count <= limit:
        raise not_allowed(field, f"has {count} items", f"1 to {limit}")


def prompts_of(given: str | Sequence[object], field: str) -> Sequence[str | tuple[int, ...]]:
    """The texts or lists of token ids of ``Prompts``. Raises InvalidRequest: one is empty."""
    listed = not isinstance(given, str) and bool(given) and not isinstance(given[0], int)
    prompts = cast("list[str | list[int]]", given if listed else [given])
    if not all(prompts):
        empty = list(map(bool, prompts)).index(False)
        raise not_allowed(f"{field}.{empty}" if listed else field, "is empty", "a text or token ids")
    return [one if isinstance(one, str) else tuple(one) for one in prompts]


def with_latest_turn(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Instructions behind the last turn are the user's: at the front they would lose their place."""
    turns = len(messages)
    while turns and messages[turns - 1].role is Role.SYSTEM:
        turns -= 1
    if turns in (0, len(messages)):
        return messages
    return messages[:turns] + tuple([replace(one, role=Role.USER) for one in messages[turns:]])


def check_latest(messages: Sequence[Message], *, continued: bool = False) -> None:
    """Refuse a conversation whose last message is neither a tool's result nor a user's text or image.

    Earlier messages may be empty: callers send histories that contain an empty answer. With ``continued`` the
    last message must be the assistant's text, which the answer continues.
    """
    last, at = messages[-1], f"messages.{len(messages) - 1}"
    if continued:
        if last.role is not Role.ASSISTANT or not last.content.strip():
            raise not_allowed(
                "continue_final_message", "is true", "with text of 'assistant' in the last message"
            )
    elif last.role is not Role.TOOL:
        if last.role is not Role.USER:
            shown = f"is '{last.role.value}'"
            raise not_allowed(f"{at}.role", shown, "'user' or 'tool' in the last message")
        if not last.content.strip() and not last.parts:
            raise not_allowed(f"{at}.content", "is blank", "text in the last message")


MAX_DEPTH: Final = 32
"""Deepest nesting of a free JSON value; far above any schema in use, far below any stack."""


def check_plain(value: object, field: str) -> None:
    """Refuse what cannot be written as plain JSON text, or has too many values. Raises InvalidRequest."""
    for _ in plain_values(value, field):
        pass


def plain_values(value: object, field: str) -> Iterator[tuple[Path, int | str, Any]]:
    """The values within one, as :func:`walk` gives them, checked as by :func:`check_plain`."""
    for around, key, item in walk(value, field):
        if (isinstance(key, str) and "\x00" in key) or (isinstance(item, str) and "\x00" in item):
            name = path_of((*around, key))
            message = f"{name} contains a null character (U+0000); allowed: text without it"
            raise InvalidRequest(message, param=name)
        if isinstance(item, int):
            if not SEED_MIN <= item <= SEED_MAX:
                raise not_allowed(path_of((*around, key)), f"is {given(item)}", "an integer of 64 bits")
        elif isinstance(item, float):
            if not math.isfinite(item):
                raise not_allowed(path_of((*around, key)), f"is {given(item)}", "a finite number")
        elif len(around) >= MAX_DEPTH and isinstance(item, list | dict):
            raise not_allowed(field, f"is nested deeper than {MAX_DEPTH} levels", f"{MAX_DEPTH} or fewer")
        yield around, key, item
