"""The models shown to callers: base models, adapters and their aliases, backends."""

from collections.abc import Sequence

from adapters.registry import AdapterRegistry
from gateway.backends.port import Fleet
from gateway.contracts.model_card import CardKind, ModelCard


def model_cards(fleet: Fleet, adapters: AdapterRegistry, max_model_len: int) -> Sequence[ModelCard]:
    """A card for each name that a request may give as its model."""
    cards = [ModelCard(model, model, None, max_model_len) for model in sorted(fleet.base_models)]
    cards += [
        ModelCard(a.adapter_id, a.adapter_id, a.base_model, max_model_len, CardKind.ADAPTER)
        for a in adapters.known
    ]
    cards += [
        ModelCard(alias, target, adapters.get(target).base_model, max_model_len, CardKind.ADAPTER)
        for alias, target in sorted(adapters.aliases.items())
        if target in adapters.offered.adapters
    ]
    cards += [
        ModelCard(name, backend.model, backend.model, max_model_len, CardKind.BACKEND)
        for name, backend in sorted(fleet.backends.items())
    ]
    return cards
