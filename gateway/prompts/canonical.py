"""Canonical prompts: whatever order a caller writes in, what is stable comes first and what changes last.

The stable prefix (the prompt version's text, then the caller's system messages) is normalised, so that
texts of equal meaning have equal bytes and an engine's prefix cache can reuse them. User and assistant turns
are never touched. The context (time, names, anything volatile) goes behind the older turns.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping, Sequence

from budgeting.values import CanonicalPrompt, EvidenceChunk, Message, Role
from gateway.errors import InvalidRequest
from gateway.prompts.versions import PromptVersion

# Line ends by Unicode that JSON leaves as they are; they can only stand inside its strings.
_LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}


def canonicalize(
    messages: Sequence[Message],
    *,
    chunks: Sequence[EvidenceChunk] = (),
    context: Mapping[str, object] | None = None,
    raw_prompt: str | tuple[int, ...] | None = None,
    version: PromptVersion | None = None,
) -> CanonicalPrompt:
    """The canonical form of a request's prompt. Idempotent over its own system messages and turns.

    Args:
        messages: as the caller sent them, any order of roles.
        chunks: evidence, in the caller's order.
        context: volatile fields.
        raw_prompt: a text completion's prompt; stands alone, untouched.
        version: the prompt version whose text comes first, as one system message.

    Raises:
        InvalidRequest: ``context`` cannot be written as text.
    """
    if raw_prompt is not None:
        return CanonicalPrompt(raw=raw_prompt)
    system = [stable_text(version)] if version is not None else []
    system += [normalize(message.content) for message in messages if message.role is Role.SYSTEM]
    return CanonicalPrompt(
        system=tuple(text for text in system if text),
        turns=tuple(message for message in messages if message.role is not Role.SYSTEM),
        evidence=tuple(chunks),
        context=render_context(context or {}),
    )


def stable_text(version: PromptVersion) -> str:
    """A version's system text, policy and grounding rule as one text, parts set apart by a blank line."""
    parts = (normalize(part) for part in (version.system, version.policy, version.grounding_rule))
    return "\n\n".join(part for part in parts if part)


def normalize(text: str) -> str:
    """A system text with its accidents removed; idempotent.

    Unicode in composed form (NFC), lines ended by a line feed, no blanks at the ends of lines, no blank
    lines and blanks around the whole.
    """
    composed = unicodedata.normalize("NFC", text).replace("\r\n", "\n").replace("\r", "\n")
    return "\n".join(line.rstrip() for line in composed.split("\n")).strip()


def render_context(context: Mapping[str, object]) -> str:
    """The volatile block: a line ``key: value`` for each field, sorted by key; empty when there is none.

    Texts stand as they are; anything else, and a text that would not be one plain line, as JSON with sorted
    keys, so that no value can look like another field.

    Raises:
        InvalidRequest: a value is not JSON or nested too deeply.
    """
    try:
        return "\n".join(f"{_inline(key)}: {_inline(context[key])}" for key in sorted(context))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(
            "context holds a value that cannot be written as JSON; allowed: texts, numbers, booleans, null, "
            "lists and objects of these, nested up to a few hundred deep",
            param="context",
        ) from error


def _inline(value: object) -> str:
    if isinstance(value, str) and value.splitlines() == [value] and value.strip() == value:
        return value
    text = json.dumps(
        value, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False, default=_plain
    )
    return text.translate(_LINE_ENDS)


def _plain(value: object) -> object:
    """Frozen mappings as dicts; nothing else is made JSON of."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not JSON")
