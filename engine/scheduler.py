"""Who runs in the next step, and with how many tokens. Pure decisions: no tensors, no clock, no I/O.

A step has one token budget. It goes, in this order, to

1. running sequences with one pending token (they are answering), oldest first,
2. running sequences with more (their prompt is partly computed), oldest first, as much of it as the budget
   allows,
3. waiting sequences in the order of arrival, while there is budget, a row, and room for the whole of their
   tokens.

When a running sequence needs a block and none is free, the newest running sequence gives all of its blocks
back and returns to the head of the queue, to be computed again (recompute preemption, seed 002 §5.4).
Sequences start in order of arrival and the newest leaves first, so everything that runs arrived before
everything that waits; the oldest is never preempted for another one and always ends.
"""

from collections import deque
from dataclasses import dataclass

from engine.block_pool import BlockPool
from engine.sequence import Sequence, Status


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens ``start`` to ``start + length`` of a sequence, to be computed in this step."""

    sequence: Sequence
    start: int
    length: int

    @property
    def is_last(self) -> bool:
        """True when nothing is pending after it, so that a token can be sampled."""
        return self.start + self.length == self.sequence.num_tokens


class Scheduler:
    """Queue, running set and block accounting."""

    def __init__(self, pool: BlockPool, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self._pool = pool
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0

    def add(self, sequence: Sequence) -> None:
        """Puts a new sequence at the end of the queue."""
        self.waiting.append(sequence)

    def schedule(self) -> list[Chunk]:
        """Decides the next step and reserves the blocks for it. Empty when there is nothing to run."""
        budget = self._max_num_batched_tokens
        planned: dict[Sequence, int] = {}
        preemptions_before = self.preemptions

        for sequence in sorted(self.running, key=lambda one: one.num_pending > 1):
            if budget == 0:
                break
            length = min(sequence.num_pending, budget)
            needed = sequence.num_computed + length
            while sequence.status is Status.RUNNING and not self._reserve(sequence, needed):
                victim = self.running[-1]
                budget += planned.pop(victim, 0)
                self.preempt(victim)
            if sequence.status is Status.RUNNING:
                planned[sequence] = length
                budget -= length

        # A step that had to preempt starts nobody: the blocks it got back are for those that run.
        while budget and self.waiting and self._free_rows and self.preemptions == preemptions_before:
            sequence = self.waiting[0]
            if not self._reserve(sequence, sequence.num_tokens):
                break
            self._start(self.waiting.popleft())
            planned[sequence] = min(sequence.num_pending, budget)
            budget -= planned[sequence]

        return [Chunk(sequence, sequence.num_computed, length) for sequence, length in planned.items()]

    def advance(self, chunks: list[Chunk]) -> None:
        """Records that ``chunks`` have been computed."""
        for chunk in chunks:
            chunk.sequence.num_computed = chunk.start + chunk.length

    def finish(self, sequence: Sequence) -> None:
        """Ends a sequence, waiting or running; its blocks are free when this returns."""
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
            self._give_back(sequence)
        elif sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        sequence.status = Status.FINISHED

    def preempt(self, sequence: Sequence) -> None:
        """Takes everything from a running sequence and puts it at the head of the queue."""
        self.running.remove(sequence)
        self._give_back(sequence)
        sequence.status = Status.WAITING
        sequence.num_computed = 0
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def shed(self, chunks: list[Chunk]) -> list[Chunk]:
        """After a failed step, preempts the newer half of the scheduled sequences; returns the rest."""
        scheduled = {chunk.sequence for chunk in chunks}
        oldest_first = [sequence for sequence in self.running if sequence in scheduled]
        for sequence in reversed(oldest_first[(len(oldest_first) + 1) // 2 :]):
            self.preempt(sequence)
        return [chunk for chunk in chunks if chunk.sequence.status is Status.RUNNING]

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block, row and reference is accounted for."""
        self._pool.check_integrity(sequence.blocks for sequence in self.running)
        rows = sorted(self._free_rows + [sequence.row for sequence in self.running])
        if rows != list(range(self._max_num_seqs)):
            raise AssertionError("scheduler: a row is lost or has two owners")
        if any(sequence.blocks for sequence in self.waiting):
            raise AssertionError("scheduler: a waiting sequence holds blocks")

    def _reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        missing = self._pool.blocks_for(num_tokens) - len(sequence.blocks)
        if missing > self._pool.num_free:
            return False
        if missing > 0:
            sequence.blocks.extend(self._pool.allocate(missing))
        return True

    def _start(self, sequence: Sequence) -> None:
        sequence.status = Status.RUNNING
        sequence.row = self._free_rows.pop()
        self.running.append(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        self._pool.release(sequence.blocks)
        sequence.blocks = []  # a new list: the runner knows by its identity that the table row is stale
        self._free_rows.append(sequence.row)
        sequence.row = -1
