"""A served model's text: tokenizer, planner, sampling defaults, and the service of the tokenize endpoints."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from budgeting.images import DEFAULT_COST, ImageCost
from budgeting.learned_counter import PromptCounter
from budgeting.plan import BudgetPlanner
from budgeting.sections import prompt_messages
from budgeting.summary import ExtractiveSummarizer, Summarizer
from budgeting.values import NO_KWARGS, Message, SummaryKind, Tool
from gateway.contracts.values import Sampling
from gateway.prompts.canonical import Canonicalizer


class TokenizerText:
    """The served model's tokenizer and chat template. Synchronous and thread-safe.

    ``blocks``: the tokenizer asks a worker, so it must not run on the event loop.

    Args:
        tokenizer: the model's tokenizer.
        max_model_len: longest sequence, prompt and answer together, in tokens.
        canonicalizer: the canonicalizer of the requests, so that both count the same.
    """

    def __init__(
        self,
        tokenizer: PromptCounter,
        *,
        max_model_len: int,
        canonicalizer: Canonicalizer | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._canonicalizer = canonicalizer or Canonicalizer()
        self.max_model_len = max_model_len
        self.blocks = tokenizer.speed == 0

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
        return self._tokenizer.encode_chat(canonical, tools=tools, kwargs=kwargs)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Return the token ids of a raw text; control tokens written in it are control tokens."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids. Raises ValueError for an id outside the vocabulary."""
        return self._tokenizer.decode(token_ids)

    def tokens(self, token_ids: Sequence[int]) -> list[str]:
        """Return the vocabulary's string of each id. Raises ValueError for an id outside the vocabulary."""
        return self._tokenizer.tokens(token_ids)


class ModelText:
    """Tokenizer and planner of one model; the context length may shrink when the engine knows its KV cache.

    ``block_size`` is for backends that do not report theirs; ``images`` is the token cost of an image.
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
        self.block_size = block_size
        self._canonicalizer = canonicalizer
        # For each effort that the chat template refused, the nearest one that it accepts.
        self.efforts: dict[str, str] = {}
        self.extractive = ExtractiveSummarizer()
        self._summarizers: dict[SummaryKind, Summarizer] = {SummaryKind.EXTRACTIVE: self.extractive}
        self.limit(max_model_len)

    def limit(self, max_model_len: int) -> None:
        """Limit sequences to this many tokens from now on."""
        self.max_model_len = max_model_len
        self.service = TokenizerText(
            self.tokenizer, max_model_len=max_model_len, canonicalizer=self._canonicalizer
        )
        self.planner = BudgetPlanner(
            self.tokenizer, max_model_len=max_model_len, summarizers=self._summarizers, images=self._images
        )

    def add_summarizer(self, kind: SummaryKind, summarizer: Summarizer) -> None:
        """Use ``summarizer`` for prompt versions with this kind from now on."""
        self._summarizers[kind] = summarizer

    @property
    def encoder(self) -> str:
        """The library that counts tokens: ``tiktoken``, or ``tokenizers`` with the reason."""
        return self.tokenizer.encoder


def sampling_defaults(folder: Path) -> Sampling:
    """Return the sampling defaults of a checkpoint's ``generation_config.json``.

    ``do_sample: false`` is greedy, as in Transformers.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        return Sampling()
    data = json.loads(path.read_text(encoding="utf-8"))
    if data.get("do_sample") is False:
        return Sampling(temperature=0.0)
    return Sampling(**{name: data.get(name) for name in ("temperature", "top_p", "top_k", "min_p")})
