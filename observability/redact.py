"""What must never be logged, found by name; and credentials inside other text, found by shape."""

from __future__ import annotations

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
# Names with such a word that tell nothing secret.
PLAIN_NAMES = frozenset(
    {"content_length", "content_type", "key_id", "key_prefix", "prompt_version", "request_key_id"}
)
# How deep a value is looked into; what lies deeper is redacted whole.
MAX_DEPTH = 6

_WORDS = re.compile(r"[^a-z0-9]+")
_BEARER = re.compile(r"(?i)\b(bearer\s+|sk-)[^\s\"',;]+")
_URL_PASSWORD = re.compile(r"(?i)(\b[a-z][a-z0-9+.-]*://[^\s/:@]*):[^\s/@]+@")


@lru_cache(maxsize=1_024)  # names are few and come with every line
def is_secret(name: str) -> bool:
    """Whether a field of that name must not be shown."""
    lowered = name.lower()
    if lowered in PLAIN_NAMES:
        return False
    return any(word in SECRET_WORDS or word.endswith("key") for word in _WORDS.split(lowered))


def scrub(text: str) -> str:
    """``text`` without bearer keys and without the password of a URL."""
    if "earer" in text or "EARER" in text or "sk-" in text:
        text = _BEARER.sub(lambda found: found[1] + REDACTED, text)
    if "://" in text:
        text = _URL_PASSWORD.sub(rf"\1:{REDACTED}@", text)
    return text


def redact(name: str, value: object, depth: int = 0) -> object:
    """``value`` as it may be shown under ``name``. Numbers always pass: ``prompt_tokens`` is a count."""
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
