"""Values of the simulator: arrivals, the speed of a worker, and the outcome of each request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace.

    Args:
        number: its index in the trace.
        at: seconds since the trace began.
        prompt: tokens.
        output: tokens it will actually produce.
        max_tokens: tokens it may produce; all that admission knows of ``output``.
        tenant: the tenant that sends it.
        priority: -1, 0 or 1.
        units: ids of its prompt's leading units (``unit_tokens`` each); equal leading ids share a prefix.
    """

    number: int
    at: float
    prompt: int
    output: int
    max_tokens: int
    tenant: str = "t0"
    priority: int = 0
    units: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Profile:
    """A worker: its shape and how long its steps take.

    A step takes ``base_s + prefill_s · prefill tokens + sequence_s · decoding sequences + context_s · tokens
    of context that those read``; seconds.

    Args:
        name: its name in reports.
        total_blocks, block_size: the KV pool.
        max_num_seqs, max_num_batched_tokens: vLLM's limits of a batch and of a step.
        unit_tokens: tokens of one prefix unit of the trace; a multiple of the block size.
        by_priority: the engine's queue and its preemptions go by priority first (vLLM's
            ``--scheduling-policy priority``), otherwise by arrival alone.
        reserve_prompt: a sequence starts with the blocks of its whole prompt (the embedded engine); otherwise
            with those of its first chunk (vLLM).

    Raises:
        ValueError: a step's budget could not hold one token of each sequence, or units are no whole blocks.
    """

    name: str
    base_s: float
    prefill_s: float
    sequence_s: float
    context_s: float
    total_blocks: int
    block_size: int = 16
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 512
    unit_tokens: int = 512
    by_priority: bool = False
    reserve_prompt: bool = False

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs "
                f"{self.max_num_seqs}: a step must hold one token of each sequence"
            )
        if self.unit_tokens % self.block_size:
            raise ValueError(
                f"unit_tokens {self.unit_tokens} is no multiple of the block size {self.block_size}"
            )

    def step_s(self, prefill: int, sequences: int, context: int) -> float:
        """How long a step takes, seconds."""
        return self.base_s + self.prefill_s * prefill + self.sequence_s * sequences + self.context_s * context


@dataclass(slots=True)
class SimulatedRequest:
    """The outcome of one request; times are in seconds since the trace began.

    ``computed`` counts the tokens that were actually computed for it, including those computed again after a
    preemption, but not cached ones. ``computed`` and ``produced`` are updated when it leaves the batch;
    :meth:`evaluation.simulator.worker.SimulatedWorker.produced` returns the latter at any time.
    """

    arrival: Arrival
    handed_on_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None
    refused_at: float | None = None
    reason: str | None = None
    computed: int = 0
    cached: int = 0
    produced: int = 0
    preemptions: int = 0
    max_tokens: int | None = None

    @property
    def output(self) -> int:
        """Return the tokens it produces: its own length, or admission's limit if that is shorter."""
        return self.arrival.output if self.max_tokens is None else min(self.arrival.output, self.max_tokens)

    @property
    def ttft_s(self) -> float | None:
        """Return the seconds from arrival to the first token."""
        return None if self.first_token_at is None else self.first_token_at - self.arrival.at

    @property
    def tpot_s(self) -> float | None:
        """Mean time between two tokens; 0 for an answer of one token."""
        if self.finished_at is None or self.first_token_at is None:
            return None
        return (self.finished_at - self.first_token_at) / max(1, self.produced - 1)
