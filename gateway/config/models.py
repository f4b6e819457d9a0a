"""The section ``models``: settings of one model; docs/models.md explains each key."""

from collections.abc import Iterator, Mapping
from typing import Annotated

from pydantic import Field

from budgeting.images import DEFAULT_COST, ImageCost
from gateway.config.backends import BackendConfig, BedrockSection, OpenAIBackend, PriceConfig
from gateway.config.budgets import BudgetsSection
from gateway.config.engine import EngineSection
from gateway.config.images import ModelImages
from gateway.config.section import Folder, Section
from gateway.contracts.features import Capability

ModelName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:/@+-]{0,255}$")]


class ModelSection(Section):
    """One model. An unset tokenizer, context length or block size is that of the engine.

    ``backends`` serve the model; a backend that names a model must name this one. ``price`` applies to
    backends without a price. Without ``capabilities`` the model has those of its backends, except images,
    which need ``images``. ``budgets`` apply where neither the route nor the prompt version has budgets.
    """

    tokenizer: Annotated[Folder, Field(min_length=1)] | None = None
    max_model_len: Annotated[int, Field(ge=64, le=10_485_760)] | None = None
    block_size: Annotated[int, Field(ge=1, le=4096)] | None = None
    aliases: Annotated[tuple[ModelName, ...], Field(max_length=64)] = ()
    backends: Annotated[tuple[str, ...], Field(max_length=64)] = ()
    price: PriceConfig | None = None
    capabilities: frozenset[Capability] | None = None
    images: ModelImages | None = None
    budgets: BudgetsSection | None = None

    @property
    def image_cost(self) -> ImageCost:
        return DEFAULT_COST if self.images is None else self.images.cost


def model_of(section: BackendConfig, engines: Mapping[str | None, EngineSection]) -> str | None:
    """Return the model id that a backend's section names; ``None``: the pool's workers report it."""
    match section:
        case OpenAIBackend():
            return section.model
        case BedrockSection():
            return section.model_id
        case _:
            return engines[section.engine].model_id


def model_faults(
    models: Mapping[str, ModelSection],
    backends: Mapping[str, BackendConfig],
    engines: Mapping[str | None, EngineSection],
) -> Iterator[str]:
    """Yield one sentence for each contradiction between models, or between a model and the backends."""
    named = {name: model_of(backend, engines) for name, backend in backends.items()}
    in_process = {named[name]: engines[one.engine] for name, one in backends.items() if one.kind == "engine"}
    owners = {name: f"models.{name}" for name in models}
    owners |= {
        model: f"the model of backends.{name}"
        for name, model in named.items()
        if model and model not in models
    }
    owners |= {name: f"backends.{name}" for name in backends}
    for model, section in models.items():
        for alias in section.aliases:
            if alias in owners:
                yield f"models.{model}.aliases: {alias!r} is also {owners[alias]}; allowed: another name"
            owners[alias] = f"an alias of models.{model}"
        for backend in section.backends:
            if backend not in named:
                allowed = ", ".join(sorted(named))
                yield f"models.{model}.backends: there is no {backend!r}; allowed: {allowed}"
            elif named[backend] not in (model, None):
                yield (
                    f"models.{model}.backends: {backend!r} serves {named[backend]!r}; "
                    f"allowed: a backend with model {model!r}"
                )
        own = section.model_dump(include={"tokenizer", "max_model_len", "block_size"}, exclude_none=True)
        engine = in_process.get(model)
        if own and engine is not None:
            yield f"models.{model}.{min(own)}: the engine in process has this model; set engine.{min(own)}"
        if section.images is not None and engine is not None and engine.kind == "embedded":
            yield f"models.{model}.images: the embedded engine takes no images; allowed: for other models"
        if not {model, None} & set(named.values()):
            served = ", ".join(sorted({one for one in named.values() if one}))
            yield f"models.{model}: no backend has this model; allowed: {served}"
