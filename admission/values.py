"""Values of the admission stage."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import StrEnum

from msgspec import Struct

from admission.ladder import RUNGS, Rung


class Reason(StrEnum):
    """Why a request was refused; stable codes of the public surface."""

    QUEUE_FULL = "queue_full"
    WAIT_EXCEEDED = "wait_exceeded"
    TOKEN_BUDGET_EXCEEDED = "token_budget_exceeded"
    MEMORY_PRESSURE = "memory_pressure"
    LOW_PRIORITY_SHED = "low_priority_shed"
    CIRCUIT_OPEN = "circuit_open"


class BackendLoad(Struct, frozen=True):
    """A backend's load as its engine reported it; 0 means unknown for sizes.

    ``running`` and ``waiting`` count sequences in the engine, ``kv_usage`` is the share of KV blocks in use,
    ``block_size`` in tokens; ``workers`` engines share the name, and all figures are theirs together.
    """

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    total_blocks: int = 0
    block_size: int = 0
    max_running: int = 0
    workers: int = 1


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Thresholds, with the reasons for their defaults.

    Args:
        max_queue: requests waiting for each engine of the backend; the ladder's last rung. The wait refuses
            earlier, except while nothing is known of the engine.
        max_queue_tokens: uncached prompt tokens waiting for each engine: a queue of long prompts is longer
            than its count says. As many as ``max_queue_bytes`` holds.
        max_queue_bytes: bytes of requests waiting.
        max_wait_s: longest wait, estimated or real; beyond it a fallback answer is better. ``None``: the
            first token must come within 5 s of the arrival, or within three times what an idle engine
            takes for such a prompt where that is longer (``admission.estimator``).
        max_input_tokens: longest prompt; ``None``: as long as fits the model.
        kv_pressure: measured KV usage from which a new sequence would likely cause preemption.
        priority_factor: factor on the queue's room and the wait budget for priority above 0.
        watermarks: predicted KV usage up to which low, normal and high priority are handed on.
        oom_watermark: measured KV usage from which new requests are refused, not queued.
        engine_queue: sequences that may wait inside an engine.
        max_prefill_tokens: while an engine has so many uncached prompt tokens still to compute, no further
            prompt is handed on; about one step's budget, so that an urgent request waits for one long prefill
            at most.
        max_prefill_s: the same by the time that these tokens are expected to take, but at least 256 tokens,
            and as many as take 20 ms.
        max_in_flight: sequences handed on to a backend that does not report its maximum.
        output_share: quantile of the real output lengths that the forecast expects.
        aging_s: a wait after which a request moves up one class.
        rungs: what a growing queue does to new requests.
        tpot_slo_s: time per output token that the adaptive limit keeps to, four tokens a second by default:
            slower than reading. ``None``: any. Without this and ``ttft_slo_s`` the limit stays where it is.
        ttft_slo_s: time from hand-over to the first token that the limit keeps to; ``None``: any.
        first_token_within_s: how long after its arrival a request's first token is still useful: a request
            that would get it later is refused at once; ``None``: any time before the deadline.
        fresh_s: a report of the engine counts as new for this long.
        stale_s: after this long without a report fewer sequences are handed on.
        stale_margin: assumed growth of a silent engine's KV usage at ``stale_s``.
        stale_in_flight: sequences that a silent engine may have in flight.
    """

    max_queue: int = 1000
    max_queue_tokens: int = 1_000_000
    max_queue_bytes: int = 64 << 20
    max_wait_s: float | None = None
    max_input_tokens: int | None = None
    kv_pressure: float = 0.93
    priority_factor: float = 1.2
    watermarks: tuple[float, float, float] = (0.90, 0.95, 0.98)
    oom_watermark: float = 0.98
    engine_queue: int = 4
    max_prefill_tokens: int = 2048
    max_prefill_s: float = 0.12
    max_in_flight: int = 256
    output_share: float = 0.8
    aging_s: float = 10.0
    rungs: tuple[Rung, ...] = RUNGS
    tpot_slo_s: float | None = 0.25
    fresh_s: float = 0.5
    stale_s: float = 5.0
    stale_margin: float = 0.05
    stale_in_flight: int = 16
    ttft_slo_s: float | None = None
    first_token_within_s: float | None = None

    def pressure_of(self, priority: int) -> tuple[float, float]:
        """Measured and predicted KV usage from which a request of that priority waits."""
        low, normal, high = self.watermarks
        if priority > 0:
            return high, high
        return self.kv_pressure, low if priority < 0 else normal


class Demand(Struct, frozen=True):
    """What a request asks of its backend.

    Args:
        kind: key by which output length and cached share are learned, e.g. route and intent.
        arrived_at, deadline: on the clock of admission. ``checked_s`` after the arrival went into checks of
            what the request asks for; they leave less until the deadline, and do not count for the limits.
        cached_tokens: tokens of the prompt that the backend likely holds already; ``None``: as learned.
        size_bytes: bytes that the request takes in memory while it waits.
        limits: its route's thresholds; ``None``: the backend's.
        produced: tokens of its answer so far; read when the forecast is made.
        sequences: texts that are generated at once; ``max_output_tokens`` and ``produced`` count all.
        open_ended: ``max_output_tokens`` is only what the context has room for.
        generates: whether the request asks for text; else for vectors, which are not streamed.
    """

    backend: str
    tenant: str
    priority: int
    input_tokens: int
    max_output_tokens: int
    arrived_at: float
    deadline: float | None = None
    checked_s: float = 0.0
    kind: Hashable = None
    cached_tokens: int | None = None
    size_bytes: int = 0
    limits: AdmissionLimits | None = None
    produced: Callable[[], int] = lambda: 0
    sequences: int = 1
    open_ended: bool = False
    generates: bool = True
