"""Unicode's normal forms, in time that grows with the length alone."""

import re
import unicodedata
from typing import Literal

# Python sorts the combining marks of a run in quadratic time, and lets no other thread run meanwhile: 300 KB
# of marks would stop the process for minutes. No language writes so many characters between two of ``_RUN``'s
# exceptions, which are normal by themselves and never join the one before: ASCII, kana, ideographs.
MAX_RUN = 256
_RUN = re.compile("[^\x00-\x7f\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fff]+")


def normalized(form: Literal["NFC", "NFKC"], text: str) -> str:
    """The text in a normal form; a run of more than ``MAX_RUN`` characters stays as it is."""
    if text.isascii():
        return text
    pieces: list[str] = []
    done = 0
    for run in _RUN.finditer(text):
        start, end = max(done, run.start() - 1), run.end()  # marks join the character before them
        piece = text[start:end]
        pieces += text[done:start], unicodedata.normalize(form, piece) if end - start <= MAX_RUN else piece
        done = end
    return "".join([*pieces, text[done:]])
