"""The registered adapters: found by name or alias, and leased for the time of a request."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import MappingProxyType

from msgspec import Struct

from adapters.catalogue import AdapterState
from adapters.errors import UnknownAdapter
from adapters.selection import AdapterOffer, Lease, select
from adapters.values import Adapter, Selection


class AdapterRegistry:
    """The adapters that requests may use; lives on the event loop.

    A lease counts an adapter as in use, so that retirement and eviction know that a request still needs it.
    The caller must have checked what is offered.
    """

    def __init__(self) -> None:
        self._in_use: dict[str, int] = {}
        self._expected: frozenset[str] = frozenset()
        self._at_workers: Sequence[Adapter] = ()
        # Sets that are updated in place: the names of adapters and aliases that :meth:`get` knows; the names
        # that any caller may use, now or after the import of the registry's file.
        self.ids: set[str] = set()
        self.servable: set[str] = set()
        self.offer(AdapterOffer())

    def offer(self, offer: AdapterOffer) -> None:
        """Replace all registered adapters at once; existing leases keep their adapters."""
        # The current offer, without the workers' own adapters.
        self.registered = offer
        served = set(offer.served)
        self.known = tuple(one for one in offer.adapters.values() if one.adapter_id in served)
        self._name()

    def list_at_workers(self, adapters: Sequence[Adapter]) -> None:
        """Replace the adapters that workers list as their own; names of the registry stay the registry's."""
        self._at_workers = adapters
        self._name()

    def expect(self, names: Iterable[str]) -> None:
        """Set the names that the configuration uses, whether registered already or not."""
        self._expected = frozenset(names)
        self._name()

    def _name(self) -> None:
        offer = self.registered
        taken = {*offer.states, *offer.aliases, *offer.refused, *self._expected}
        # Those of the workers that can be selected.
        self.listed = tuple(one for one in self._at_workers if one.adapter_id not in taken)
        if self.listed:
            offer = replace(
                offer,
                adapters={**offer.adapters, **{one.adapter_id: one for one in self.listed}},
                states={**offer.states, **{one.adapter_id: AdapterState.ACTIVE for one in self.listed}},
            )
        # The offer in force.
        self.offered = offer
        usable = [name for name, state in offer.states.items() if state is not AdapterState.RETIRED]
        self.ids.clear()
        self.ids.update(usable, offer.aliases, self._expected)
        coming = self._expected - offer.states.keys() - offer.aliases.keys() - offer.refused.keys()
        self.servable.clear()
        self.servable.update(coming, offer.served)

    @property
    def aliases(self) -> Mapping[str, str]:
        """The target of each alias: the adapter of sessions outside the canary."""
        return MappingProxyType(
            {name: one.target for name, one in self.offered.aliases.items() if one.target is not None}
        )

    def get(self, adapter_id: str) -> Adapter:
        """The adapter of that name or alias. Raises :class:`~adapters.errors.UnknownAdapter`."""
        adapter = self.offered.adapters.get(self.aliases.get(adapter_id, adapter_id))
        if adapter is None or self.offered.states[adapter.adapter_id] is AdapterState.RETIRED:
            raise UnknownAdapter(adapter_id, self.offered.served)
        return adapter

    def lease(self, selection: Selection) -> AbstractContextManager[Lease]:
        """``with lease(selection) as lease``: counted as in use while the block runs."""
        return _Leasing(self._in_use, select(selection, self.offered))

    def leased(self) -> Mapping[str, int]:
        """Current leases by the adapter's own name; adapters not in use are absent."""
        return MappingProxyType(dict(self._in_use))


class _Leasing(Struct, eq=False):
    """Counts one lease; ``_in_use`` is the number of leases by adapter."""

    _in_use: dict[str, int]
    _lease: Lease

    def __enter__(self) -> Lease:
        adapter = self._lease.adapter
        if adapter is not None:
            self._in_use[adapter.adapter_id] = self._in_use.get(adapter.adapter_id, 0) + 1
        return self._lease

    def __exit__(self, *_: object) -> None:
        adapter = self._lease.adapter
        if adapter is not None:
            self._in_use[adapter.adapter_id] -= 1
            if not self._in_use[adapter.adapter_id]:
                del self._in_use[adapter.adapter_id]
