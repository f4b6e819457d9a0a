"""Formats exceptions for logs: types and places in the code, without messages.

A message may contain text of a caller, so only messages of the operating system's errors are shown, scrubbed.
"""

import sys
import traceback
from collections.abc import MutableMapping
from typing import Any

from observability.redact import scrub

# Most frames of each exception (those nearest to the failure), and most exceptions of a chain or group.
MAX_FRAMES = 20
MAX_EXCEPTIONS = 8


def shown(error: BaseException) -> str:
    """The traceback of ``error`` and of its causes, the first cause first."""
    chain: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and one not in chain and len(chain) < MAX_EXCEPTIONS:
        chain.append(one)
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
    return "\n".join(_one(each, 0) for each in reversed(chain))


def _one(error: BaseException, depth: int) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-MAX_FRAMES:]
    lines = [f"  {frame.filename}:{frame.lineno} in {frame.name}" for frame in frames]
    lines.append(_name(error))
    if isinstance(error, BaseExceptionGroup) and depth < MAX_EXCEPTIONS:
        for inner in error.exceptions[:MAX_EXCEPTIONS]:
            lines += [f"    {line}" for line in _one(inner, depth + 1).splitlines()]
    return "\n".join(lines)


def _name(error: BaseException) -> str:
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(error, OSError) and error.strerror:
        return f"{name}: {scrub(error.strerror)}"
    return name


def format_errors(logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A structlog processor: ``exc_info`` becomes ``exception``. Messages of asyncio are cut after the first
    line, since a failed task's exception may follow it.
    """
    info = event.pop("exc_info", None)
    error = _error_of(info)
    if error is not None:
        event["exception"] = shown(error)
    words = event.get("event")
    if event.get("logger") == "asyncio" and isinstance(words, str):
        event["event"] = words.partition("\n")[0]
    return event


def _error_of(info: object) -> BaseException | None:
    """The exception that ``exc_info`` names: itself, as a tuple of three, or the one being handled."""
    if isinstance(info, tuple):
        info = info[1] if len(info) == 3 else None
    elif info and not isinstance(info, BaseException):
        info = sys.exc_info()[1]
    return info if isinstance(info, BaseException) else None
