"""The registered adapters: looked up by name or alias, leased for the time of a request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType

from adapters.errors import UnknownAdapter
from adapters.registry_file import read_registry_file
from adapters.selection import choose
from adapters.values import Adapter, Selection


@dataclass(frozen=True, slots=True)
class Lease:
    """An adapter in use by one request; ``None`` is the base model.

    ``rule`` tells what decided: ``explicit``, ``rule[0]``…, ``none``.
    """

    adapter: Adapter | None
    rule: str


class AdapterRegistry:
    """The adapters that requests may use.

    A lease keeps an adapter counted as in use, so that what retires or evicts adapters can see that a
    request still needs one. Not for several threads: it lives on the event loop.

    Args:
        adapters: the adapters, with unique names.
        aliases: other names, each of a registered adapter. The caller has checked both.
    """

    def __init__(self, adapters: Iterable[Adapter] = (), aliases: Mapping[str, str] | None = None) -> None:
        self._adapters = MappingProxyType({adapter.adapter_id: adapter for adapter in adapters})
        self._aliases = MappingProxyType(dict(aliases or {}))
        self._ids = frozenset((*self._adapters, *self._aliases))
        self._in_use: dict[str, int] = {}

    @classmethod
    def from_file(cls, path: Path, *, base_model: str | None = None) -> AdapterRegistry:
        """Read a registry from YAML; blocks, so call it before serving.

        ``base_model`` is the served model, when only adapters of that one can be used. Raises
        :class:`~adapters.errors.RegistryFileError` with the file, the key, what was given and what is
        allowed.
        """
        content = read_registry_file(path, base_model=base_model)
        return cls(content.adapters, content.aliases)

    @property
    def known(self) -> tuple[Adapter, ...]:
        """All registered adapters, in the file's order."""
        return tuple(self._adapters.values())

    @property
    def ids(self) -> frozenset[str]:
        """Every name that :meth:`get` knows: adapters and aliases."""
        return self._ids

    @property
    def aliases(self) -> Mapping[str, str]:
        """Alias to the name of its adapter."""
        return self._aliases

    def get(self, adapter_id: str) -> Adapter:
        """The adapter of that name or alias. Raises :class:`~adapters.errors.UnknownAdapter`."""
        adapter = self._adapters.get(self._aliases.get(adapter_id, adapter_id))
        if adapter is None:
            raise UnknownAdapter(adapter_id, tuple(sorted((*self._adapters, *self._aliases))))
        return adapter

    def lease(self, selection: Selection) -> AbstractContextManager[Lease]:
        """``with lease(selection) as lease``: selects on entry, gives back on exit.

        Entry raises :class:`~adapters.errors.UnknownAdapter` when the wish, or the rule that decided,
        names an adapter that is not registered.
        """
        return _Lending(self, selection)

    def leased(self) -> Mapping[str, int]:
        """Leases out now, by the adapter's own name; adapters not in use are absent."""
        return MappingProxyType(dict(self._in_use))

    def _take(self, selection: Selection) -> Lease:
        adapter_id, rule = choose(selection)
        if adapter_id is None:
            return Lease(None, rule)
        adapter = self.get(adapter_id)
        self._in_use[adapter.adapter_id] = self._in_use.get(adapter.adapter_id, 0) + 1
        return Lease(adapter, rule)

    def _give_back(self, lease: Lease) -> None:
        if lease.adapter is None:
            return
        name = lease.adapter.adapter_id
        left = self._in_use[name] - 1
        if left:
            self._in_use[name] = left
        else:
            del self._in_use[name]


class _Lending(AbstractContextManager[Lease]):
    """One lease. Entered once: it belongs to one block of code."""

    __slots__ = ("_entered", "_held", "_registry", "_selection")

    def __init__(self, registry: AdapterRegistry, selection: Selection) -> None:
        self._registry = registry
        self._selection = selection
        self._entered = False
        self._held: Lease | None = None

    def __enter__(self) -> Lease:
        if self._entered:
            raise RuntimeError("a lease is entered once; ask lease() for another")
        self._entered = True
        self._held = self._registry._take(self._selection)
        return self._held

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        held, self._held = self._held, None
        if held is not None:
            self._registry._give_back(held)
