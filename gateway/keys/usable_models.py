"""Which models a key may name."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gateway.contracts.model_card import CardKind, ModelCard
from gateway.contracts.values import Caller
from gateway.routing.revision import Revision


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
    """The backends of these routes; ``None``: all of them."""
    if routes is None:
        return None
    return {
        name for route in routes if route in revision.routes for name, _ in revision.routes[route].weights
    }
