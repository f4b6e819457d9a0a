"""Exact counting: the token ids that an engine will see for a conversation, or for a text.

Where the template is proved to render every message on its own (:mod:`budgeting.independence`) and every
message starts with a control token, a conversation's ids are its messages' ids in a row: text never merges
across a control token. Messages are then tokenized one by one and kept in a small cache, so that old turns
cost a look-up. Everywhere else the conversation is rendered and tokenized as a whole. Both give the same ids.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from pathlib import Path

from jinja2 import TemplateSyntaxError

from budgeting.errors import TemplateRefused, TokenizerError
from budgeting.template import ChatTemplate
from budgeting.token_cache import TokenCache
from budgeting.tokenizer_files import TokenizerFiles, read_tokenizer_files
from budgeting.values import Message, Role
from budgeting.vocabulary import Vocabulary

# Bounds of the cache: 72 whole conversations of 3,600 tokens, about 12 MiB.
CACHE_TOKENS = 262_144
CACHE_MESSAGES = 8_192

# What rendering a message costs, in characters of text that could be tokenized meanwhile: measured with the
# demo model on one 2.9 GHz core, 45 µs a message and 2.6 characters a microsecond.
MESSAGE_CHARS = 117

# Markup of one message, where it cannot be told apart from its text: `<|im_start|>`, role, line end,
# `<|im_end|>`, line end, and one for luck. Only estimates use it.
_MARKUP_TOKENS = 6

# Stands before a message to see what the message adds.
_ANCHOR = Message(Role.USER, "x")


@dataclass(frozen=True, slots=True)
class EncodedChat:
    """A conversation's ids, and where its parts end.

    ``ends[i]`` is the number of leading ids that stand for the messages before the i-th cut; it never
    counts an id that reaches over the cut.
    """

    token_ids: tuple[int, ...]
    ends: tuple[int, ...]


class ChatTokenizer:
    """A model's tokenizer and chat template. Synchronous and thread-safe.

    Messages cannot contain control tokens (:mod:`budgeting.controls`).

    Args:
        files: a model folder's files.
        now: local time, for templates that print the date.
        cache_tokens: bound of the message cache, in tokens.

    Raises:
        TokenizerError: the files cannot be used.
    """

    def __init__(
        self,
        files: TokenizerFiles,
        *,
        now: Callable[[], datetime] = datetime.now,
        cache_tokens: int = CACHE_TOKENS,
    ) -> None:
        self._vocabulary = Vocabulary(files)
        self._controls = self._vocabulary.controls
        try:
            self._template = ChatTemplate(files.template, files.specials, now=now)
        except TemplateSyntaxError as error:
            raise TokenizerError(files.folder, f"the chat template is malformed: {error}") from error
        self._anchor = ""
        self._generation_ids: tuple[int, ...] = ()
        self._per_message = self._vocabulary.clean_cuts and self._learn_shape()
        self._cache = TokenCache(max_tokens=cache_tokens, max_entries=CACHE_MESSAGES)

    @classmethod
    def from_folder(
        cls, path: str | Path, *, now: Callable[[], datetime] = datetime.now, cache_tokens: int = CACHE_TOKENS
    ) -> ChatTokenizer:
        """Load ``tokenizer.json``, ``tokenizer_config.json``, ``chat_template.jinja``. Blocks on disk.

        Raises:
            TokenizerError: something is missing or malformed; the message names the file.
        """
        return cls(read_tokenizer_files(path), now=now, cache_tokens=cache_tokens)

    @property
    def per_message(self) -> bool:
        """Whether conversations are tokenized message by message."""
        return self._per_message

    @property
    def vocabulary(self) -> int:
        """One more than the largest token id."""
        return self._vocabulary.size

    def encode_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> tuple[int, ...]:
        """Ids of the rendered conversation.

        Raises:
            TemplateRefused: the chat template does not take these messages.
        """
        return self.encode_parts(messages, (), add_generation_prompt=add_generation_prompt).token_ids

    def encode_parts(
        self, messages: Sequence[Message], cuts: Sequence[int], *, add_generation_prompt: bool = True
    ) -> EncodedChat:
        """Ids of the rendered conversation, and where the first ``cuts[i]`` messages end in them.

        Args:
            messages: the conversation.
            cuts: numbers of messages, ascending.
            add_generation_prompt: whether the answer's opening markup follows.

        Raises:
            TemplateRefused: the chat template does not take these messages.
        """
        if self._per_message and messages:
            pieces = [self._piece(message, first=index == 0) for index, message in enumerate(messages)]
            whole = [piece for piece in pieces if piece is not None]
            if len(whole) == len(pieces):
                tail = self._generation_ids if add_generation_prompt else ()
                ends = tuple(sum(len(piece) for piece in whole[:cut]) for cut in cuts)
                return EncodedChat(tuple(chain(*whole, tail)), ends)
        return self.encode_parts_whole(messages, cuts, add_generation_prompt=add_generation_prompt)

    def encode_parts_whole(
        self, messages: Sequence[Message], cuts: Sequence[int], *, add_generation_prompt: bool = True
    ) -> EncodedChat:
        """:meth:`encode_parts` by rendering the conversation at once; no cache. The reference."""
        guarded = any(self._controls.forged_in(message.content) for message in messages)
        if guarded:
            messages = [Message(m.role, self._controls.guard(m.content)) for m in messages]
        rendered = self._template.render(messages, add_generation_prompt=add_generation_prompt)
        if not cuts:
            return EncodedChat(tuple(self._vocabulary.rendered_ids(rendered, guarded=guarded)), ())
        token_ids, token_ends = self._vocabulary.rendered_ids_with_ends(rendered, guarded=guarded)
        ends = []
        for cut in cuts:
            shown = rendered[: self._rendered_end(messages, cut, rendered)]
            ends.append(bisect_right(token_ends, len(self._controls.unguard(shown) if guarded else shown)))
        return EncodedChat(tuple(token_ids), tuple(ends))

    def message_tokens(self, message: Message) -> int:
        """Tokens that a message adds to a conversation it does not open, markup included.

        Exact when :attr:`per_message`; an estimate for planning otherwise.
        """
        if self._per_message:
            piece = self._piece(message, first=False)
            if piece is not None:
                return len(piece)
        return self.text_tokens(message.content) + _MARKUP_TOKENS

    def text_tokens(self, text: str) -> int:
        """Tokens of a text inside a message (control tokens in it count as text)."""
        key = (text,)
        ids = self._cache.get(key)
        if ids is None:
            ids = tuple(self._vocabulary.plain_ids(text))
            self._cache.put(key, ids)
        return len(ids)

    def unseen_chars(self, messages: Iterable[Message]) -> int:
        """How much encoding these messages costs, in characters of text: those cached cost nothing."""
        return sum(
            len(message.content) + MESSAGE_CHARS
            for message in messages
            if (False, message.role, message.content) not in self._cache
            and (True, message.role, message.content) not in self._cache
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Ids of a raw text; control tokens in it are control tokens: its author writes the markup."""
        return tuple(self._vocabulary.raw_ids(text, add_special_tokens=add_special_tokens))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids, control tokens shown. Raises ValueError for an id outside the vocabulary."""
        return self._vocabulary.decode(token_ids)

    def tokens(self, token_ids: Sequence[int]) -> list[str]:
        """The vocabulary's own string for each id. Raises ValueError for an id outside the vocabulary."""
        return self._vocabulary.tokens(token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for; nothing for an id that the vocabulary does not have."""
        return self._vocabulary.token_bytes(token_id)

    def unknown_id(self, token_ids: Sequence[int]) -> int | None:
        """The first id that the vocabulary does not have, if any."""
        return self._vocabulary.unknown_id(token_ids)

    def _learn_shape(self) -> bool:
        """Whether messages may be encoded one by one; learns the generation prompt when so.

        The template's proof says that the text is a sum; what is left to see is that nothing follows the
        messages but the generation prompt, and that it starts with a control token.
        """
        if not self._template.each_message_alone:
            return False
        try:
            self._anchor = self._template.render([_ANCHOR], add_generation_prompt=False)
            twice = self._template.render([_ANCHOR, _ANCHOR], add_generation_prompt=False)
            asked = self._template.render([_ANCHOR], add_generation_prompt=True)
        except TemplateRefused:
            return False  # it wants its roles in a certain order
        if not (twice.startswith(self._anchor) and asked.startswith(self._anchor)):
            return False
        tail = asked[len(self._anchor) :]
        if tail and not self._controls.opens(tail):
            return False
        self._generation_ids = tuple(self._vocabulary.rendered_ids(tail, guarded=False))
        return True

    def _piece(self, message: Message, *, first: bool) -> tuple[int, ...] | None:
        """Ids of one message in its place; none when it cannot be cut off cleanly."""
        key = (first, message.role, message.content)
        ids = self._cache.get(key)
        if ids is not None:
            return ids
        guarded = self._controls.forged_in(message.content)
        shown = Message(message.role, self._controls.guard(message.content)) if guarded else message
        if first:
            piece = self._template.render([shown], add_generation_prompt=False)
        else:
            both = self._template.render([_ANCHOR, shown], add_generation_prompt=False)
            if not both.startswith(self._anchor):
                return None
            piece = both[len(self._anchor) :]
            # Nothing (a role the template leaves out) is as clean as a control token.
            if piece and not self._controls.opens(piece):
                return None
        ids = tuple(self._vocabulary.rendered_ids(piece, guarded=guarded))
        self._cache.put(key, ids)
        return ids

    def _rendered_end(self, messages: Sequence[Message], cut: int, rendered: str) -> int:
        """Where the first ``cut`` messages end in the rendered text, in characters."""
        if cut <= 0:
            return 0
        try:
            start = self._template.render(messages[:cut], add_generation_prompt=False)
        except TemplateRefused:
            start = None  # it does not take the beginning alone
        if start is not None and rendered.startswith(start):
            return len(start)
        # With other words in the messages behind the cut, what stays the same is what does not depend on
        # them; that the next message's opening markup is in it cannot be told here.
        others = [Message(m.role, "\ufdd3") for m in messages[cut:]]
        start = self._template.render([*messages[:cut], *others], add_generation_prompt=False)
        return _common(start, rendered)


def _common(a: str, b: str) -> int:
    """Length of the longest common beginning."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[:middle] == b[:middle]:
            low = middle
        else:
            high = middle - 1
    return low
