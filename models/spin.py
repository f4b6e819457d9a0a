"""Text with alternatives: ``(a|b)`` becomes one of its options, chosen at random."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence

_CHOICE = re.compile(r"\(([^()]*)\)")
_LOOSE_MARK = re.compile(r" +([.,?!])")  # spaces that an empty option leaves behind


def spin(template: str, rng: random.Random) -> str:
    """Resolve every ``(a|b|)`` of the template, innermost first; an option may be empty."""
    while True:
        match = _CHOICE.search(template)
        if match is None:
            return _LOOSE_MARK.sub(r"\1", re.sub(" {2,}", " ", template)).strip()
        template = template[: match.start()] + rng.choice(match[1].split("|")) + template[match.end() :]


def say(templates: Sequence[str], rng: random.Random, slots: Mapping[str, object] | None = None) -> str:
    """Pick one template, resolve its alternatives, then fill its ``{slots}``."""
    return spin(rng.choice(templates), rng).format(**(slots or {}))
