"""Values of the admission stage."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Reason(StrEnum):
    """Why a request was kept from its backend; stable codes of the public surface."""

    QUEUE_FULL = "queue_full"
    WAIT_EXCEEDED = "wait_exceeded"
    TOKEN_BUDGET_EXCEEDED = "token_budget_exceeded"
    MEMORY_PRESSURE = "memory_pressure"
    LOW_PRIORITY_SHED = "low_priority_shed"
    CIRCUIT_OPEN = "circuit_open"


@dataclass(frozen=True, slots=True)
class Load:
    """A backend's load at one moment, as its engine told.

    Args:
        running: sequences in the engine's batch.
        waiting: sequences in the engine's own queue.
        kv_usage: share of KV blocks in use, 0 to 1.
        total_blocks: KV blocks of the pool; 0 when unknown.
        block_size: tokens a block holds; 0 when unknown.
        max_running: most sequences that one batch takes; 0 when unknown.
    """

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    total_blocks: int = 0
    block_size: int = 0
    max_running: int = 0


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request asks of its backend.

    ``deadline`` is on the injected clock, in seconds; ``None`` when the caller set none.
    """

    backend: str
    tenant: str
    priority: int
    input_tokens: int
    max_output_tokens: int
    arrived_at: float
    deadline: float | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """Thresholds (seed 000 §8, with their reasons there).

    Args:
        max_queue: requests waiting for the backend; beyond it the wait would break the TTFT target.
        max_wait_s: estimated wait beyond which a gentler answer is better.
        max_input_tokens: longest prompt; leaves 496 tokens for the answer in 4,096.
        kv_pressure: KV usage from which a new sequence would likely cause preemption.
        priority_factor: room and wait budget of priority above 0, times this.
    """

    max_queue: int = 100
    max_wait_s: float = 2.0
    max_input_tokens: int = 3600
    kv_pressure: float = 0.93
    priority_factor: float = 1.2
