"""A custom tool for a server that knows functions alone: a function whose one argument is the input."""

import json
import re

import orjson

from budgeting.template_input import CUSTOM_INPUT

_HEAD = re.compile(rf'\s*\{{\s*"{CUSTOM_INPUT}"\s*:\s*"')


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
        whole = _whole_string(self._raw)
        value: str = json.loads(f'"{whole}"', strict=False)
        if value and "\ud800" <= value[-1] <= "\udbff":  # half of a surrogate pair: the other half follows
            whole, value = whole[: whole.rindex("\\")], value[:-1]
        self._raw = self._raw[len(whole) :]
        return value

    @property
    def closed(self) -> bool:
        """Whether the input has ended."""
        return self._begun and self._raw.startswith('"')

    @property
    def rest(self) -> str:
        """The model's own text, if the arguments do not have this form."""
        return "" if self._begun else self._raw


def wrapped(text: str) -> str:
    """The arguments of a function call with this input."""
    return orjson.dumps({CUSTOM_INPUT: text}).decode()


def _whole_string(body: str) -> str:
    """The content of a JSON string up to its closing quote or an incomplete escape."""
    place = 0
    while place < len(body) and body[place] != '"':
        size = 1
        if body[place] == "\\":
            size = 6 if body[place + 1 : place + 2] == "u" else 2
        if place + size > len(body):
            break
        place += size
    return body[:place]
