"""The models that backends serve: each counts and plans with a tokenizer and a context length of its own."""

from collections.abc import Mapping
from types import MappingProxyType

from budgeting.counter import PromptCounter
from budgeting.values import SectionBudgets
from gateway.prompts.text import ModelText


class Models:
    """Each model's text side by its id; it may change while the gateway runs.

    A model without one of its own has the engine's, ``default``. ``budgets`` are models' own.
    Not thread-safe: the event loop's.
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
        """The text side of a model."""
        return self._own.get(model, self.default)

    def length(self, model: str) -> int:
        """The longest sequence of a model, prompt and answer together, in tokens."""
        return self.of(model).max_model_len

    def tokenizer(self, model: str) -> PromptCounter:
        """The tokenizer of a model."""
        return self.of(model).tokenizer

    def block_size(self, model: str) -> int:
        """Tokens of a block, for backends that do not report it."""
        return self.of(model).block_size

    def budgets(self, model: str) -> SectionBudgets | None:
        """The budgets that trim a model's prompts where neither the route nor the prompt version has any."""
        return self._budgets.get(model)

    def put(self, model: str, text: ModelText) -> None:
        """Prompts for this model are counted and planned by ``text`` from here on."""
        self._own[model] = text

    def remove(self, model: str) -> None:
        """No backend serves the model any more."""
        self._own.pop(model, None)

    @property
    def texts(self) -> Mapping[str, ModelText]:
        """The models with a text side of their own."""
        return MappingProxyType(self._own)
