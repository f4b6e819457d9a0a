"""A model's vocabulary: texts to ids and back; control tokens come from the template only."""

import json
import re
from array import array
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Final

from tokenizers import Tokenizer

from budgeting.byte_bpe import ByteBpe, NotByteBpe, TokenBytes
from budgeting.controls import ControlTokens
from budgeting.errors import TokenizerError
from budgeting.tokenizer_files import TokenizerFiles, read_tokenizer_files

LARGE_CHARS: Final = 100_000
"""A longer text is encoded in another process, if there is one: freeing the memory of its encoding blocks all
threads of the process (130 ms for 2.4 MB), and the system gets that memory back slowly."""

# Numbers of a long sequence that are handled at once: 0.2 ms, in which no other thread runs.
_NUMBERS_AT_ONCE = 16_384

EncodeElsewhere = Callable[[bytes], bytes]  # answers a job of :func:`prepare_encode`

# Ids before a text and the characters that they are in, the same behind it.
Markup = tuple[list[int], int, list[int], int]

# The first byte of a job says which ids are wanted, and whether with their ends.
_MARKUP, _SPECIALS, _ENDS = 1, 2, 4


class Vocabulary:
    """A model's tokenizer, without its template. Thread-safe. Raises TokenizerError for an unusable file.

    ``clean_cuts``: a text may be cut before any control token without changing an id (no normalizer changes
    them, none strips spaces or needs whole words); ``cuts_anywhere``: and before all that occur in it, also
    those that no template wrote. ``encoder`` names the library that encodes plain text,
    with the reason where it is not ``tiktoken``. ``elsewhere`` encodes texts of more than LARGE_CHARS.
    """

    def __init__(self, files: TokenizerFiles, *, elsewhere: EncodeElsewhere | None = None) -> None:
        self._elsewhere = elsewhere
        self._tokenizer = _load(files)
        self._text_tokenizer = _load(files)
        self._text_tokenizer.encode_special_tokens = True

        ids = set(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self.size = max(ids, default=-1) + 1
        self._holes = frozenset(set(range(self.size)) - ids)

        added = self._tokenizer.get_added_tokens_decoder()
        special = {token_id: token for token_id, token in added.items() if token.special}
        # The ids of control tokens, which an answer's text leaves out.
        self.special = frozenset(special)
        self._added = {token_id: token.content.encode() for token_id, token in added.items()}
        self._bytes = TokenBytes(files.tokenizer_json)
        normalized = self._tokenizer.normalizer is not None and any(t.normalized for t in special.values())
        self.controls = ControlTokens({t.content: i for i, t in special.items()}, always=normalized)
        self.clean_cuts = not normalized and not any(
            t.lstrip or t.rstrip or t.single_word for t in special.values()
        )
        # A vocabulary that has a control token as an ordinary piece can produce it from plain text.
        self._spellable = any(
            token_id in self._text_tokenizer.encode(content, add_special_tokens=False).ids
            for content, token_id in self.controls.ids.items()
        )
        self._fast: ByteBpe | None = None
        try:
            self._fast = ByteBpe(files.tokenizer_json)
            self.encoder = "tiktoken"
        except NotByteBpe as reason:
            self.encoder = f"tokenizers ({reason})"
        # Text with added tokens that are not special is encoded by `tokenizers`, which finds them.
        whole = sorted((t.content for t in added.values() if not t.special), key=len, reverse=True)
        self._whole = re.compile("|".join(map(re.escape, whole))) if whole else None
        # Only if `tokenizers` searches for all at once.
        self.cuts_anywhere = (
            self.clean_cuts
            and len(self.controls.ids) == len(special)
            and len({token.normalized for token in special.values()}) <= 1
        )
        self._cuttable = self._fast is not None and self.cuts_anywhere
        # One shared object for each id: an id in a cache then takes 8 bytes instead of 40.
        self._shared = list(range(self.size))

    def raw_ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of a text whose author writes the markup: control tokens in it are control tokens."""
        return self._encoded(text, _MARKUP | (_SPECIALS if add_special_tokens else 0))[0]

    def plain_ids(self, text: str) -> list[int]:
        """Ids of a text as part of a message: nothing in it is a control token."""
        if self._fast is not None and (self._whole is None or self._whole.search(text) is None):
            ids = self._fast.ids(text)
            if ids is not None:
                return ids
        return self._encoded(text, 0)[0]

    def shared(self, ids: Sequence[int]) -> tuple[int, ...]:
        """The same ids, as int objects that all cached tuples share."""
        if 1 < len(ids) <= _NUMBERS_AT_ONCE:
            shared: tuple[int, ...] = itemgetter(*ids)(self._shared)  # in half the time
            return shared
        return tuple(_in_parts(ids, self._shared.__getitem__))

    def markup(self, before: str, after: str) -> Markup | None:
        """The markup around texts; ``None`` if a control token may begin or end in a text."""
        halves = [(token[:at], token[at:]) for token in self.controls.ids for at in range(1, len(token))]
        if any(before.endswith(begin) or after.startswith(end) for begin, end in halves):
            return None
        start = len(before) - len(self.controls.split(before)[-1])
        end = len(after) - len(closing := self.controls.split(after)[0])
        head, tail = before[:start], after.removeprefix(closing)
        return self.rendered_ids(head, guarded=False), start, self.rendered_ids(tail, guarded=False), end

    def rendered_ids(self, rendered: str, *, guarded: bool, markup: Markup | None = None) -> list[int]:
        """Ids of rendered text (a message in its ``markup``); ``guarded``: ``controls.guard`` was applied."""
        if not guarded and not (
            self._cuttable and (self._whole is None or self._whole.search(rendered) is None)
        ):
            return self._encoded(rendered, _MARKUP)[0]
        if markup is not None and not guarded:
            head, start, tail, end = markup
            return [*head, *self.plain_ids(rendered[start : len(rendered) - end]), *tail]
        ids: list[int] = []
        for piece, token_id in self.controls.segments(rendered):
            if token_id is not None:
                ids.append(token_id)
                continue
            for text in self._plain(piece) if guarded else (piece,):
                ids += self.plain_ids(text)
        return ids

    def rendered_ids_with_ends(self, rendered: str, *, guarded: bool) -> tuple[list[int], list[int]]:
        """The ids and, for each, where it ends in the unguarded text, in characters."""
        if not guarded:
            return self._encoded(rendered, _MARKUP | _ENDS)
        ids: list[int] = []
        ends: list[int] = []
        at = 0
        for piece, token_id in self.controls.segments(rendered):
            if token_id is not None:
                at += len(piece)
                ids.append(token_id)
                ends.append(at)
                continue
            for text in self._plain(piece):
                found, found_ends = self._encoded(text, _ENDS)
                ids += found
                ends += [at + end for end in found_ends]
                at += len(text)
        return ids, ends

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids. Raises ValueError for an id outside the vocabulary."""
        self._check(token_ids)
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def tokens(self, token_ids: Sequence[int]) -> list[str]:
        """The vocabulary's own string for each id. Raises ValueError for an id outside the vocabulary."""
        self._check(token_ids)
        # One string for each id that occurs. Building a set of all ids would block other threads.
        names: dict[int, str] = {}
        for token_id in token_ids:
            if token_id not in names:
                names[token_id] = self._tokenizer.id_to_token(token_id) or ""
        return [names[token_id] for token_id in token_ids]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for; empty for an id that the vocabulary does not have."""
        content = self._added.get(token_id)
        return self._bytes.of(self._tokenizer.id_to_token(token_id) or "") if content is None else content

    def unknown_id(self, token_ids: Sequence[int]) -> int | None:
        """The first id that the vocabulary does not have, if any."""
        known = range(self.size)
        for start in range(0, len(token_ids), _NUMBERS_AT_ONCE):
            part = token_ids[start : start + _NUMBERS_AT_ONCE]
            if self._holes or min(part) < 0 or max(part) >= self.size:
                for token_id in part:
                    if token_id not in known or token_id in self._holes:
                        return token_id
        return None

    def _encoded(self, text: str, wanted: int) -> tuple[list[int], list[int]]:
        """The ids of a text; with ``_ENDS`` also the end of each in the text, in characters."""
        if self._elsewhere is not None and len(text) > LARGE_CHARS:
            numbers = array("I", self._elsewhere(bytes([wanted]) + text.encode()))
            count = len(numbers) // 2 if wanted & _ENDS else len(numbers)
            return _in_parts(numbers[:count], self._shared.__getitem__), _in_parts(numbers[count:], int)
        tokenizer = self._tokenizer if wanted & _MARKUP else self._text_tokenizer
        specials = bool(wanted & _SPECIALS)
        if wanted & _ENDS:
            encoding = tokenizer.encode_batch([text], add_special_tokens=specials)[0]
            return encoding.ids, [end for _, end in encoding.offsets]
        # Unlike `encode`, the batch call lets other threads run, and leaves out offsets: 1.5 to 2 times as
        # fast.
        return tokenizer.encode_batch_fast([text], add_special_tokens=specials)[0].ids, []

    def _check(self, token_ids: Sequence[int]) -> None:
        unknown = self.unknown_id(token_ids)
        if unknown is not None:
            raise ValueError(f"token id {unknown} is not in the vocabulary; allowed: ids below {self.size}")

    def _plain(self, text: str) -> list[str]:
        return self.controls.split_at_breaks(text) if self._spellable else [self.controls.unguard(text)]


def prepare_encode(folder: str) -> EncodeElsewhere:
    """A function that encodes large texts with a model folder's tokenizer: from a job to its ids, then their
    ends, as unsigned integers of this machine."""
    vocabulary = Vocabulary(read_tokenizer_files(folder))

    def encode(job: bytes) -> bytes:
        ids, ends = vocabulary._encoded(job[1:].decode(), job[0])
        return array("I", ids + ends).tobytes()

    return encode


def _in_parts(numbers: Sequence[int], of: Callable[[int], int]) -> list[int]:
    """``of`` each of the numbers; other threads may run between parts."""
    found: list[int] = []
    for start in range(0, len(numbers), _NUMBERS_AT_ONCE):
        found += map(of, numbers[start : start + _NUMBERS_AT_ONCE])
    return found


def _load(files: TokenizerFiles) -> Tokenizer:
    """The tokenizer without truncation or padding; every named special token is marked special."""
    try:
        json.loads(files.tokenizer_json)
        tokenizer = Tokenizer.from_str(files.tokenizer_json)
    except Exception as error:  # `tokenizers` raises Exception itself
        raise TokenizerError(files.folder, f"tokenizer.json cannot be used: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    for name, content in files.specials.items():
        if tokenizer.token_to_id(content) is None:
            raise TokenizerError(
                files.folder, f"{name} is {content!r}, which tokenizer.json does not have; needed: one it has"
            )
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    tokenizer.add_special_tokens([content for content in files.specials.values() if content not in known])
    return tokenizer
