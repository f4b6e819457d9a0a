"""Functions that a configuration names: ``package.module:function``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


class HookError(Exception):
    """A name leads to no function; the message says which name and why."""


def load_hook(name: str, *, built_in: str) -> Callable[..., Any]:
    """The function of that name, imported.

    Args:
        name: ``package.module:function``.
        built_in: what else would have been allowed, for the message.

    Raises:
        HookError: there is none.
    """
    module, _, function = name.partition(":")
    if not module or not function:
        raise HookError(f"given {name!r}; allowed: {built_in}, or package.module:function")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise HookError(f"{name!r} cannot be imported ({type(error).__name__}: {error})") from None
    if not callable(found):
        raise HookError(f"{name!r} is no function")
    checked: Callable[..., Any] = found
    return checked
