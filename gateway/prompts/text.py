"""The served models' texts: tokenizer, planner and sampling defaults of each."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from budgeting.images import DEFAULT_COST, ImageCost
from budgeting.learned_counter import PromptCounter
from budgeting.plan import BudgetPlanner
from budgeting.sections import prompt_messages
from budgeting.summary import ExtractiveSummarizer, Summarizer
from budgeting.values import NO_KWARGS, Message, SectionBudgets, SummaryKind, Tool
from gateway.config.errors import ConfigError
from gateway.contracts.values import Sampling
from gateway.prompts.canonical import Canonicalizer


class ModelText:
    """Tokenizer and planner of one model; the context length may shrink when the engine knows its KV cache.
    Encoding and decoding are synchronous and thread-safe.

    Args:
        max_model_len: longest sequence, prompt and answer together, in tokens.
        canonicalizer: that of the requests, so that the tokenize endpoints count the same.
        block_size: for backends that do not report theirs.
        images: the token cost of an image.

    Attributes:
        blocks: the tokenizer asks a worker, so it must not run on the event loop.
    """

    def __init__(
        self,
        tokenizer: PromptCounter,
        max_model_len: int,
        canonicalizer: Canonicalizer,
        *,
        block_size: int = 16,
        images: ImageCost = DEFAULT_COST,
    ) -> None:
        self._images = images
        self.tokenizer = tokenizer
        self.blocks = tokenizer.speed == 0
        self.block_size = block_size
        self._canonicalizer = canonicalizer
        # For each effort that the chat template refused, the nearest one that it accepts.
        self.efforts: dict[str, str] = {}
        self.extractive = ExtractiveSummarizer()
        self.summarizers: dict[SummaryKind, Summarizer] = {SummaryKind.EXTRACTIVE: self.extractive}
        self.limit(max_model_len)

    def limit(self, max_model_len: int) -> None:
        self.max_model_len = max_model_len
        self.planner = BudgetPlanner(
            self.tokenizer, max_model_len=max_model_len, summarizers=self.summarizers, images=self._images
        )

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: tuple[Tool, ...] = (),
        kwargs: Mapping[str, object] = NO_KWARGS,
    ) -> tuple[int, ...]:
        """Return the token ids of an untrimmed conversation; their number equals ``usage.prompt_tokens``.

        Raises TemplateRefused.
        """
        canonical = prompt_messages(self._canonicalizer.messages(messages).prompt)
        return self.tokenizer.encode_chat(canonical, tools=tools, kwargs=kwargs)


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
        self.own = dict(own)
        self._budgets = budgets

    def of(self, model: str) -> ModelText:
        return self.own.get(model, self.default)

    def tokenizer(self, model: str) -> PromptCounter:
        return self.of(model).tokenizer

    def budgets(self, model: str) -> SectionBudgets | None:
        """Return a model's budgets, which apply if neither the route nor the prompt version has any."""
        return self._budgets.get(model)


def sampling_defaults(folder: Path) -> Sampling:
    """Return the sampling defaults of a checkpoint's ``generation_config.json``.

    ``do_sample: false`` is greedy, as in Transformers. Raises ConfigError.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        return Sampling()
    try:
        data = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        if data.get("do_sample") is False:
            return Sampling(temperature=0.0)
        given = {name: data.get(name) for name in ("temperature", "top_p", "top_k", "min_p")}
        return msgspec.convert(given, Sampling, strict=False)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}: {error}") from error
