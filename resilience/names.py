"""Exceptions by their names: libraries that must not be imported here are known by what they raise."""

from __future__ import annotations


def names_of(error: BaseException) -> tuple[str, ...]:
    """``<package>.<class>`` of the error's class and of each of its ancestors, the class first.

    The package is the first part of the module: where in a library a class lives changes, its name does not.
    """
    return tuple(f"{cls.__module__.partition('.')[0]}.{cls.__name__}" for cls in type(error).__mro__)
