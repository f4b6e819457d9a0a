"""The inputs of observability: one record per finished request, one snapshot of the engine.

Events of other packages (``admission.events``, ``resilience.events``, ``accounting.events``) stay unchanged;
``observability.subscribers`` passes each to the metrics and the log.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from admission.values import BackendLoad

# The status of a request whose caller disconnected before the end.
DISCONNECTED = 499


@dataclass(frozen=True, slots=True)
class ResumeFact:
    """A resumption by another call: both backends, the mode, and the answer's ``tokens`` before it."""

    after_ms: float
    source: str
    target: str
    mode: str
    tokens: int


class ToolCallCounts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Numbers of tool calls of one request, by their result."""

    whole: int = 0
    cut: int = 0
    not_json: int = 0
    not_schema: int = 0
    retried: int = 0
    failed: int = 0


NO_CALLS = ToolCallCounts()


class RequestRecord(msgspec.Struct, omit_defaults=True):
    """One finished request, without prompt, answer or secret. A struct, since every request makes one; not
    frozen, so that only what is set need be set. Not changed once it was emitted.

    ``request_id`` is the caller's label, ``generation_id`` the ledger's key. ``status`` is the sent HTTP
    status, 499 when the caller disconnected; ``error_code`` is set with status 200 when a stream broke.
    ``error_param`` and ``error_message`` are the field at fault and the message that the caller got.
    ``route`` is ``None`` if unknown. ``backend`` is the kind of backend that answered, ``backend_name`` its
    name in the configuration; ``adapter_rule`` is ``explicit``, ``rule[0]`` or ``none``. ``fallback_kind`` is
    the fallback target that answered.

    Times are from arrival, except ``queue_wait_ms`` (``None``: no backend was reached), ``generation_ms`` (in
    the backend without its queue) and ``overhead_ms`` (neither in the backend nor waiting for it);
    ``stage_ms`` has the stages in the order of the journey. ``cached_tokens`` are a part of ``input_tokens``.
    The five figures of the budget count evidence chunks left out, turns not sent verbatim, chunks cut, chunks
    merged into a duplicate, and dropped turns that a summary covers.

    ``prefix_tokens`` are those of the stable prefix's full blocks (``None`` when the chosen backend did not
    answer): the backend had computed ``prefix_expected_tokens`` of them before, and found
    ``prefix_cached_tokens`` in its cache. ``volatile`` are the kinds of volatile content in the caller's
    system messages, which was ``moved`` or only ``reported``. ``drawn`` is the backend that the weights chose
    for the session, ready or not (``None``: the caller named one); ``session`` is an opaque number in this
    process; ``cost_nanousd`` is the operator's cost, ``None`` without a price. ``batch_line``: whether
    it is a line of a batch, for which no caller waits.
    """

    request_id: str
    generation_id: str
    trace_id: str
    tenant: str | None
    contract: str
    status: int
    total_ms: float
    route: str | None = None
    model: str | None = None
    intent: str | None = None
    locale: str | None = None
    adapter_id: str | None = None
    adapter_rule: str | None = None
    prompt_version: str | None = None
    revision: int | None = None
    backend: str | None = None
    backend_name: str | None = None
    backend_version: str | None = None
    error_code: str | None = None
    error_param: str | None = None
    error_message: str | None = None
    finish_reason: str | None = None
    fallback_kind: str | None = None
    fallback_reason: str | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    tool_calls: ToolCallCounts = NO_CALLS
    queue_wait_ms: float | None = None
    ttft_ms: float | None = None
    generation_ms: float | None = None
    overhead_ms: float | None = None
    stage_ms: Mapping[str, float] = {}
    dropped_chunks: int = 0
    dropped_turns: int = 0
    cut_chunks: int = 0
    merged_chunks: int = 0
    summarized_turns: int = 0
    seams: tuple[ResumeFact, ...] | None = None
    prefix_fingerprint: str | None = None
    prefix_tokens: int | None = None
    prefix_expected_tokens: int | None = None
    prefix_cached_tokens: int | None = None
    volatile: tuple[str, ...] | None = None
    volatile_action: str | None = None
    stream: bool = False
    key_id: str | None = None
    priority: int = 0
    drawn: str | None = None
    session: int | None = None
    cost_nanousd: int | None = None
    batch_line: bool = False

    @property
    def failed(self) -> bool:
        """Whether the gateway is at fault: a 5xx, or a broken stream."""
        return self.status >= 500 or (self.status < 400 and self.error_code is not None)

    @property
    def runs_again(self) -> bool:
        """Whether it is a try of a batch's line that was refused: no caller was, and the line runs again."""
        return self.batch_line and self.status in (429, 503)

    @property
    def time_per_output_token_ms(self) -> float | None:
        """Mean time between two tokens; ``None`` with fewer than two."""
        if self.ttft_ms is None or self.output_tokens < 2:
            return None
        return max(0.0, self.total_ms - self.ttft_ms) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class LoraFigures:
    """The adapters of the engine's requests: the most in one batch, names of running and waiting ones."""

    max_loras: int
    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Distribution:
    """A histogram of the engine: ``counts`` by bucket, one more than ``bounds``; ``total`` of the values."""

    name: str
    text: str
    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """The engine in process at one moment; tokens and preemptions are counted since its start (``None``:
    unknown). ``loras`` is ``None`` until a request has used an adapter.
    """

    model_name: str
    load: BackendLoad
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    loras: LoraFigures | None = None
    prompt_tokens: int | None = None
    generation_tokens: int | None = None
    distributions: tuple[Distribution, ...] = ()
