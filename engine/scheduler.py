"""Which sequences run in the next step, and with how many tokens. Pure decisions: no tensors, no clock, no
I/O.

A step has one token budget. It goes, in this order, to

1. running sequences with one pending token (they decode), by rank,
2. running sequences with more (their prompt is partly computed), by rank, as much of it as the budget allows,
3. waiting sequences by rank, while there is budget, a row, and room for the whole of their tokens. A sequence
   starts with the cached blocks of its prefix; their tokens cost no budget. While a running one computes its
   next block, it waits for that, and so do those after it.

When a running sequence needs a block and none is free, the last running one by rank releases all of its
blocks and returns to the queue, to be computed again (recompute preemption).

Rank is the time of arrival, earlier by ``AGING_S`` for each step of priority, and never changes. The first by
rank is never preempted and no request passes it in the queue, so it ends, and the next becomes the first: no
request starves.
"""

from bisect import insort
from itertools import count
from operator import attrgetter
from typing import NamedTuple

from engine.block_pool import BlockPool
from engine.prefix_cache import chain_root, extend_chain
from engine.sequence import Sequence, Status

# What a step of priority is worth in waiting time, in seconds: several times what admission lets anybody wait
# (``admission.max_wait_ms``), so that priorities are strict until the engine is overloaded for long.
AGING_S = 10.0

_by_rank = attrgetter("rank")


class Chunk(NamedTuple):
    """The tokens ``start`` to ``start + length`` of a sequence, to be computed in this step."""

    sequence: Sequence
    start: int
    length: int

    @property
    def end(self) -> int:
        """The first token after it."""
        return self.start + self.length

    @property
    def is_last(self) -> bool:
        """True when nothing is pending after it, so that a token can be sampled."""
        return self.end == self.sequence.num_tokens


class Scheduler:
    """Queue, running set and block accounting. ``waiting`` and ``running`` are in the order of rank."""

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
        """Puts a new sequence into the queue."""
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
            while sequence.status is Status.RUNNING and not self._reserve(sequence, needed):
                victim = self.running[-1]
                budget += planned.pop(victim, 0)
                self.preempt(victim)
            if sequence.status is Status.RUNNING:
                planned[sequence] = length
                budget -= length

        # A step that had to preempt starts no request: the blocks it got back are for those that run.
        while budget and self.waiting and self._free_rows and self.preemptions == preemptions_before:
            sequence = self.waiting[0]
            if not self._start(sequence):
                break
            planned[sequence] = min(sequence.num_pending, budget)
            budget -= planned[sequence]

        return [Chunk(sequence, sequence.num_computed, length) for sequence, length in planned.items()]

    def advance(self, chunks: list[Chunk]) -> None:
        """Records that ``chunks`` have been computed; the blocks they filled become known."""
        block_size = self._pool.block_size
        for chunk in chunks:
            sequence = chunk.sequence
            end = sequence.num_computed = chunk.end
            if self._caches(sequence) and end % block_size < chunk.length:  # it filled a block
                self._extend_digests(sequence)
                for index in range(chunk.start // block_size, end // block_size):
                    self._pool.remember(sequence.blocks[index], sequence.digests[index])

    def finish(self, sequence: Sequence) -> None:
        """Ends a sequence, waiting or running; its blocks are free when this returns."""
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
            self._give_back(sequence)
        elif sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        sequence.status = Status.FINISHED

    def preempt(self, sequence: Sequence) -> None:
        """Take everything from a running sequence, which returns to the queue."""
        self.running.remove(sequence)
        self._give_back(sequence)
        sequence.status = Status.WAITING
        sequence.num_computed = 0
        sequence.preemptions += 1
        insort(self.waiting, sequence, key=_by_rank)
        self.preemptions += 1

    def shed(self, chunks: list[Chunk]) -> list[Chunk]:
        """After a failed step, preempts the last half by rank of what was scheduled; returns the rest."""
        scheduled = {chunk.sequence for chunk in chunks}
        by_rank = [sequence for sequence in self.running if sequence in scheduled]
        for sequence in by_rank[(len(by_rank) + 1) // 2 :]:
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
        """Gives the first waiting sequence a row and all of its blocks, or nothing when it has to wait."""
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
        pool.share(cached)  # before the rest is allocated, which might evict them
        sequence.blocks.extend(cached)
        self._reserve(sequence, sequence.num_tokens)
        sequence.num_computed = len(cached) * pool.block_size
        if not sequence.preemptions:
            self.prompt_tokens += sequence.num_prompt
        if self._caches(sequence) and not sequence.preemptions:  # one that returns finds its own blocks
            sequence.num_cached = min(sequence.num_computed, sequence.num_prompt)
            self.prefix_queries += sequence.num_prompt
            self.prefix_hits += sequence.num_cached
        del self.waiting[0]
        sequence.status = Status.RUNNING
        sequence.row = self._free_rows.pop()
        insort(self.running, sequence, key=_by_rank)
        return True

    def _caches(self, sequence: Sequence) -> bool:
        """Whether its prefix may come from the cache. An embedding needs the hidden states of every token."""
        return self._prefix_caching and not sequence.request.embed

    def _is_being_computed(self, digest: bytes, index: int) -> bool:
        """True when a running sequence will compute a block ``index`` with this identity."""
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
        sequence.blocks = []  # a new list: the runner knows by its identity that the table row is stale
        self._free_rows.append(sequence.row)
        sequence.row = -1
