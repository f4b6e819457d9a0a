"""The models that callers can name: base models, adapters, backends, and aliases of these."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from adapters.registry import AdapterRegistry
from gateway.backends.port import Fleet, makes_vectors
from gateway.contracts.fields import label_or_none
from gateway.contracts.model_card import CardKind, ModelCard


def model_cards(fleet: Fleet, adapters: AdapterRegistry, length: Callable[[str], int]) -> Sequence[ModelCard]:
    """A card for each name that a request may give as its model; a backend may have the name of a model."""
    cards = [ModelCard(model, model, None, length(model)) for model in sorted(fleet.base_models)]
    cards += [
        ModelCard(a.adapter_id, a.adapter_id, a.base_model, length(a.base_model), CardKind.ADAPTER)
        for a in (*adapters.known, *adapters.listed)
    ]
    for alias, target in sorted(adapters.aliases.items()):
        if target in adapters.offered.adapters:
            base = adapters.get(target).base_model
            cards.append(ModelCard(alias, target, base, length(base), CardKind.ADAPTER))
    cards += [
        ModelCard(name, backend.model, backend.model, length(backend.model), CardKind.BACKEND)
        for name, backend in sorted(fleet.backends.items())
    ]
    cards += [
        ModelCard(alias, model, None, length(model), CardKind.ALIAS)
        for alias, model in sorted(fleet.aliases.items())
    ]
    # An engine in process makes vectors as means; how workers make them is not known.
    pooled = {
        one.model: "mean" for one in fleet.backends.values() if makes_vectors(one) and one.kind == "embedded"
    }
    named = [card for card in cards if label_or_none(card.id) is not None]
    return [replace(card, pooling=pooled.get(card.root)) for card in named]
