"""The registered adapters: looked up by name or alias, leased for the time of a request."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType

from adapters.catalogue import AdapterState, Alias
from adapters.errors import UnknownAdapter
from adapters.registry_file import read_registry_file
from adapters.selection import AdapterOffer, select
from adapters.values import Adapter, Selection


@dataclass(frozen=True, slots=True)
class Lease:
    """An adapter in use by one request; ``None`` is the base model.

    ``rule`` is what decided: ``explicit``, ``rule[0]``…, ``canary(25%)``, ``none``; ``missing`` the named
    adapter when the base model is used instead.
    """

    adapter: Adapter | None
    rule: str
    missing: str | None = None

    @property
    def adapter_id(self) -> str | None:
        """The adapter's id; ``None`` for the base model."""
        return None if self.adapter is None else self.adapter.adapter_id


class AdapterRegistry:
    """The adapters that requests may use; lives on the event loop.

    A lease counts an adapter as in use, so that retirement and eviction see that a request still needs it.
    The caller has checked ``adapters`` (all active) and ``aliases``.
    """

    def __init__(self, adapters: Iterable[Adapter] = (), aliases: Mapping[str, str] | None = None) -> None:
        given = {adapter.adapter_id: adapter for adapter in adapters}
        self._in_use: dict[str, int] = {}
        self._expected: frozenset[str] = frozenset()
        self.offer(
            AdapterOffer(
                MappingProxyType(given),
                MappingProxyType(dict.fromkeys(given, AdapterState.ACTIVE)),
                MappingProxyType({name: Alias(name, target) for name, target in (aliases or {}).items()}),
            )
        )

    @classmethod
    def from_file(cls, path: Path, *, base_model: str | None = None) -> AdapterRegistry:
        """Read a registry from YAML; blocks. Raises :class:`~adapters.errors.RegistryFileError`.

        ``base_model`` is the served model, when only adapters of that one can be used.
        """
        content = read_registry_file(path, base_model=base_model)
        return cls(content.adapters, content.aliases)

    def offer(self, offer: AdapterOffer) -> None:
        """Replace all adapters at once; existing leases keep theirs."""
        self._offer = offer
        served = set(offer.served)
        self._known = tuple(one for one in offer.adapters.values() if one.adapter_id in served)
        self._name()

    def expect(self, names: Iterable[str]) -> None:
        """Set names that the configuration uses, registered already or not."""
        self._expected = frozenset(names)
        self._name()

    def _name(self) -> None:
        offer = self._offer
        usable = [name for name, state in offer.states.items() if state is not AdapterState.RETIRED]
        self._ids = frozenset((*usable, *offer.aliases, *self._expected))
        coming = self._expected - offer.states.keys() - offer.aliases.keys() - offer.refused.keys()
        self._servable = coming.union(offer.served)

    @property
    def offered(self) -> AdapterOffer:
        """The offer in force."""
        return self._offer

    @property
    def known(self) -> tuple[Adapter, ...]:
        """The adapters that are served, in the order of their registration."""
        return self._known

    @property
    def ids(self) -> frozenset[str]:
        """Every name that :meth:`get` knows: adapters and aliases."""
        return self._ids

    @property
    def names(self) -> Collection[str]:
        """The same, as a live view."""
        return _Names(lambda: self._ids)

    @property
    def servable(self) -> Collection[str]:
        """Names that any caller may use now, or once the registry's file is imported; a live view."""
        return _Names(lambda: self._servable)

    @property
    def aliases(self) -> Mapping[str, str]:
        """Alias to its target, the adapter of sessions outside the canary."""
        return MappingProxyType(
            {name: one.target for name, one in self._offer.aliases.items() if one.target is not None}
        )

    def get(self, adapter_id: str) -> Adapter:
        """The adapter of that name or alias. Raises :class:`~adapters.errors.UnknownAdapter`."""
        adapter = self._offer.adapters.get(self.aliases.get(adapter_id, adapter_id))
        if adapter is None or self._offer.states[adapter.adapter_id] is AdapterState.RETIRED:
            raise UnknownAdapter(adapter_id, self._offer.served)
        return adapter

    def lease(self, selection: Selection) -> AbstractContextManager[Lease]:
        """``with lease(selection) as lease``: selects on entry, releases on exit. Raises as
        :func:`selection.select`."""
        return _Lending(self, selection)

    def leased(self) -> Mapping[str, int]:
        """Current leases by the adapter's own name; adapters not in use are absent."""
        return MappingProxyType(dict(self._in_use))

    def _acquire(self, selection: Selection) -> Lease:
        choice = select(selection, self._offer)
        adapter = choice.adapter
        if adapter is not None:
            self._in_use[adapter.adapter_id] = self._in_use.get(adapter.adapter_id, 0) + 1
        return Lease(adapter, choice.rule, choice.missing)

    def _release(self, lease: Lease) -> None:
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
        self._held = self._registry._acquire(self._selection)
        return self._held

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        held, self._held = self._held, None
        if held is not None:
            self._registry._release(held)


class _Names(Collection[str]):
    """A live view of names."""

    def __init__(self, read: Callable[[], frozenset[str]]) -> None:
        self._read = read

    def __contains__(self, name: object) -> bool:
        return name in self._read()

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())
