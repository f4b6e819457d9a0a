"""Makes external text safe for a terminal or a log: control characters are replaced by their numbers."""

import re
from typing import Final

# C0, DEL and C1 move the cursor, change colours and titles; U+2028 and U+2029 end lines in some viewers;
# directional characters change the order in which text is shown; lone surrogates cannot be written as UTF-8.
_ACTING: Final = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_ACTING_IN_LINES: Final = re.compile(_ACTING.pattern.replace("\x00-\x1f", "\x00-\x08\x0b-\x1f"))


def printable(text: str, *, lines: bool = False) -> str:
    """The text with each such character as ``\\uXXXX``, as in JSON; ``lines``: keep line ends and tabs."""
    return (_ACTING_IN_LINES if lines else _ACTING).sub(lambda found: f"\\u{ord(found[0]):04x}", text)
