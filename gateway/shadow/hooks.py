"""Functions that a configuration names: ``package.module:function``."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any


class HookError(Exception):
    """A name is of no function; the message has the name and the reason."""


def load_hook(name: str, *, built_in: str) -> Callable[..., Any]:
    """The function of that name, imported.

    Args:
        name: ``package.module:function``.
        built_in: the other names that are allowed, for the message.

    Raises:
        HookError: there is none.
    """
    if ":" not in name:
        raise HookError(f"given {name!r}; allowed: {built_in}, or package.module:function")
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise HookError(f"{name!r} cannot be imported ({type(error).__name__}: {error})") from None
    if not callable(found):
        raise HookError(f"{name!r} is no function")
    hook: Callable[..., Any] = found
    return hook
