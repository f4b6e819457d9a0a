"""The part of the composition root that makes the keys, their book and their desk."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from accounting.keys import KeyRing
from gateway.admin.keys import KeyAdmin
from gateway.contracts.model_card import CardKind, ModelCard
from gateway.contracts.values import Caller
from gateway.keys.authenticate import Keys
from gateway.keys.last_used import STREAM as USE_STREAM
from gateway.keys.last_used import KeyUse
from gateway.keys.registry import STREAM, KeyProjection
from gateway.routing.revision import Revision
from gateway.state.audit import Audit
from gateway.wiring.state import StateParts


@dataclass(frozen=True, slots=True)
class KeyParts:
    """Who gets in, and who decides on it.

    Args:
        door: for every request.
        desk: for admins.
        use: when keys were used.
    """

    door: Keys
    desk: KeyAdmin
    use: KeyUse


def make_keys(ring: KeyRing, state: StateParts, *, audit: Audit, unix_time: Callable[[], float]) -> KeyParts:
    """Build it around a ring that knows the first admin key."""
    use = KeyUse(state.store, unix_time=unix_time)
    state.follow(USE_STREAM, use.take)
    book = KeyProjection(state.store, ring, use)
    book.follow(state.follow(STREAM, book.take))
    desk = KeyAdmin(ring, book, use, audit, unix_time)
    return KeyParts(Keys(ring, use.saw), desk, use)


def usable(cards: Sequence[ModelCard], caller: Caller, revision: Revision) -> Sequence[ModelCard]:
    """The models that a caller's key may name."""
    if caller.routes is None and caller.adapters is None:
        return cards
    backends = backends_of(revision, caller.routes)

    def may(card: ModelCard) -> bool:
        if card.kind is CardKind.ADAPTER:
            return caller.adapters is None or bool({card.id, card.root} & set(caller.adapters))
        return card.kind is CardKind.BASE or backends is None or card.id in backends

    return [card for card in cards if may(card)]


def backends_of(revision: Revision, routes: Collection[str] | None) -> Collection[str] | None:
    """The backends that answer for these routes; ``None``: every one."""
    if routes is None:
        return None
    return {
        name for route in routes if route in revision.routes for name, _ in revision.routes[route].weights
    }
