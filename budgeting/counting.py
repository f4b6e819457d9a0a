"""Exact counting: the token ids that an engine will see for a conversation, or for a text.

Where the template is proved to render every message on its own (:mod:`budgeting.template_analysis`) and every
message starts with a control token, a conversation's ids are its messages' ids in a row, because text never
merges across a control token. Messages are then tokenized one by one and cached; where the template only puts
markup around a text, Jinja is not called again. Other conversations are rendered and tokenized as a whole.
Both ways give the same ids.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from sys import getsizeof
from typing import Any

from jinja2 import TemplateSyntaxError
from msgspec import Struct, structs

from budgeting.errors import TemplateRefused, TokenizerError
from budgeting.forms import learn_system_support
from budgeting.template import (
    CONTINUES,
    GENERATES,
    ChatTemplate,
    RenderElsewhere,
    left_open,
    split_ending,
)
from budgeting.template_analysis import MARKER, Frame, frame_in
from budgeting.template_input import ShownTools, shown_tools, texts_in
from budgeting.token_cache import TokenCache
from budgeting.token_ids import PieceIds, TokenIds, joined
from budgeting.tokenizer_files import read_tokenizer_files
from budgeting.values import NO_KWARGS, Message, Role, Tool
from budgeting.vocabulary import EncodeElsewhere, Markup, Vocabulary

# Bound of the caches: 200 conversations of 50,000 tokens (600 KiB each, texts and ids), or 2,000 of 3,600.
CACHE_BYTES = 128 * 1024 * 1024
# One part in this many is for the token counts of texts, and as much for those of tools, for tools as
# templates get them, and for the beginnings of conversations as texts.
_COUNTS_SHARE = 16

# The cost of a conversation that is rendered in another process: more than is ever done on the event loop.
NEVER_INLINE_CHARS = 1 << 30
# What rendering a message costs, in characters of text that could be tokenized meanwhile: 45 µs through Jinja
# (2.9 GHz core, demo model), 3 µs around a learned frame; 2.6 characters a microsecond by `tokenizers`.
MESSAGE_CHARS = 117
FRAMED_MESSAGE_CHARS = 8
# How many times as fast as `tokenizers` tiktoken is: measured 3.9 with the demo model, 29,000 characters.
_TIKTOKEN_SPEED = 4

# Markup of one message, where it cannot be distinguished from its text: `<|im_start|>`, role, line end,
# `<|im_end|>`, line end, and one to spare. Only estimates use it.
_MARKUP_TOKENS = 6

# Stands for other words; a noncharacter, which no text contains.
_OTHER = "\ufdd3"
# Rendered before a message to find what the message adds.
_ANCHOR = Message(Role.USER, "x")
_SYSTEM = Message(Role.SYSTEM, "x")
# The ids of each message, and the positions of those that must be encoded.
_Pieces = tuple[list[tuple[int, ...] | None], list[int]]
_NO_PIECES: tuple[Sequence[Message], _Pieces] = (), ([], [])


class EncodedChat(Struct, frozen=True):
    """A conversation's ids, and the number of leading ids that stand for the messages before each cut; an id
    that reaches over the cut is not counted."""

    token_ids: TokenIds
    ends: tuple[int, ...]
    messages: Sequence[Message]  # as the template takes them


class _Rendered(Struct, frozen=True):
    """A conversation as text, and where in it the messages before each cut end, in characters."""

    text: str
    guarded: bool  # ControlTokens.guard was applied to what the caller wrote
    messages: Sequence[Message]  # as the template takes them
    ends: tuple[int, ...]


class ChatTokenizer:
    """The tokenizer and chat template of a model's folder. Synchronous and thread-safe; loading blocks.

    Messages cannot contain control tokens (:mod:`budgeting.controls`). ``cache_bytes`` bounds the caches of
    texts and ids; ``elsewhere`` renders costly templates, and ``encode_elsewhere`` encodes large texts, in
    other processes. Raises TokenizerError naming the unusable file.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        cache_bytes: int = CACHE_BYTES,
        elsewhere: RenderElsewhere | None = None,
        encode_elsewhere: EncodeElsewhere | None = None,
    ) -> None:
        files = read_tokenizer_files(folder)
        self._vocabulary = vocabulary = Vocabulary(files, elsewhere=encode_elsewhere)
        self._controls = vocabulary.controls
        # One more than the largest token id, and the method of counting, for operators.
        self.vocabulary, self.encoder = vocabulary.size, vocabulary.encoder
        self.decode, self.tokens = vocabulary.decode, vocabulary.tokens
        self.token_bytes, self.unknown_id = vocabulary.token_bytes, vocabulary.unknown_id
        try:
            self._template = ChatTemplate(
                files.template, files.specials, now=datetime.now, elsewhere=elsewhere
            )
        except TemplateSyntaxError as error:
            raise TokenizerError(files.folder, f"the chat template is malformed: {error}") from error
        self._system_support = learn_system_support(
            lambda messages: self._template.render(messages, add_generation_prompt=False)
        )
        self.as_sent = self._system_support.fold
        self._anchor = ""
        self._generation_ids: tuple[int, ...] = ()
        # Whether conversations are tokenized message by message.
        self.per_message = self._vocabulary.clean_cuts and self._learn_shape()
        self._frames = self._learn_frames() if self.per_message and self._template.frames_only else {}
        # A factor on the amount of text that is encoded on the event loop.
        self.speed = _TIKTOKEN_SPEED if self._vocabulary.encoder == "tiktoken" else 1
        self._message_chars = (FRAMED_MESSAGE_CHARS if self._frames else MESSAGE_CHARS) * self.speed
        counts_bytes = cache_bytes // _COUNTS_SHARE
        self._cache: TokenCache[tuple[int, ...]] = TokenCache(cache_bytes - 4 * counts_bytes)
        # The last conversation given to `unseen_chars`, and its cached pieces; the last thread's value stays.
        self._last_pieces = _NO_PIECES
        self._counts: TokenCache[int] = TokenCache(counts_bytes)
        self._tool_counts: TokenCache[tuple[int, int]] = TokenCache(counts_bytes)
        self._tools_shown: TokenCache[tuple[ShownTools | None, str]] = TokenCache(counts_bytes)
        self._beginnings: TokenCache[tuple[str | None]] = TokenCache(counts_bytes)

    @property
    def cache_bytes(self) -> int:
        of_tools = self._tool_counts.bytes + self._tools_shown.bytes
        return self._cache.bytes + self._counts.bytes + of_tools + self._beginnings.bytes

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
        return joined(self.encode_parts(messages, (), tools=tools, kwargs=kwargs).token_ids)

    def encode_parts(
        self,
        messages: Sequence[Message],
        cuts: Sequence[int],
        *,
        tools: Sequence[Tool] = (),
        kwargs: Mapping[str, object] = NO_KWARGS,
    ) -> EncodedChat:
        """Ids of the rendered conversation, and where the first ``cuts[i]`` messages end in them.

        ``cuts`` ascend; the first is the number of system messages that open it. Tools that the template
        shows in front of the first turn end at that cut too. If messages are encoded one by one, the template
        reads no variable but ``tools``. Raises TemplateRefused.
        """
        alone = self.per_message and messages and not (tools and self._template.reads_tools)
        alone = alone and CONTINUES not in kwargs
        if alone and self.as_sent(messages, cuts[0] if cuts else None) is messages:
            # A plan needs the pieces twice: in `unseen_chars`, and here.
            (last_messages, pieces), self._last_pieces = self._last_pieces, _NO_PIECES
            if last_messages != messages:
                pieces = self._pieces(messages)
            found = self._with_missing(*pieces, messages)
            if found is not None:
                ends = [0, *accumulate(map(len, found))]
                length = ends[-1]
                if kwargs.get(GENERATES) is not False:
                    found.append(self._generation_ids)
                    length += len(self._generation_ids)
                return EncodedChat(PieceIds(found, length), tuple(map(ends.__getitem__, cuts)), messages)
        rendered = self._rendered(messages, cuts, tools, kwargs)
        return self._in_segments(rendered) if self._may_cut(rendered) else self._as_one(rendered)

    def encode_parts_whole(
        self,
        messages: Sequence[Message],
        cuts: Sequence[int],
        *,
        tools: Sequence[Tool] = (),
        kwargs: Mapping[str, object] = NO_KWARGS,
    ) -> EncodedChat:
        """:meth:`encode_parts` by encoding the rendered conversation as one text, without cached ids: the
        reference result."""
        return self._as_one(self._rendered(messages, cuts, tools, kwargs))

    def _rendered(
        self,
        messages: Sequence[Message],
        cuts: Sequence[int],
        tools: Sequence[Tool],
        kwargs: Mapping[str, object],
    ) -> _Rendered:
        shown, shown_texts = self._shown(tools)
        written = [shown_texts, *texts_in(kwargs)]
        for message in messages:
            written += (message.content,) if message.plain else message.texts
        # A token across two texts would only guard in vain.
        guarded = self._controls.forged_in("\0".join(written))
        render = partial(
            self._template.render,
            tools=shown,
            kwargs=kwargs,
            guard=self._controls.guard if guarded else None,
        )
        folded = self.as_sent(messages, cuts[0] if cuts else None)
        asked = kwargs.get(GENERATES) is not False and CONTINUES not in kwargs
        rendered = render(folded, add_generation_prompt=asked)
        if CONTINUES in kwargs and folded:
            content = folded[-1].content
            rendered = left_open(rendered, self._controls.guard(content) if guarded else content)
        recurs = tools, kwargs, guarded  # system messages and tools do; what follows them grows
        tools_first = tools and messages and self._template.reads_tools
        ends: dict[int, int] = {} if tools_first else {0: 0}
        for cut in cuts:
            if cut in ends:
                continue
            end = None
            if cut > cuts[0] > 0 and folded is messages and cut > len(messages) // 2:
                opening = self._begun(render, recurs, cuts[0], messages[: cuts[0]])
                short = [*messages[: cuts[0]], *messages[cut:]]
                end = _end_before(opening, partial(render, short, add_generation_prompt=asked), rendered)
            if end is None:
                begun = partial(self._begun, render, recurs if cut == cuts[0] else None, cut + 1)
                end = self._rendered_end(
                    begun, messages, cut, rendered, cuts[0], folded=folded is not messages
                )
            ends[cut] = end
        return _Rendered(rendered, guarded, folded, tuple(map(ends.__getitem__, cuts)))

    def _shown(self, tools: Sequence[Tool]) -> tuple[ShownTools | None, str]:
        """The template's variable ``tools``, and all texts in it."""
        if not tools:
            return None, ""
        key = tuple(tools)
        found = self._tools_shown.get(key)
        if found is None:
            shown = shown_tools(tools)
            found = shown, "\0".join(texts_in(shown))
            self._tools_shown.put(key, found, 4 * getsizeof(found[1]))  # with the key's tools
        return found

    def _begun(
        self,
        render: Callable[..., str],
        recurs: tuple[Sequence[Tool], Mapping[str, object], bool] | None,
        most: int,
        messages: Sequence[Message],
    ) -> str | None:
        """The beginning of a conversation as text, cached if it ``recurs`` and has at most ``most`` messages;
        ``None`` if the template does not take it alone."""
        times = self._template.times()
        key: Hashable = None
        if recurs and times is not None and len(messages) <= most:
            tools, kwargs, guarded = recurs
            variables = json.dumps(dict(split_ending(kwargs)[1]), sort_keys=True)
            key = (tuple(messages), tuple(tools), variables, guarded, times)
            found = self._beginnings.get(key)
            if found is not None:
                return found[0]
        text = None
        with suppress(TemplateRefused):
            text = render(messages, add_generation_prompt=False)
        if key is not None:
            texts = chain(*(message.texts for message in messages), *map(structs.astuple, tools))
            size = sum(len(one) for one in texts if isinstance(one, str))
            self._beginnings.put(key, (text,), size + getsizeof(text))
        return text

    def _may_cut(self, rendered: _Rendered) -> bool:
        return self._vocabulary.clean_cuts and (rendered.guarded or self._vocabulary.cuts_anywhere)

    def _as_one(self, rendered: _Rendered) -> EncodedChat:
        text, guarded = rendered.text, rendered.guarded
        if not rendered.ends:
            ids = self._vocabulary.rendered_ids(text, guarded=guarded)
            return EncodedChat(tuple(ids), (), rendered.messages)
        ids, ends = self._vocabulary.rendered_ids_with_ends(text, guarded=guarded)
        counts = tuple([bisect_right(ends, self._length(text[:end], guarded)) for end in rendered.ends])
        return EncodedChat(tuple(ids), counts, rendered.messages)

    def _in_segments(self, rendered: _Rendered) -> EncodedChat:
        """The same ids, encoded from one control token to the next and cached: a conversation's next request
        has the same segments and a few more."""
        guarded, segments = rendered.guarded, self._controls.cut(rendered.text)
        pieces: list[tuple[int, ...]] = []
        for segment, ids in zip(
            segments, self._cache.get_all([(one, guarded) for one in segments]), strict=True
        ):
            pieces.append(self._segment(segment, guarded) if ids is None else ids)
        starts = [0, *accumulate(map(len, segments))]
        counts = [0, *accumulate(map(len, pieces))]
        ends = []
        for end in rendered.ends:
            place = bisect_right(starts, end) - 1
            count = counts[place]
            if inside := end - starts[place]:
                count += self._ids_before(segments[place], inside, guarded)
            ends.append(count)
        return EncodedChat(PieceIds(pieces, counts[-1]), tuple(ends), rendered.messages)

    def _segment(self, segment: str, guarded: bool) -> tuple[int, ...]:
        ids = self._vocabulary.shared(self._vocabulary.rendered_ids(segment, guarded=guarded))
        key = segment, guarded
        self._cache.put(key, ids, getsizeof(key) + getsizeof(segment) + getsizeof(ids))
        return ids

    def _ids_before(self, segment: str, end: int, guarded: bool) -> int:
        """The number of the segment's ids that end before character ``end`` of it."""
        key = segment, end, guarded
        count = self._counts.get(key)
        if count is None:
            ends = self._vocabulary.rendered_ids_with_ends(segment, guarded=guarded)[1]
            count = bisect_right(ends, self._length(segment[:end], guarded))
            self._counts.put(key, count, getsizeof(key) + getsizeof(segment))
        return count

    def _length(self, text: str, guarded: bool) -> int:
        return len(self._controls.unguard(text) if guarded else text)

    def message_tokens(self, message: Message) -> int:
        """Tokens that a message adds after the first one, markup included.

        Exact when :attr:`per_message`; an estimate for planning otherwise.
        """
        if self.per_message and (self._system_support.later or message.role is not Role.SYSTEM):
            piece = self._cache.get(message.without_parts if message.parts else message)
            if piece is None:
                piece = self._piece(message, first=False)
            if piece is not None:
                return len(piece)
        return sum(map(self.text_tokens, message.texts)) + _MARKUP_TOKENS

    def tool_tokens(
        self, tools: tuple[Tool, ...], kwargs: Mapping[str, object], *, system: bool
    ) -> tuple[int, int]:
        """Tokens that tools add to a short conversation: in front of its first turn, and in all.

        ``system``: the conversation has a system message. Raises TemplateRefused.
        """
        if not (tools and self._template.reads_tools):
            return 0, 0
        key = (tools, system, json.dumps(dict(kwargs), sort_keys=True))
        found = self._tool_counts.get(key)
        if found is not None:
            return found
        sizes = []
        messages, cuts = ([_SYSTEM, _ANCHOR], (1,)) if system else ([_ANCHOR], (0,))
        for given in (tools, ()):
            chat = self.encode_parts_whole(messages, cuts, tools=given, kwargs=kwargs)
            sizes.append((chat.ends[0], len(chat.token_ids)))
        (before, whole), (bare_before, bare_whole) = sizes
        found = max(0, before - bare_before), max(0, whole - bare_whole)
        texts = sum(getsizeof(text) for tool in tools for text in structs.astuple(tool) if text)
        self._tool_counts.put(key, found, texts + getsizeof(key[2]))
        return found

    def text_tokens(self, text: str) -> int:
        """Tokens of a text inside a message (control tokens in it count as text)."""
        count = self._counts.get(text)
        if count is None:
            count = len(self._vocabulary.plain_ids(text))
            self._counts.put(text, count, getsizeof(text))
        return count

    def unseen_chars(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> int:
        """Cost of encoding a conversation, in characters of text; cached messages cost nothing."""
        if self._template.is_bounded or (tools and self._template.reads_tools):
            return NEVER_INLINE_CHARS
        self._last_pieces = messages, (pieces := self._pieces(messages))
        chars = 0
        for message in map(messages.__getitem__, pieces[1]):
            whole = message.tool_calls or message.reasoning
            chars += sum(map(len, message.texts)) if whole else len(message.content)
            chars += self._message_chars
        return chars

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Ids of a raw text; control tokens in it are control tokens: its author writes the markup."""
        return tuple(self._vocabulary.raw_ids(text, add_special_tokens=add_special_tokens))

    def text_bytes(self, token_id: int) -> bytes:
        """The bytes that one token adds to an answer's text; none for a control token."""
        return b"" if token_id in self._vocabulary.special else self._vocabulary.token_bytes(token_id)

    def _learn_shape(self) -> bool:
        """Whether messages may be encoded one by one; stores the ids of the generation prompt if so.

        The template's analysis proves that every message renders on its own. This method checks that only the
        generation prompt follows the messages, and that it starts with a control token.
        """
        if not self._template.each_message_alone:
            return False
        try:
            self._anchor = self._template.render([_ANCHOR], add_generation_prompt=False)
            twice = self._template.render([_ANCHOR, _ANCHOR], add_generation_prompt=False)
            asked = self._template.render([_ANCHOR], add_generation_prompt=True)
        except TemplateRefused:
            return False  # the template requires a certain order of roles
        if not (twice.startswith(self._anchor) and asked.startswith(self._anchor)):
            return False
        tail = asked[len(self._anchor) :]
        if tail and not self._controls.opens(tail):
            return False
        self._generation_ids = tuple(self._vocabulary.rendered_ids(tail, guarded=False))
        return True

    def _pieces(self, messages: Sequence[Message]) -> _Pieces:
        """The cached ids of each message of a conversation; ``None`` for a message that is not cached."""
        keys: list[Hashable] = [one.without_parts if one.parts else one for one in messages]
        if keys:
            keys[0] = True, keys[0]  # the first message has another frame
        pieces = self._cache.get_all(keys)
        return pieces, [at for at, piece in enumerate(pieces) if piece is None]

    def _with_missing(
        self, pieces: Sequence[tuple[int, ...] | None], missing: Sequence[int], messages: Sequence[Message]
    ) -> list[tuple[int, ...]] | None:
        """All pieces, the missing ones encoded; ``None`` when one of them cannot be cut off cleanly."""
        found: list[Any] = list(pieces)
        for index in missing:
            found[index] = self._piece(messages[index], first=index == 0)
            if found[index] is None:
                return None
        return found

    def _piece(self, message: Message, *, first: bool) -> tuple[int, ...] | None:
        """Encode and cache one message in its place; ``None`` when it cannot be cut off cleanly."""
        message = message.without_parts if message.parts else message
        plain = message.plain
        texts = (message.content,) if plain else message.texts
        guarded = any(map(self._controls.forged_in, texts))
        framed = self._frames.get((first, message.role)) if plain else None
        frame, markup = framed or (None, None)
        if frame is None:
            rendered = self._alone(message, first=first, guarded=guarded)
            if rendered is None:
                return None
        else:
            rendered = frame.around(self._controls.guard(message.content) if guarded else message.content)
        encoded = self._vocabulary.rendered_ids(rendered, guarded=guarded, markup=markup)
        ids = self._vocabulary.shared(encoded)
        key = (True, message) if first else message
        size = getsizeof(key) + getsizeof(message) + sum(map(getsizeof, texts))
        self._cache.put(key, ids, size + getsizeof(ids))
        return ids

    def _learn_frames(self) -> dict[tuple[bool, Role], tuple[Frame, Markup | None]]:
        """The markup around a message's text, by whether the message is the first, and by its role."""
        frames: dict[tuple[bool, Role], tuple[Frame, Markup | None]] = {}
        for role in Role:
            for first in (True, False):
                piece = None
                with suppress(TemplateRefused):  # refused: requests will get the reason
                    piece = self._alone(Message(role, MARKER), first=first)
                frame = frame_in(piece) if piece is not None else None
                if frame is not None:
                    frames[first, role] = frame, self._vocabulary.markup(frame.before, frame.after)
        return frames

    def _alone(self, message: Message, *, first: bool, guarded: bool = False) -> str | None:
        """One message as rendered in its place; ``None`` when it cannot be cut off cleanly."""
        guard = self._controls.guard if guarded else None
        if first:
            return self._template.render([message], add_generation_prompt=False, guard=guard)
        both = self._template.render([_ANCHOR, message], add_generation_prompt=False, guard=guard)
        if not both.startswith(self._anchor):
            return None
        piece = both[len(self._anchor) :]
        # An empty piece (of a role that the template leaves out) is as clean as a control token.
        if piece and not self._controls.opens(piece):
            return None
        return piece

    def _rendered_end(
        self,
        begun: Callable[[Sequence[Message]], str | None],
        messages: Sequence[Message],
        cut: int,
        rendered: str,
        opening: int,
        *,
        folded: bool,
    ) -> int:
        """Where the first ``cut`` messages end in the rendered text, in characters."""
        if cut and (not folded or cut <= opening):  # else the beginning alone is folded differently
            start = begun(self._system_support.fold(messages[:cut], opening))
            if start is not None and rendered.startswith(start):
                return len(start)
        # Rendered again with other words after the cut, the common beginning is what does not depend on those
        # messages. It may include the opening markup of the next message.
        others = [structs.replace(m, content=_OTHER) for m in messages[cut:]]
        for count in sorted({min(1, len(others)), len(others)}):
            start = begun(self._system_support.fold([*messages[:cut], *others[:count]], opening))
            same = _common(start or "", rendered)
            # With the next message alone only if those after it change nothing before its words.
            if count == len(others) or (start is not None and start.startswith(_OTHER, same)):
                return same
        return 0


def _end_before(opening: str | None, shorter: Callable[[], str], rendered: str) -> int | None:
    """Where the messages end that the ``shorter`` conversation leaves out behind its ``opening``; ``None``
    if the others are rendered differently without them."""
    with suppress(TemplateRefused):
        if opening and rendered.startswith(opening):
            short = shorter()
            rest = short[len(opening) :]
            if short.startswith(opening) and rendered.endswith(rest):
                return len(rendered) - len(rest)
    return None


def _common(one: str, other: str) -> int:
    """The number of first characters that both texts have."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
