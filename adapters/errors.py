"""Errors of the adapter registry.

::

    AdapterError
    ├── RegistryFileError   the registry's file cannot be used
    └── UnknownAdapter      no adapter of that name is registered
"""

from __future__ import annotations


class AdapterError(Exception):
    """An adapter cannot be used."""


class RegistryFileError(AdapterError):
    """The registry's file is missing, malformed or contradicts itself; the message names the place."""


class UnknownAdapter(AdapterError):
    """No adapter of that name is registered."""

    def __init__(self, adapter_id: str, known: tuple[str, ...]) -> None:
        self.adapter_id = adapter_id
        self.known = known
        listed = ", ".join(known[:10]) or "none"
        super().__init__(f"adapter {adapter_id!r} is not registered; known: {listed}")
