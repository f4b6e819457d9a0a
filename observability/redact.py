"""Redaction: secret fields by name, and credentials inside other text by pattern."""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

REDACTED = "[redacted]"

# A field is redacted when one word of its name is among these, or ends in "key".
SECRET_WORDS = frozenset(
    {
        "authorization", "bearer", "body", "content", "contents", "cookie", "credential", "credentials",
        "delta", "input", "keys", "messages", "output", "passphrase", "password", "prompt", "prompts",
        "query", "secret", "secrets", "text", "texts", "token",
    }
)  # fmt: skip
# Exceptions: names with such a word that are not secret.
PLAIN_NAMES = frozenset(
    {"content_length", "content_type", "key_id", "key_prefix", "prompt_version", "request_key_id"}
)
MAX_DEPTH = 6  # depth up to which a value is examined; deeper values are redacted whole

_WORDS = re.compile(r"[^a-z0-9]+")
# Each pattern with strings of which every match contains one: searching for these first is far cheaper.
# Callers choose the texts, so a pattern takes linear time: it begins only where a run of its first characters
# begins, and gives back none of them (``+`` after a quantifier).
_SHAPES: tuple[tuple[tuple[str, ...], re.Pattern[str], str], ...] = (
    (("earer", "EARER", "asic ", "ASIC "),
     re.compile(r"(?i)\b(bearer|basic)\s+[^\s\"',;]+"), rf"\1 {REDACTED}"),
    # Keys of this gateway and of other services, with the prefix of their kind.
    (("sk-", "slc_", "slc-", "hf_", "xox", "ghp_"),
     re.compile(r"\b(sk-|slc[_-]|hf_|xox[abp]-|ghp_)[^\s\"',;]+"), rf"\1{REDACTED}"),
    (("AKIA", "ASIA"), re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}"), REDACTED),
    (("eyJ",),
     re.compile(
         r"(?a)(?<![\w-])(?=[\w-]*+\.[\w-]{8,})([\w-]*?)\beyJ[\w-]{8,}+\.[\w-]++(?:\.[\w-]*)?"
     ),
     rf"\1{REDACTED}"),
    (("-----BEGIN",), re.compile(r"-----BEGIN [A-Z ]+-----[\s\S]*?(?:-----END [A-Z ]+-----|\Z)"), REDACTED),
    (("://",),
     re.compile(r"(?ai)(?<![\w+.-])([\w+.-]++://[^\s/:@]*+):[^\s/@]++@"), rf"\1:{REDACTED}@"),
    # name=value and name: value, as in URLs, connection strings and messages of libraries.
    (("ey=", "ey:", 'ey"', "ey'", "oken=", "oken:", 'oken"', "oken'", "OKEN", "_KEY", "ecret", "ECRET",
      "assword", "ASSWORD", "asswd", "ignature", "redential"),
     re.compile(
         r"(?i)((?:(?<![\w-])(?=[\w-]*?(?:secret|password|passwd|signature|credential|access[_-]?key|"
         r"api[_-]?key|private[_-]?key|(?:auth|security|access|session|refresh)[_-]?token))[\w-]++"
         # Words follow "key:" in messages too: only what is long, or has a digit, is taken for a secret.
         r"|(?<![\w])(?:key|token)"
         r"(?![\"']?\s*:\s*[\"']?(?:[^\s\"',;&}\d]{1,15}|[^\s\"',;&}]{1,7})(?:[\s\"',;&}]|\Z))"
         r")[\"']?\s*[=:]\s*[\"']?)(?!\[redacted)[^\s\"',;&}]+"
     ),
     rf"\1{REDACTED}"),
)  # fmt: skip


_MARKS = tuple(mark for marks, *_ in _SHAPES for mark in marks)


@lru_cache(maxsize=1_024)  # few names, which occur in every line
def is_secret(name: str) -> bool:
    """Whether a field of that name must not be shown."""
    lowered = name.lower()
    if lowered in PLAIN_NAMES:
        return False
    return any(word in SECRET_WORDS or word.endswith("key") for word in _WORDS.split(lowered))


def scrub(text: str) -> str:
    """``text`` without credentials of known shapes; the same object when it has none."""
    if [mark for mark in _MARKS if mark in text]:
        for marks, shape, instead in _SHAPES:
            if any(map(text.__contains__, marks)):
                text = shape.sub(instead, text)
    return text


def redact(name: str, value: object, depth: int = 0) -> object:
    """``value``, redacted for a field ``name``. Numbers are never redacted: ``prompt_tokens`` is a count."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if is_secret(name):
        return REDACTED
    if isinstance(value, str):
        return scrub(value)
    if depth >= MAX_DEPTH:
        return REDACTED
    if isinstance(value, Mapping):
        return {str(key): redact(str(key), inner, depth + 1) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [redact(name, inner, depth + 1) for inner in value]
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {scrub(str(value))}"
    return f"<{type(value).__name__}>"
