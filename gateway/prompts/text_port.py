"""Tokenizing and detokenizing, as the HTTP edge needs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from budgeting.values import Message


class TextService(Protocol):
    """The served model's tokenizer and chat template."""

    @property
    def max_model_len(self) -> int:
        """Longest sequence, prompt and answer together, in tokens."""

    async def encode_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> tuple[int, ...]:
        """Token ids of the rendered chat template."""

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of a plain text."""

    async def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids; raises ValueError for an id outside the vocabulary."""

    def tokens(self, token_ids: Sequence[int]) -> list[str]:
        """The vocabulary's own string for each id."""
