"""Text of others for a terminal or a log: characters that a terminal acts upon are shown by their number."""

import re
from typing import Final

# C0, DEL and C1 move the cursor, change colours and titles; U+2028 and U+2029 end lines in some viewers; the
# directional ones show text in another order than it has; surrogates alone cannot be written as UTF-8.
_ACTING: Final = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_ACTING_IN_LINES: Final = re.compile(_ACTING.pattern.replace("\x00-\x1f", "\x00-\x08\x0b-\x1f"))


def printable(text: str, *, lines: bool = False) -> str:
    """The text with each such character as ``\\uXXXX``, JSON's form; ``lines``: line ends and tabs stay."""
    return (_ACTING_IN_LINES if lines else _ACTING).sub(lambda found: f"\\u{ord(found[0]):04x}", text)
