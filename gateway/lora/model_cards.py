"""The models that callers can name: base models, adapters, backends, and aliases of these."""

from collections.abc import Callable, Sequence

from adapters.registry import AdapterRegistry
from gateway.backends.port import Fleet, generates, makes_vectors, scores_texts, transcribes
from gateway.contracts.features import Feature
from gateway.contracts.fields import label_or_none
from gateway.contracts.model_card import CardKind, ModelCard


def model_cards(fleet: Fleet, adapters: AdapterRegistry, length: Callable[[str], int]) -> Sequence[ModelCard]:
    """A card for each name that a request may give as its model; a backend may have the name of a model."""
    # Name, root, parent and kind of each.
    cards: list[tuple[str, str, str | None, CardKind]]
    cards = [(model, model, None, CardKind.BASE) for model in sorted(fleet.base_models)]
    for one in (*adapters.known, *adapters.listed):
        cards.append((one.adapter_id, one.adapter_id, one.base_model, CardKind.ADAPTER))
    for alias, target in sorted(adapters.aliases.items()):
        if target in adapters.offered.adapters:
            cards.append((alias, target, adapters.get(target).base_model, CardKind.ADAPTER))
    for name, backend in sorted(fleet.backends.items()):
        cards.append((name, backend.model, backend.model, CardKind.BACKEND))
    cards += [(alias, model, None, CardKind.ALIAS) for alias, model in sorted(fleet.aliases.items())]
    # An engine in process makes vectors as means; how workers make them is not known.
    pooled = {
        one.model: "mean" for one in fleet.backends.values() if makes_vectors(one) and one.kind == "embedded"
    }
    seeing = {one.model for one in fleet.backends.values() if Feature.IMAGES in one.features}
    generating = {one.model for one in fleet.backends.values() if generates(one)}
    pooling = {
        one.model
        for one in fleet.backends.values()
        if makes_vectors(one) or scores_texts(one) or transcribes(one)
    }
    return [
        ModelCard(
            name,
            root,
            parent,
            length(base := parent or root),
            kind,
            pooled.get(root),
            images=base in seeing,
            generates=base in generating,
            pools=base in pooling,
        )
        for name, root, parent, kind in cards
        if label_or_none(name) is not None
    ]
