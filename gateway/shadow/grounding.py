"""Finds names and numbers in an answer that its evidence does not contain.

Names are titles in quotation marks, capitalized words inside a sentence, and numbers of two or more digits.
Each must occur in the evidence or in the caller's messages. This finds invented titles, people and prices; a
wrong sentence of correct words passes.
"""

import re
import unicodedata

_QUOTED = re.compile(r"『([^『』]{1,80})』|「([^「」]{1,80})」|[\"“]([^\"“”]{1,80})[\"”]")
_WORD = re.compile(r"[^\W_]+(?:['’\-][^\W_]+)*")
_NUMBER = re.compile(r"\d[\d.,]*\d")
_SENTENCE_END = re.compile(r"[.!?:;\n•。！？]\s*[\"“*(\-]*\s*$")
# Words that are always capitalized: I, months and the like.
_PLAIN_WORDS = (
    "i i'm i'd i'll i've january february march april may june july august september october november"
    " december monday tuesday wednesday thursday friday saturday sunday english japanese manga"
)
_PLAIN = frozenset(_PLAIN_WORDS.split())
MAX_CHARS = 8_000


def ungrounded(answer: str, sources: str) -> tuple[int, int]:
    """Return the number of names and numbers in the answer, and of those that ``sources`` lacks."""
    answer = unicodedata.normalize("NFKC", answer[:MAX_CHARS])
    held = unicodedata.normalize("NFKC", sources).lower()
    words = set(_WORD.findall(held))
    numbers = {_digits(one) for one in _NUMBER.findall(held)}
    names = missing = 0
    for found in _QUOTED.finditer(answer):
        title = next(filter(None, found.groups()))
        if not title.isascii():
            names += 1
            missing += title.lower() not in held
    for found in _WORD.finditer(answer):
        word = found[0]
        if not word[0].isupper() or word.lower() in _PLAIN or len(word) < 3:
            continue
        if _begins_sentence(answer, found.start()) and word.lower() not in words:
            continue  # the first word of a sentence is always capitalized
        names += 1
        # With or without the English genitive.
        missing += words.isdisjoint((word.lower(), re.sub(r"['’]s$", "", word.lower())))
    for found in _NUMBER.finditer(answer):
        names += 1
        missing += _digits(found[0]) not in numbers
    return names, missing


def _begins_sentence(text: str, place: int) -> bool:
    before = text[max(0, place - 8) : place]
    return not before.strip(' "“*(-') or _SENTENCE_END.search(before) is not None


def _digits(number: str) -> str:
    return re.sub(r"[.,](?=\d{3}\b)", "", number)
