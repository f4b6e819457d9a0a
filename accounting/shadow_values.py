"""The measurements of a shadowed request: the caller's answer and the shadow's answer."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ShadowSide:
    """One answer of a pair. Times are milliseconds, without the wait for a slot of the backend; a check is
    ``None`` where it does not apply; ``failure`` is the reason why there is no answer. ``text`` is redacted,
    and stored only if the operator enables it. ``tools`` names the tools that were called, ``calls`` is a
    hash of the calls with redacted arguments; both are empty without a call.
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
    checks: Mapping[str, bool | None] = field(default_factory=dict)
    failure: str | None = None
    text: str | None = None
    tool_calls: int = 0
    tools: str = ""
    calls: str = ""
    reasoning_chars: int = 0


@dataclass(frozen=True, slots=True)
class ShadowPair:
    """The caller's answer and the shadow's, without the caller's identity and the question. ``pair_id`` is
    the shadow's generation id, also in the ledger; ``generation_id`` is that of the caller's request.
    ``likeness`` (0 to 1) compares characters, ``None`` when not known; ``judged`` is ``primary``, ``shadow``,
    ``tie`` or ``unclear``, ``None`` without a judge.
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
    judged: str | None = None
