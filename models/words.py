"""The word lists of words.toml."""

from __future__ import annotations

import tomllib
from functools import lru_cache
from pathlib import Path


@lru_cache(maxsize=1)
def _lists() -> dict[str, str]:
    return tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))


def word_list(name: str) -> tuple[str, ...]:
    """The words of one list, in file order."""
    return tuple(_lists()[name].split())
