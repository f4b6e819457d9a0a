"""The served model's text side: tokenizer, planner, sampling defaults, and the service of the tokenize
endpoints.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from budgeting.counter import PromptCounter
from budgeting.images import DEFAULT_COST, ImageCost
from budgeting.plan import BudgetPlanner
from budgeting.sections import prompt_messages
from budgeting.summary import ExtractiveSummarizer, Summarizer
from budgeting.values import NO_KWARGS, Message, SummaryKind, Tool
from gateway.contracts.values import Sampling
from gateway.prompts.canonical import Canonicalizer


class TokenizerText:
    """The served model's tokenizer and chat template. Synchronous and thread-safe.

    ``blocks``: it asks a worker, so it is not for the event loop.

    Args:
        tokenizer: the model's.
        max_model_len: longest sequence, prompt and answer together, in tokens.
        canonicalizer: the one that requests go through, so that both count the same.
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
        # Longest sequence, prompt and answer together, in tokens.
        self.max_model_len = max_model_len
        self.blocks = tokenizer.speed == 0

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: tuple[Tool, ...] = (),
        kwargs: Mapping[str, object] = NO_KWARGS,
    ) -> tuple[int, ...]:
        """Ids of a conversation as it would be sent untrimmed, so that the count equals
        ``usage.prompt_tokens``.

        Raises TemplateRefused.
        """
        canonical = prompt_messages(self._canonicalizer.messages(messages).prompt)
        return self._tokenizer.encode_chat(
            canonical, add_generation_prompt=add_generation_prompt, tools=tools, kwargs=kwargs
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Ids of a raw text; control tokens written in it are control tokens."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids. Raises ValueError for an id outside the vocabulary."""
        return self._tokenizer.decode(token_ids)

    def tokens(self, token_ids: Sequence[int]) -> list[str]:
        """The vocabulary's own string for each id. Raises ValueError for an id outside the vocabulary."""
        return self._tokenizer.tokens(token_ids)


class ModelText:
    """Tokenizer and planner of one model; the length may shrink once the engine knows its pool.

    ``block_size`` is for backends that do not report theirs, ``images`` what an image takes.
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
        # Efforts that the chat template refuses, and the nearest ones that it takes, as requests found out.
        self.efforts: dict[str, str] = {}
        self.extractive = ExtractiveSummarizer()
        self._summarizers: dict[SummaryKind, Summarizer] = {SummaryKind.EXTRACTIVE: self.extractive}
        self.limit(max_model_len)

    def limit(self, max_model_len: int) -> None:
        """Sequences are at most this long from here on."""
        self.max_model_len = max_model_len
        self.service = TokenizerText(
            self.tokenizer, max_model_len=max_model_len, canonicalizer=self._canonicalizer
        )
        self.planner = BudgetPlanner(
            self.tokenizer, max_model_len=max_model_len, summarizers=self._summarizers, images=self._images
        )

    def add_summarizer(self, kind: SummaryKind, summarizer: Summarizer) -> None:
        """Prompt versions that ask for this kind get it from here on."""
        self._summarizers[kind] = summarizer

    @property
    def encoder(self) -> str:
        """The library that counts tokens: ``tiktoken``, or ``tokenizers`` with the reason."""
        return self.tokenizer.encoder


def sampling_defaults(folder: Path) -> Sampling:
    """The sampling that a checkpoint's ``generation_config.json`` sets for callers that set none.

    ``do_sample: false`` is greedy, as in Transformers.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        return Sampling()
    data = json.loads(path.read_text(encoding="utf-8"))
    if data.get("do_sample") is False:
        return Sampling(temperature=0.0)
    return Sampling(**{name: data.get(name) for name in ("temperature", "top_p", "top_k", "min_p")})
