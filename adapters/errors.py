"""Errors of the adapter registry.

::

    AdapterError
    ├── RegistryFileError   the registry's file cannot be used
    ├── UnknownAdapter      no adapter of that name is served
    ├── AdapterForbidden    the caller's key is limited to others
    ├── AdapterNotHere      its files could not be brought onto this machine
    ├── AdapterRejected     it did not pass the checks (``adapters.rejection``)
    └── CatalogueError      the registry's rules forbid the change (``adapters.catalogue``)
        └── NotEvaluatedError  no passing evaluation, and no force (``adapters.changes``)
"""

from __future__ import annotations


class AdapterError(Exception):
    """An adapter cannot be used."""


class RegistryFileError(AdapterError):
    """The registry's file is missing, malformed or contradicts itself; the message names the place."""


class UnknownAdapter(AdapterError):
    """No adapter of that name is served; ``why`` tells of one that is registered all the same."""

    def __init__(self, adapter_id: str, known: tuple[str, ...], *, why: str | None = None) -> None:
        self.adapter_id = adapter_id
        self.known = known
        listed = ", ".join(known[:10]) or "none"
        super().__init__(f"adapter {adapter_id!r} {why or 'is not registered'}; known: {listed}")


class AdapterForbidden(AdapterError):
    """The caller's key may use other adapters only."""

    def __init__(self, adapter_id: str, allowed: tuple[str, ...]) -> None:
        listed = ", ".join(allowed[:10]) or "none"
        super().__init__(f"the key may not use adapter {adapter_id!r}; allowed: {listed}")


class AdapterNotHere(AdapterError):
    """Its files could not be brought onto this machine; the message says what to do."""
