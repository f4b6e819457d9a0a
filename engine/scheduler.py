"""Decides which sequences run in the next step, and with how many tokens. It has no tensors, no clock and no
I/O.

A step has one token budget. It goes, in this order, to

1. running sequences with one pending token (they decode), by rank,
2. running sequences with more (their prompt is partly computed), by rank, as far as the budget allows,
3. waiting sequences by rank, while there is budget, a row, and blocks for all of their tokens. A sequence
   starts with the cached blocks of its prefix; their tokens cost no budget. While a running sequence computes
   the next block of that prefix, the waiting one waits for it, and so do those after it in the queue.

When a running sequence needs a block and none is free, the last running one by rank releases all of its
blocks and returns to the queue, to be computed again (recompute preemption).

Rank is the time of arrival, minus ``AGING_S`` for each level of priority, and never changes. The first by
rank is never preempted and no request overtakes it in the queue, so it ends, and the next one becomes the
first: no request starves.
"""

from bisect import insort
from itertools import count
from operator import attrgetter
from typing import NamedTuple

from engine.block_pool import BlockPool
from engine.prefix_cache import chain_root, extend_chain
from engine.sequence import Sequence

# The waiting time, in seconds, that one level of priority is worth: several times the longest wait in
# admission (``admission.max_wait_ms``), so that priorities are strict until an overload lasts for long.
AGING_S = 10.0

_by_rank = attrgetter("rank")


class Chunk(NamedTuple):
    """The tokens ``start`` to ``start + length`` of a sequence, to be computed in this step."""

    sequence: Sequence
    start: int
    length: int

    @property
    def end(self) -> int:
        """The position after the chunk's last token."""
        return self.start + self.length

    @property
    def is_last(self) -> bool:
        """True if it ends with the last known token, so that the next token can be sampled."""
        return self.end == self.sequence.num_tokens


class Scheduler:
    """The queue, the running set and the allocation of blocks. Both lists are in the order of rank."""

    def __init__(
        self, pool: BlockPool, *, max_num_seqs: int, max_num_batched_tokens: int, prefix_caching: bool = True
    ) -> None:
        self._pool = pool
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._prefix_caching = prefix_caching
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._arrivals = count()
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.prompt_tokens = 0

    def add(self, sequence: Sequence) -> None:
        sequence.rank = (sequence.arrived_at - sequence.request.priority * AGING_S, next(self._arrivals))
        insort(self.waiting, sequence, key=_by_rank)

    def schedule(self) -> list[Chunk]:
        """Decide the next step and reserve its blocks. Empty when there is nothing to run."""
        budget = self._max_num_batched_tokens
        planned: dict[Sequence, int] = {}
        preemptions_before = self.preemptions

        for sequence in sorted(self.running, key=lambda one: one.num_pending > 1):
            if budget == 0:
                break
            length = min(sequence.num_pending, budget)
            needed = sequence.num_computed + length
            while sequence.is_running and not self._reserve(sequence, needed):
                victim = self.running[-1]
                budget += planned.pop(victim, 0)
                self.preempt(victim)
            if sequence.is_running:
                planned[sequence] = length
                budget -= length

        # A step with a preemption starts no request: the freed blocks are for the running sequences.
        while budget and self.waiting and self._free_rows and self.preemptions == preemptions_before:
            sequence = self.waiting[0]
            if not self._start(sequence):
                break
            planned[sequence] = min(sequence.num_pending, budget)
            budget -= planned[sequence]

        return [Chunk(sequence, sequence.num_computed, length) for sequence, length in planned.items()]

    def advance(self, chunks: list[Chunk]) -> None:
        """Record that ``chunks`` have been computed; the blocks that they filled become known."""
        block_size = self._pool.block_size
        for chunk in chunks:
            sequence = chunk.sequence
            end = sequence.num_computed = chunk.end
            if self._caches(sequence) and end % block_size < chunk.length:  # it filled a block
                self._extend_digests(sequence)
                for index in range(chunk.start // block_size, end // block_size):
                    self._pool.remember(sequence.blocks[index], sequence.digests[index])

    def finish(self, sequence: Sequence) -> None:
        """End a sequence, waiting or running, and free its blocks."""
        if sequence.is_running:
            self.running.remove(sequence)
            self._give_back(sequence)
        else:
            self.waiting.remove(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Free the blocks and the row of a running sequence and return it to the queue."""
        self.running.remove(sequence)
        self._give_back(sequence)
        sequence.num_computed = 0
        sequence.preemptions += 1
        insort(self.waiting, sequence, key=_by_rank)
        self.preemptions += 1

    def shed(self, chunks: list[Chunk]) -> list[Chunk]:
        """After a failed step: preempt the last half, by rank, of its sequences; returns the other chunks."""
        scheduled = {chunk.sequence for chunk in chunks}
        by_rank = [sequence for sequence in self.running if sequence in scheduled]
        for sequence in by_rank[(len(by_rank) + 1) // 2 :]:
            self.preempt(sequence)
        return [chunk for chunk in chunks if chunk.sequence.is_running]

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block, row and reference is accounted for."""
        self._pool.check_integrity(sequence.blocks for sequence in self.running)
        rows = sorted(self._free_rows + [sequence.row for sequence in self.running])
        if rows != list(range(self._max_num_seqs)):
            raise AssertionError("scheduler: a row is lost or has two owners")
        if any(sequence.blocks for sequence in self.waiting):
            raise AssertionError("scheduler: a waiting sequence holds blocks")
        for line in (self.running, self.waiting):
            if line != sorted(line, key=_by_rank):
                raise AssertionError("scheduler: sequences are not in the order of rank")

    def _reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        missing = self._pool.blocks_for(num_tokens) - len(sequence.blocks)
        if missing > self._pool.num_free:
            return False
        if missing > 0:
            sequence.blocks.extend(self._pool.allocate(missing))
        return True

    def _start(self, sequence: Sequence) -> bool:
        """Start the first waiting sequence with a row and all its blocks; false if it has to wait."""
        pool = self._pool
        cached: list[int] = []
        if self._caches(sequence):
            self._extend_digests(sequence)
            usable = sequence.digests[: (sequence.num_tokens - 1) // pool.block_size]  # one token is computed
            cached = pool.cache.find(usable)
            if len(cached) < len(usable) and self._is_being_computed(usable[len(cached)], len(cached)):
                return False
        if pool.blocks_for(sequence.num_tokens) - len(cached) > pool.num_free - pool.count_free(cached):
            return False
        pool.share(cached)  # before the allocation, which might evict them
        sequence.blocks.extend(cached)
        self._reserve(sequence, sequence.num_tokens)
        sequence.num_computed = len(cached) * pool.block_size
        if not sequence.preemptions:
            self.prompt_tokens += sequence.num_prompt
        if self._caches(sequence) and not sequence.preemptions:  # a preempted one finds its own blocks
            sequence.num_cached = min(sequence.num_computed, sequence.num_prompt)
            self.prefix_queries += sequence.num_prompt
            self.prefix_hits += sequence.num_cached
        del self.waiting[0]
        sequence.row = self._free_rows.pop()
        insort(self.running, sequence, key=_by_rank)
        return True

    def _caches(self, sequence: Sequence) -> bool:
        """Whether it may use the prefix cache; an embedding may not: it needs every token's hidden state."""
        return self._prefix_caching and not sequence.request.embed

    def _is_being_computed(self, digest: bytes, index: int) -> bool:
        """True if a running sequence will compute this block, whose place in the sequence is ``index``."""
        end = (index + 1) * self._pool.block_size
        return any(
            one.num_computed < end and one.digests[index : index + 1] == [digest] for one in self.running
        )

    def _extend_digests(self, sequence: Sequence) -> None:
        digests, request = sequence.digests, sequence.request
        parent = digests[-1] if digests else chain_root(request.cache_salt, sequence.adapter)
        extend_chain(digests, parent, sequence.token_ids, self._pool.block_size)

    def _give_back(self, sequence: Sequence) -> None:
        self._pool.release(sequence.blocks)
        sequence.blocks = []  # a new list object, by which the runner detects a stale table row
        self._free_rows.append(sequence.row)
        sequence.row = -1
