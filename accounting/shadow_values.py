"""What is kept of a shadowed request: two answers side by side, measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

_NO_CHECKS: Mapping[str, bool | None] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ShadowSide:
    """One answer of a pair.

    Times are milliseconds, without waiting for a place on the backend; ``checks`` has what each check said,
    ``None`` where it had nothing to say. ``failure`` tells why there is no answer. ``text`` is redacted, and
    kept only where the operator wants that.
    """

    backend: str
    version: str
    finish_reason: str
    chars: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    ttft_ms: float | None = None
    total_ms: float = 0.0
    cost_nanousd: int = 0
    language: str | None = None
    checks: Mapping[str, bool | None] = field(default_factory=lambda: _NO_CHECKS)
    failure: str | None = None
    text: str | None = None


@dataclass(frozen=True, slots=True)
class ShadowPair:
    """The answer that the caller had, and the one of the shadow; nothing of who asked or what.

    Args:
        pair_id: the shadow's generation id; its row in the ledger has the same.
        generation_id: of the caller's request.
        at: Unix seconds.
        likeness: by characters, 0 to 1; ``None`` when one side has no answer.
        meaning: by meaning, -1 to 1; ``None`` when nothing can be told.
        judged: ``primary``, ``shadow``, ``tie`` or ``unclear``; ``None``: nobody was asked.
    """

    pair_id: str
    generation_id: str
    at: float
    route: str
    primary: ShadowSide
    shadow: ShadowSide
    prompt_version: str | None = None
    adapter_id: str | None = None
    intent: str | None = None
    likeness: float | None = None
    meaning: float | None = None
    judged: str | None = None
