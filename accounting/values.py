"""Values of the account: one usage row per generation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class UsageRow:
    """What one generation used; the unit of billing.

    Tokens and milliseconds are totals of this generation; ``started_at`` is Unix time in seconds.
    ``fallback`` is the leg that answered, if the intended backend did not; ``finish_reason`` is
    ``error`` or ``cancelled`` for generations without a whole answer.
    """

    generation_id: str
    request_id: str
    tenant: str
    key_id: str
    contract: str
    route: str
    started_at: float
    intent: str | None = None
    session_id: str | None = None
    adapter_id: str | None = None
    prompt_version: str | None = None
    revision: int | None = None
    backend: str | None = None
    backend_name: str | None = None
    backend_version: str | None = None
    trace_id: str | None = None
    finish_reason: str = "error"
    error_code: str | None = None
    fallback: str | None = None
    fallback_reason: str | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    queue_wait_ms: float = 0.0
    ttft_ms: float | None = None
    total_ms: float = 0.0
