"""Scores of one answer: every check gives one number per prompt, so that adapters can be paired."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from budgeting.duplicates import same_text
from evaluation.adapter_regression.prompts import Case
from gateway.shadow.language import has_japanese
from resilience.degenerate import REPLACEMENT

_LATIN_WORD = re.compile(r"[A-Za-z]{2,}")
# The same text three times in a row: 3 to 10 words, or 12 to 40 characters for languages without spaces.
_LOOP = re.compile(r"\b(\w+(?:\W+\w+){2,9}?)(?:\W+\1){2}\b|(.{12,40}?)\2\2", re.DOTALL)


@dataclass(frozen=True, slots=True)
class AdapterAnswer:
    """An adapter's answer to one prompt; ``ended``: it stopped by itself."""

    text: str
    ended: bool


def score(case: Case, answer: AdapterAnswer, refusals: Sequence[re.Pattern[str]]) -> Mapping[str, float]:
    """Return the checks that apply to the prompt, by name, each 0 to 1.

    ``exact`` and ``similarity`` need a reference, ``facts`` a pattern, ``format`` patterns; ``refusal``
    applies to prompts that should be declined, ``willing`` to all others.
    """
    text = answer.text.strip()
    declined = any(pattern.search(text) for pattern in refusals)
    found = {
        "language": float(in_language(text, case.language)),
        "sound": float(answer.ended and bool(text) and REPLACEMENT not in text and not _LOOP.search(text)),
        "refusal" if case.refuse else "willing": float(declined == case.refuse),
    }
    if case.reference is not None:
        wanted, given = same_text(case.reference), same_text(text)
        found["exact"] = float(wanted == given)
        found["similarity"] = SequenceMatcher(None, wanted, given, autojunk=False).ratio()
    if case.expect is not None:
        found["facts"] = float(re.search(case.expect, text, re.IGNORECASE) is not None)
    if case.format:
        found["format"] = float(all(re.search(pattern, text) for pattern in case.format))
    return found


def in_language(text: str, language: str) -> bool:
    """Return whether a text is in ``en`` or ``ja``, by its kana and kanji; both may contain Latin names."""
    if language == "ja":
        return has_japanese(text)
    return not has_japanese(text) and _LATIN_WORD.search(text) is not None
