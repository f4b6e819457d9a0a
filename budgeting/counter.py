"""The interface by which the planner counts a model's tokens: its tokenizer, or a substitute for one."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from budgeting.counting import EncodedChat
from budgeting.values import NO_KWARGS, Message, Tool


class PromptCounter(Protocol):
    """Counts the prompts of one model. Synchronous and thread-safe; may block where it runs in a thread.

    :class:`budgeting.counting.ChatTokenizer` counts exactly. Another one may ask a worker, or estimate; it
    returns as many ids as it counts, and backends of its model must be sent messages, never these ids.
    ``speed`` is a factor on the amount of text that is encoded on the event loop; 0: the counter blocks, and
    is never called there.
    """

    per_message: bool
    speed: int

    @property
    def encoder(self) -> str:
        """The method of counting, for operators."""

    @property
    def vocabulary(self) -> int:
        """One more than the largest token id."""

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        kwargs: Mapping[str, object] = NO_KWARGS,
    ) -> tuple[int, ...]:
        """Ids of the rendered conversation. Raises TemplateRefused.

        ``kwargs`` are the template's variables, and how the conversation ends (``template.split_ending``).
        """

    def encode_parts(
        self,
        messages: Sequence[Message],
        cuts: Sequence[int],
        *,
        tools: Sequence[Tool] = (),
        kwargs: Mapping[str, object] = NO_KWARGS,
    ) -> EncodedChat:
        """Ids of the rendered conversation, and where the first ``cuts[i]`` messages end in them."""

    def as_sent(self, messages: Sequence[Message], opening: int) -> Sequence[Message]:
        """The conversation as the chat template takes it."""

    def message_tokens(self, message: Message) -> int:
        """Tokens that a message adds after the first one, markup included."""

    def tool_tokens(
        self, tools: tuple[Tool, ...], kwargs: Mapping[str, object], *, system: bool
    ) -> tuple[int, int]:
        """Tokens that tools add to a conversation: in front of its first turn, and in all."""

    def text_tokens(self, text: str) -> int:
        """Tokens of a text inside a message."""

    def unseen_chars(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> int:
        """How much encoding a conversation costs, in characters of text."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Ids of a raw text."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids. Raises ValueError for an id outside the vocabulary."""

    def tokens(self, token_ids: Sequence[int]) -> list[str]:
        """The vocabulary's own string for each id. Raises ValueError for an id outside the vocabulary."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for."""

    def text_bytes(self, token_id: int) -> bytes:
        """The bytes that one token adds to an answer's text; none for a control token."""

    def unknown_id(self, token_ids: Sequence[int]) -> int | None:
        """The first id that the vocabulary does not have, if any."""
