"""Finds the ends of sentences by rules, in scripts whose punctuation marks are known."""

import re
from itertools import pairwise

# Western marks end a sentence before a blank; the others (CJK, Devanagari, Arabic, Urdu, Armenian, Ethiopic,
# Burmese) anywhere. Closing quotes and brackets belong to the sentence. A line end ends a sentence, too.
# The search begins at the first of several marks and gives none back: its time grows with the length alone.
_CLOSING = "\"'”’»)\\]」』）】"
_END = re.compile(
    rf"(?<![.!?…])[.!?…]++[{_CLOSING}]*+(?=\s|$)"
    rf"|[。！？｡．؟۔।॥։።၊။]+[{_CLOSING}]*"
    r"|\n+"
)
_BLANKS = re.compile(r"\s+")


def sentence_ends(text: str) -> list[int]:
    """Ends of the sentences, ascending; the last is the text's end. Blanks belong to the next sentence.

    A text without any mark is one sentence.
    """
    found = _END.finditer(text)
    ends = [one.end() for one in found if not (one[0] == "." and _abbreviates(text, one.end()))]
    if text and (not ends or ends[-1] < len(text)):
        ends.append(len(text))
    return ends


def sentences(text: str) -> list[str]:
    """The sentences, each on one line, without the blanks around it; empty ones are left out."""
    cut = (text[start:end] for start, end in pairwise([0, *sentence_ends(text)]))
    return [found for part in cut if (found := _BLANKS.sub(" ", part).strip())]


def _abbreviates(text: str, end: int) -> bool:
    """Whether the text after a full stop at ``end`` cannot begin a sentence."""
    for at in range(end, min(end + 8, len(text))):
        character = text[at]
        if character == "\n":
            return False
        if not character.isspace():
            return character.islower() or character.isdigit()  # "vol. 12", "e.g. this"
    return False
