"""Detects the language of a text by its script and its function words, without a model.

Kana, Hangul, Han and other scripts identify the language. Among languages in Latin letters the most frequent
function words do; a text with too few of them, such as a list of titles, has no known language.
"""

import re
from collections.abc import Mapping

_JAPANESE = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]")
_SCRIPTS = (
    ("ja", _JAPANESE),
    ("ko", re.compile(r"[\uac00-\ud7af]")),
    ("zh", re.compile(r"[\u4e00-\u9fff]")),
    ("ru", re.compile(r"[\u0400-\u04ff]")),
    ("el", re.compile(r"[\u0370-\u03ff]")),
    ("ar", re.compile(r"[\u0600-\u06ff]")),
    ("he", re.compile(r"[\u0590-\u05ff]")),
    ("hi", re.compile(r"[\u0900-\u097f]")),
    ("th", re.compile(r"[\u0e00-\u0e7f]")),
)
# The least share of a script among all letters, so that a quoted title in kana does not make a text Japanese.
_LEAST_SHARE = 0.3
_KANA = re.compile(r"[\u3040-\u30ff]")
_LETTER = re.compile(r"[^\W\d_]")
_FUNCTION_WORDS: Mapping[str, frozenset[str]] = {
    code: frozenset(words.split())
    for code, words in {
        "en": "the and is are of to in it that you for with this on as by was be have not an",
        "de": "der die das und ist nicht ein eine ich sie es mit von auf für den dem zu wir",
        "fr": "le la les et est une des du pas que pour dans vous je il elle ce qui avec",
        "es": "el los las y es una del que por para con no se su como pero más está este",
        "it": "il gli e è una della di che per con non si come ma più questo sono nel alla",
        "pt": "o os as e é uma do da que por para com não se como mas mais este são no",
    }.items()
}
_WORD = re.compile(r"[^\W\d_]+")
# The least function words. The best language must also lead: "no" and "que" belong to several languages.
_LEAST_WORDS = 2
MAX_CHARS = 2_000


def language_of(text: str) -> str | None:
    """Return the ISO 639-1 code; ``None`` if neither script nor function words identify the language."""
    text = text[:MAX_CHARS]
    letters = len(_LETTER.findall(text))
    if not letters:
        return None
    for code, script in _SCRIPTS:
        if len(script.findall(text)) >= _LEAST_SHARE * letters and (code != "ja" or _KANA.search(text)):
            return code
    words = _WORD.findall(text.lower())
    counts = sorted(((sum(word in small for word in words), code) for code, small in _FUNCTION_WORDS.items()))
    (second, _), (best, code) = counts[-2:]
    return code if best >= _LEAST_WORDS and best > second else None


def has_japanese(text: str) -> bool:
    return _JAPANESE.search(text) is not None
