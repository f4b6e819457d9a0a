"""Determines which models a key may name."""

from collections.abc import Sequence
from dataclasses import replace

from gateway.contracts.model_card import CardKind, ModelCard
from gateway.contracts.values import Caller
from gateway.routing.revision import Revision


def usable(cards: Sequence[ModelCard], caller: Caller, revision: Revision) -> Sequence[ModelCard]:
    """Return the models that a caller can name without a route; for a key that must name one, those of any.

    A backend, and a model that a route names, can be named unless the key is limited to other routes. So can
    a model that generates no text, or that no route serves, in requests for vectors, scores or transcripts.
    """
    allowed, routes = caller.routes, revision.routes
    names = (revision.openai_route,) if allowed is None or revision.openai_route in allowed else allowed
    reached = {backend for name in names if name in routes for backend in routes[name].backends}
    backends = {card.id: card.root for card in cards if card.kind is CardKind.BACKEND}
    served = {model for name, model in backends.items() if name in reached}
    elsewhere = {*backends.values()} - served
    within = routes if allowed is None else allowed
    routed = {backends.get(one) for name in within if name in routes for one in routes[name].backends}
    poolable = {
        card.id
        for card in cards
        if card.kind is CardKind.BASE
        and card.id not in served
        and card.pools
        and (allowed is None or card.id in routed)
        and not (card.generates and card.id in routed)
    }
    served |= poolable

    def may(card: ModelCard) -> bool:
        match card.kind:
            case CardKind.BASE:
                return card.id in served
            case CardKind.ALIAS:
                route = revision.route_of.get(card.root)
                return card.root in served if route is None else allowed is None or route in allowed
            case CardKind.ADAPTER:
                named = caller.adapters is None or bool({card.id, card.root} & set(caller.adapters))
                return named and card.parent not in elsewhere
            case CardKind.BACKEND:
                return allowed is None or card.id in reached

    cards = [card for card in cards if caller.may_use(card.parent or card.root)]
    first = {card.id: card for card in cards}
    selecting = [
        replace(
            first.get(at := routes[name].backends[0], ModelCard(model, model)),
            id=model,
            root=backends.get(at, model),
            parent=None,
            kind=CardKind.BASE,
            pooling=None,
        )
        for model, name in revision.route_of.items()
        if (allowed is None or name in allowed)
        and any(caller.may_use(backends.get(one, one)) for one in routes[name].backends)
    ]
    others = [card for card in cards if card.id not in revision.route_of and may(card)]
    # Some clients take the first model of the list for chats.
    named = [*selecting, *sorted(others, key=lambda card: card.id in poolable)]
    by_id: dict[str, ModelCard] = {}
    for card in named:
        by_id.setdefault(card.id, card)  # a name selects a base model or an adapter rather than a backend
    own = dict(caller.aliases)
    return [
        *(card for card in by_id.values() if card.id not in own),
        *(replace(by_id[of], id=alias, kind=CardKind.ALIAS) for alias, of in own.items() if of in by_id),
    ]
