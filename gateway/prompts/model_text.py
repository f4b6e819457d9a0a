"""The served model's text side: tokenizer and planner, and the sampling defaults of its folder."""

from __future__ import annotations

import json
from pathlib import Path

from budgeting.counting import ChatTokenizer
from budgeting.plan import BudgetPlanner
from budgeting.summary import ExtractiveSummarizer, Summarizer
from budgeting.values import SummaryKind
from gateway.contracts.values import Sampling
from gateway.prompts.canonical import Canonicalizer
from gateway.prompts.text import TokenizerText


class ModelText:
    """Tokenizer and planner of the base model; the length may shrink once the engine knows its pool."""

    def __init__(self, tokenizer: ChatTokenizer, max_model_len: int, canonicalizer: Canonicalizer) -> None:
        self._tokenizer = tokenizer
        self._canonicalizer = canonicalizer
        self.extractive = ExtractiveSummarizer()
        self._summarizers: dict[SummaryKind, Summarizer] = {SummaryKind.EXTRACTIVE: self.extractive}
        self.limit(max_model_len)

    def limit(self, max_model_len: int) -> None:
        """Sequences are at most this long from here on."""
        self.max_model_len = max_model_len
        self.service = TokenizerText(
            self._tokenizer, max_model_len=max_model_len, canonicalizer=self._canonicalizer
        )
        self.planner = BudgetPlanner(
            self._tokenizer, max_model_len=max_model_len, summarizers=self._summarizers
        )

    def add_summarizer(self, kind: SummaryKind, summarizer: Summarizer) -> None:
        """Prompt versions that ask for this kind get it from here on."""
        self._summarizers[kind] = summarizer

    @property
    def encoder(self) -> str:
        """The library that counts tokens: ``tiktoken``, or ``tokenizers`` with the reason."""
        return self._tokenizer.encoder


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
