"""The models that backends serve; each has its own tokenizer and context length to plan prompts."""

from collections.abc import Mapping
from types import MappingProxyType

from budgeting.values import SectionBudgets
from gateway.prompts.text import ModelText


class Models:
    """The :class:`ModelText` of each model by id; it may change while the gateway runs.

    A model without an own one uses ``default``, the engine's. ``budgets`` are the models' own budgets.
    Not thread-safe: use it only on the event loop.
    """

    def __init__(
        self,
        default: ModelText,
        own: Mapping[str, ModelText] = MappingProxyType({}),
        budgets: Mapping[str, SectionBudgets] = MappingProxyType({}),
    ) -> None:
        self.default = default
        self._own = dict(own)
        self._budgets = budgets

    def of(self, model: str) -> ModelText:
        return self._own.get(model, self.default)

    def budgets(self, model: str) -> SectionBudgets | None:
        """Return a model's budgets, which apply if neither the route nor the prompt version has any."""
        return self._budgets.get(model)

    def put(self, model: str, text: ModelText) -> None:
        """Count and plan prompts for this model with ``text`` from now on."""
        self._own[model] = text

    def remove(self, model: str) -> None:
        """Remove the text of a model that no backend serves any more."""
        self._own.pop(model, None)

    @property
    def texts(self) -> Mapping[str, ModelText]:
        """The texts of the models that have their own."""
        return MappingProxyType(self._own)
