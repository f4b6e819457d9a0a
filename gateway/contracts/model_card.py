"""A model that callers can name."""

from dataclasses import dataclass
from enum import StrEnum


class CardKind(StrEnum):
    """What a served model is."""

    BASE = "base"
    ADAPTER = "adapter"
    BACKEND = "backend"
    ALIAS = "alias"


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One entry of ``GET /v1/models``: a base model, an adapter, a backend or an alias of a model.

    ``pooling``: how the engine in process makes vectors of the model's hidden states. ``images``: whether a
    backend of the model takes images; ``generates``: whether one may generate text; ``pools``: whether one
    may make vectors, scores or transcripts.
    """

    id: str
    root: str
    parent: str | None = None
    max_model_len: int | None = None
    kind: CardKind = CardKind.BASE
    pooling: str | None = None
    images: bool = False
    generates: bool = True
    pools: bool = False
