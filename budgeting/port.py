"""What the planner needs of a model's tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from budgeting.counting import EncodedChat
from budgeting.values import Message


class PromptTokenizer(Protocol):
    """What the planner needs of a tokenizer; :class:`budgeting.counting.ChatTokenizer` is one.

    Invariants: deterministic; adding a message, or lines to one, never makes a conversation shorter.
    """

    def encode_parts(
        self, messages: Sequence[Message], cuts: Sequence[int], *, add_generation_prompt: bool = True
    ) -> EncodedChat:
        """Exact ids of a conversation, and where its first ``cuts[i]`` messages end in them."""

    def as_sent(self, messages: Sequence[Message], opening: int) -> Sequence[Message]:
        """The conversation in the form that the model's chat template takes."""

    def message_tokens(self, message: Message) -> int:
        """About how many tokens a message adds."""

    def text_tokens(self, text: str) -> int:
        """About how many tokens a text adds to a message."""

    def unseen_chars(self, messages: Iterable[Message]) -> int:
        """How much encoding these messages costs, in characters of text."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Ids of a raw text."""

    def unknown_id(self, token_ids: Sequence[int]) -> int | None:
        """The first id outside the vocabulary, if any."""

    @property
    def vocabulary(self) -> int:
        """One more than the largest token id."""

    @property
    def speed(self) -> int:
        """How many times as fast as `tokenizers` it encodes; the measure of :meth:`unseen_chars`."""

    @property
    def per_message(self) -> bool:
        """Whether :meth:`message_tokens` is exact."""
