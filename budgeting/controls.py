"""Control tokens, and why a message cannot contain one.

A tokenizer turns the characters ``<|im_end|>`` into the token that ends a turn wherever they occur, also in a
user's words, so a caller could end a message and write the next one in another role. Neither ``transformers``
(by default) nor vLLM prevents that. Here only the template writes control tokens: the same characters inside
a message are tokenized as plain text. Other messages get exactly the ids that ``transformers`` gives.

Before rendering, a mark that no control token contains breaks each occurrence inside a message's text; in the
rendered text only the template's own control tokens are whole. They become ids; the marks are removed from
the text between them, which is tokenized with control tokens switched off.

Control tokens are the added tokens that ``tokenizer.json`` marks special, of two characters or more. Other
added tokens (runs of spaces, ``<think>``) are ordinary vocabulary: templates search old answers for some of
them, and none of them ends a turn. Raw prompts are not guarded: their callers write the markup themselves.
"""

import re
from collections.abc import Mapping

# Unicode noncharacters: by definition never in interchanged text; `guard` escapes those that occur anyway.
_MARK = "\ufdd0"
_BREAK = _MARK + "\ufdd1"
_ESCAPED_MARK = _MARK + "\ufdd2"


class ControlTokens:
    """Finds control tokens in texts, breaks them in messages, and cuts rendered texts at them.

    ``always``: guard every message, because a normalizer could make a control token out of other characters.
    """

    def __init__(self, ids: Mapping[str, int], *, always: bool = False) -> None:
        self.ids = {content: token_id for content, token_id in ids.items() if len(content) > 1}
        self._always = always
        # Longest first, so that a token is not mistaken for a shorter one that it starts with.
        longest_first = sorted(self.ids, key=lambda content: (-len(content), content))
        self._pattern = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
        # The parts of a text; every second part is a control token, by the pattern's group.
        self.split = self._pattern.split

    def forged_in(self, text: str) -> bool:
        """Whether a message of this text must be guarded."""
        return self._always or self._pattern.search(text) is not None

    def guard(self, text: str) -> str:
        """``text`` with every control token in it broken; :meth:`unguard` gives ``text`` back."""
        text = text.replace(_MARK, _ESCAPED_MARK)
        # Tokens may overlap, so breaking one can leave another whole: repeat until none is whole.
        while self._pattern.search(text):
            text = self._pattern.sub(lambda match: match[0][0] + _BREAK + match[0][1:], text)
        return text

    @staticmethod
    def unguard(text: str) -> str:
        """The text without the marks of :meth:`guard`."""
        return text.replace(_BREAK, "").replace(_ESCAPED_MARK, _MARK)

    @staticmethod
    def split_at_breaks(text: str) -> list[str]:
        """The parts of a guarded text between its marks, for vocabularies that can spell a control token."""
        return [part.replace(_ESCAPED_MARK, _MARK) for part in text.split(_BREAK)]

    def segments(self, guarded: str) -> list[tuple[str, int | None]]:
        """The parts of a rendered, guarded text, cut at the control tokens that the template wrote.

        Each control token has its id; other text has ``None``, and still contains its marks.
        """
        parts = enumerate(self.split(guarded))
        return [(part, self.ids[part] if place % 2 else None) for place, part in parts if part]

    def cut(self, rendered: str) -> list[str]:
        """The parts of a rendered text, each from one control token to the next."""
        before, *parts = self.split(rendered)
        together = [token + text for token, text in zip(parts[::2], parts[1::2], strict=True)]
        return [before, *together] if before else together

    def opens(self, text: str) -> bool:
        """Whether ``text`` starts with a control token."""
        return self._pattern.match(text) is not None
