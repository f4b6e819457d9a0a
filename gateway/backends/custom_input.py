"""A custom tool for a server that knows functions alone: a function whose one argument is the input."""

import json
import re

import orjson

from budgeting.template_input import CUSTOM_INPUT

_HEAD = re.compile(rf'\s*\{{\s*"{CUSTOM_INPUT}"\s*:\s*"')
# The content of a JSON string up to its closing quote or an incomplete escape.
_CONTENT = re.compile(r'(?:[^"\\]|\\u.{4}|\\[^u])*', re.DOTALL)


class CustomInput:
    """Takes a custom tool's text out of ``{"input":"…"}``, piece by piece."""

    def __init__(self) -> None:
        self._raw = ""
        self._begun = False

    def take(self, text: str) -> str:
        """Take a piece of the arguments; returns the new characters of the input that are complete."""
        self._raw += text
        if not self._begun:
            head = _HEAD.match(self._raw)
            if head is None:
                return ""
            self._begun = True
            self._raw = self._raw[head.end() :]
        content = _CONTENT.match(self._raw)
        assert content is not None, "the pattern matches the empty text"
        whole = content[0]
        value: str = json.loads(f'"{whole}"', strict=False)
        if value and "\ud800" <= value[-1] <= "\udbff":  # half of a surrogate pair: the other half follows
            whole, value = whole[: whole.rindex("\\")], value[:-1]
        self._raw = self._raw[len(whole) :]
        return value

    @property
    def closed(self) -> bool:
        return self._begun and self._raw.startswith('"')

    @property
    def rest(self) -> str:
        """The model's own text, if the arguments do not have this form."""
        return "" if self._begun else self._raw


def wrapped(text: str) -> str:
    """The arguments of a function call with this input."""
    return orjson.dumps({CUSTOM_INPUT: text}).decode()
