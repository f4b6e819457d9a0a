"""Summaries of older turns that are not sent: their most important sentences.

A :class:`Summarizer` is called while a prompt is planned, so it answers at once. The one here picks sentences
by the words they share with the conversation, in any language: a word is a run of letters or digits, or two
neighbouring characters of a script without spaces; very frequent and unique words count little.
"""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from sys import getsizeof
from typing import Protocol

from budgeting.sentences import sentences
from budgeting.token_cache import TokenCache
from budgeting.values import Message, Role

# Bounds on the sentences and characters that are read, newest first, and so on the work of a request.
MAX_SENTENCES = 256
MAX_CHARS = 32_768
MAX_SENTENCE_CHARS = 400  # a longer sentence is cut off here: it is a list or a log, not a sentence
# Bound of both caches together: summaries, and the words of messages (about 25 bytes a character of text).
CACHE_BYTES = 8 * 1024 * 1024

_UNSPACED = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")
_WORD = re.compile(rf"{_UNSPACED.pattern}+|[^\W_]+")
_DIGIT = re.compile(r"\d")
# Factors on a sentence's score: written by a user, has digits (a fact), first of its message, newest.
_USER, _FACT, _OPENING, _RECENT = 1.25, 1.2, 1.1, 1.3
# Subtracted from the number of sentences with a word: a word in only one sentence connects it to no other.
_ONCE = 0.75
_FLOOR = 0.4  # sentences below this share of the best score are left out, even when there is room
_LABEL_TOKENS = 4  # tokens of the label and the line end of a message's first sentence, over-estimated

Count = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class Summary:
    """A summary's text, and the number of turns that it summarizes."""

    text: str
    turns: int


class Summarizer(Protocol):
    """Makes summaries of older turns of at most ``max_tokens`` tokens by ``count``. Thread-safe, never waits,
    deterministic while nothing new is learned. Knowledge from an owner's turns serves that owner only."""

    def summarize(
        self, turns: Sequence[Message], *, max_tokens: int, count: Count, owner: str = ""
    ) -> Summary | None:
        """A summary of these turns, oldest first; none when nothing useful fits."""


@dataclass(frozen=True, slots=True)
class _Sentence:
    text: str
    words: frozenset[str]
    factor: float


class ExtractiveSummarizer:
    """Picks sentences; needs no model. Summaries are cached by their source turns, within ``CACHE_BYTES``."""

    def __init__(self) -> None:
        self._summaries: TokenCache[Summary | str] = TokenCache(CACHE_BYTES // 4)
        self._read: TokenCache[tuple[_Sentence, ...]] = TokenCache(CACHE_BYTES - CACHE_BYTES // 4)

    def summarize(
        self, turns: Sequence[Message], *, max_tokens: int, count: Count, owner: str = ""
    ) -> Summary | None:
        """The best sentences in their order, those of each message after its role."""
        if max_tokens <= _LABEL_TOKENS or not turns:
            return None
        key = beginnings(turns, str(max_tokens))[-1]
        found = self._summaries.get(key)
        if found is None:
            found = self._pick(turns, max_tokens, count) or ""
            size = getsizeof(found.text) if isinstance(found, Summary) else 0
            self._summaries.put(key, found, size + getsizeof(key))
        return found if isinstance(found, Summary) else None

    def _pick(self, turns: Sequence[Message], max_tokens: int, count: Count) -> Summary | None:
        places, candidates = self._candidates(turns)
        order = _ranked(candidates)
        chosen: set[int] = set()
        seen: set[str] = set()
        labelled: set[int] = set()
        room = max_tokens
        for at in order:
            sentence, turn = candidates[at].text, places[at]
            needed = count(sentence) + 1 + (0 if turn in labelled else _LABEL_TOKENS)
            if needed > room or sentence in seen:
                continue
            room -= needed
            chosen.add(at)
            seen.add(sentence)
            labelled.add(turn)
            if room <= _LABEL_TOKENS:
                break
        # Drop the worst until the whole fits: a joined text may have other tokens than its parts.
        for worst in (-1, *[at for at in reversed(order) if at in chosen]):
            chosen.discard(worst)
            text = _written(turns, places, candidates, sorted(chosen))
            if text and count(text) <= max_tokens:
                return Summary(text, len(turns))
        return None

    def _candidates(self, turns: Sequence[Message]) -> tuple[list[int], list[_Sentence]]:
        """The index of each sentence's turn, and the newest sentences within the bounds, in order."""
        places: list[int] = []
        found: list[_Sentence] = []
        chars = 0
        for at in range(len(turns) - 1, -1, -1):
            own = self._sentences(turns[at])
            chars += len(turns[at].content)
            found += reversed(own)
            places += [at] * len(own)
            if len(found) >= MAX_SENTENCES or chars >= MAX_CHARS:
                break
        return places[:MAX_SENTENCES][::-1], found[:MAX_SENTENCES][::-1]

    def _sentences(self, turn: Message) -> tuple[_Sentence, ...]:
        key = (turn.role, turn.content)
        found = self._read.get(key)
        if found is None:
            # The end of a very long message is its newest part.
            texts = sentences(turn.content[-MAX_CHARS:])[-MAX_SENTENCES:]
            found = tuple(_sentence(text, turn.role, at == 0) for at, text in enumerate(texts))
            size = sum(getsizeof(one.text) + getsizeof(one.words) + 60 * len(one.words) for one in found)
            self._read.put(key, found, size + getsizeof(turn.content))
        return found


def beginnings(turns: Sequence[Message], salt: str = "") -> list[bytes]:
    """A 16-byte hash of the first turn, of the first two, and so on."""
    digest = hashlib.blake2b(salt.encode(), digest_size=16)
    hashes = []
    for turn in turns:
        text = turn.content.encode("utf-8", "surrogatepass")
        digest.update(f"\0{turn.role.value}\0{len(text)}\0".encode())
        digest.update(text)
        hashes.append(digest.digest())
    return hashes


def _sentence(text: str, role: Role, opening: bool) -> _Sentence:
    text = text[:MAX_SENTENCE_CHARS]
    factor = _USER if role is Role.USER else 1.0
    if opening:
        factor *= _OPENING
    if _DIGIT.search(text):
        factor *= _FACT
    return _Sentence(text, frozenset(_words(text)), factor)


def _words(text: str) -> list[str]:
    found: list[str] = []
    for run in _WORD.findall(text.casefold()):
        if len(run) > 1 and _UNSPACED.match(run):
            found += [run[at : at + 2] for at in range(len(run) - 1)]
        else:
            found.append(run)
    return found


def _ranked(candidates: Sequence[_Sentence]) -> list[int]:
    """Indexes of the sentences above the floor, best first; ties in the order of the conversation."""
    number = len(candidates)
    within = Counter(word for one in candidates for word in one.words)
    weight = {word: (times - _ONCE) * math.log((number + 1) / times) for word, times in within.items()}
    scores = [
        math.fsum(weight[word] for word in one.words)  # the same sum in any order
        / (len(one.words) + 4)
        * one.factor
        * (1.0 + (_RECENT - 1.0) * (at + 1) / number)
        for at, one in enumerate(candidates)
    ]
    least = max(scores, default=0.0) * _FLOOR
    return sorted((at for at in range(number) if scores[at] >= least), key=lambda at: (-scores[at], at))


def _written(
    turns: Sequence[Message], places: Sequence[int], candidates: Sequence[_Sentence], chosen: Sequence[int]
) -> str:
    return "\n".join(
        f"{turns[place].role.value}: {' '.join(candidates[at].text for at in of_turn)}"
        for place, of_turn in groupby(chosen, key=places.__getitem__)
    )
