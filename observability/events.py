"""The inputs of observability: one record per finished request, one snapshot of the engine.

The leaves' own events (``admission.events``, ``resilience.events``, ``accounting.events``) come as they are;
``observability.subscribers`` knows what to do with each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import msgspec

NO_STAGES: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ResumeFact:
    """Another call resumed the answer: from which backend to which, how, after how many ``tokens``."""

    after_ms: float
    source: str
    target: str
    mode: str
    tokens: int


class RequestRecord(msgspec.Struct, frozen=True):
    """One finished request, without prompt, answer or key.

    Change one with ``msgspec.structs.replace``. A struct: made with every request, which takes 1.4 µs; a
    dataclass of as many fields takes 6.3.

    Args:
        request_id: the caller's label.
        generation_id: the gateway's own id, the ledger's key.
        trace_id: 32 hex digits.
        tenant: the caller's; ``None`` when the key was refused.
        contract: ``native``, ``chat`` or ``completions``.
        status: the sent HTTP status; 499 when the caller disconnected before the end.
        total_ms: from arrival to the end.
        route: a route of the configuration; ``None`` for an unknown one.
        model: the base model that answered, or was chosen to.
        adapter_rule: why that adapter: ``explicit``, ``rule[0]``, ``none``.
        revision: the routing revision the request ran under.
        backend: the kind that answered; ``backend_name`` is its name in the configuration.
        error_code: a stable code; set with status 200 when a stream broke after its start.
        fallback_kind: the fallback target that answered; ``fallback_reason`` is why.
        cached_tokens: the part of ``input_tokens`` found in a prefix cache.
        queue_wait_ms: waiting before the first step; ``None`` when the request never reached a backend.
        ttft_ms: from arrival to the first token; ``None`` without one.
        generation_ms: from handing the work to the backend to its end, its queue not included.
        overhead_ms: the gateway's own time: neither in the backend nor waiting for it.
        stage_ms: stage to milliseconds, in the order of the journey.
        dropped_chunks: how many evidence chunks the budget left out.
        dropped_turns: how many turns were not sent verbatim.
        cut_chunks: how many evidence chunks were cut at a sentence's end.
        merged_chunks: how many were merged into a duplicate.
        summarized_turns: how many of the dropped turns are in a summary.
        seams: where other calls resumed the answer, in order; ``None``: nowhere.
        prefix_fingerprint: of the stable prefix's full blocks; ``None`` without one.
        prefix_tokens: the tokens of those blocks; ``None`` when the chosen backend did not answer.
        prefix_expected_tokens: those of them that the backend has computed before.
        prefix_cached_tokens: those of them that it found in its cache.
        volatile: kinds of volatile content found in the caller's system messages; ``None`` without any.
        volatile_action: ``moved`` after the prefix, or only ``reported``.
        drawn: the backend that the weights chose for the session, capable of the request, ready or not;
            ``None`` when the caller named one.
        passed: whether the answer passed the checks of answers; ``None``: not checked.
        session: an opaque number of the session in this process.
        cost_nanousd: what it cost the operator, 10⁻⁹ US dollars; ``None`` without a price.
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
    finish_reason: str | None = None
    fallback_kind: str | None = None
    fallback_reason: str | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    queue_wait_ms: float | None = None
    ttft_ms: float | None = None
    generation_ms: float | None = None
    overhead_ms: float | None = None
    stage_ms: Mapping[str, float] = msgspec.field(default_factory=lambda: NO_STAGES)
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
    priority: int = 0
    drawn: str | None = None
    passed: bool | None = None
    session: int | None = None
    cost_nanousd: int | None = None

    @property
    def answered(self) -> bool:
        """Whether the caller got a complete answer."""
        return self.status < 400 and self.error_code is None

    @property
    def failed(self) -> bool:
        """Whether the gateway is at fault: a 5xx, or a broken stream."""
        return self.status >= 500 or (self.status < 400 and self.error_code is not None)

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
    """A histogram of the engine: ``counts`` by bucket, one more than ``bounds``; sum of values."""

    name: str
    text: str
    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """The engine in process at one moment.

    Args:
        model_name: the served base model.
        running: sequences in the batch.
        waiting: sequences in the engine's queue.
        kv_usage: share of KV blocks in use, 0 to 1.
        block_size: tokens a block holds.
        total_blocks: blocks of the pool.
        prefix_queries: prompt tokens looked up in the prefix cache since the start.
        prefix_hits: those of them that were found.
        preemptions: sequences preempted since the start.
        loras: the adapters in use; ``None`` until a request has used one.
        prompt_tokens: prompt tokens computed or found since the start; ``None``: not known.
        generation_tokens: tokens generated since the start; ``None``: not known.
        distributions: the engine's histograms.
    """

    model_name: str
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    block_size: int = 0
    total_blocks: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    loras: LoraFigures | None = None
    prompt_tokens: int | None = None
    generation_tokens: int | None = None
    distributions: tuple[Distribution, ...] = ()
