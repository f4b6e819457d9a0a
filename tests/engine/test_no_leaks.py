"""Any order of arrivals, steps, aborts and failed steps: no block leaks, no wrong prefix is shared, all end."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.block_pool import BlockPool
from engine.scheduler import AGING_S, Chunk, Scheduler
from engine.sequence import AdapterVersion, Sequence
from engine.values import GenerationRequest, SamplingParams

BLOCKS, BLOCK_SIZE, SEQS, BUDGET = 12, 4, 5, 10
CAPACITY = BLOCKS * BLOCK_SIZE

Prefix = tuple[object, ...]


class SchedulerMachine(RuleBasedStateMachine):
    """Drives a scheduler and a pool as the engine does, with lengths chosen to make blocks scarce.

    ``memory`` stands for the KV cache: it maps a slot to the token computed in it and all tokens before it.
    """

    prefix_caching = True

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS, BLOCK_SIZE)
        self.scheduler = Scheduler(
            self.pool, max_num_seqs=SEQS, max_num_batched_tokens=BUDGET, prefix_caching=self.prefix_caching
        )
        self.memory: dict[int, Prefix] = {}
        self.now = 0.0
        self.added = 0
        self.live: list[Sequence] = []

    @rule(
        prompt=st.one_of(
            # Two tokens and few prefixes, so that sequences share some, all or none of their blocks.
            st.lists(st.integers(0, 1), min_size=1, max_size=9),
            st.integers(1, CAPACITY - 1).map(lambda length: [0] * length),
            st.integers(1, CAPACITY - 9).map(lambda length: [1] * 8 + [0] * length),
        ),
        answer=st.integers(1, 30),
        priority=st.integers(-1, 1),
        salt=st.sampled_from([None, None, "tenant"]),
        version=st.sampled_from([None, None, 1, 2]),
    )
    def add(
        self, prompt: list[int], answer: int, priority: int, salt: str | None, version: int | None
    ) -> None:
        request = GenerationRequest(
            str(self.added), tuple(prompt), SamplingParams(max_tokens=answer), priority, salt
        )
        adapter = None if version is None else AdapterVersion("one name", version)
        sequence = Sequence(request, arrived_at=self.now, seed=0, adapter=adapter)
        self.added += 1
        self.live.append(sequence)
        self.scheduler.add(sequence)

    @rule(seconds=st.floats(0.0, 2 * AGING_S))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.one_step()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        others = {block for one in self.live if one is not sequence for block in one.blocks}
        free, own = self.pool.num_free, set(sequence.blocks) - others
        self.end(sequence)
        assert self.pool.num_free == free + len(own)

    @rule()
    def failed_step(self) -> None:
        chunks = self.scheduler.schedule()
        self.spoil(chunks)
        while len(chunks) > 1:
            kept = self.scheduler.shed(chunks)
            assert 0 < len(kept) < len(chunks)
            chunks = kept

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def step_with_a_bad_row(self, data: st.DataObject) -> None:
        chunks = self.scheduler.schedule()
        bad = data.draw(st.sampled_from(chunks))
        self.complete([chunk for chunk in chunks if chunk is not bad])
        self.spoil([bad])
        self.end(bad.sequence)

    def one_step(self) -> None:
        chunks = self.scheduler.schedule()
        assert sum(chunk.length for chunk in chunks) <= BUDGET
        assert bool(chunks) == bool(self.live)
        for chunk in chunks:
            assert chunk.length > 0
            assert chunk.start == chunk.sequence.num_computed
            assert len(chunk.sequence.blocks) * BLOCK_SIZE >= chunk.start + chunk.length
        self.complete(chunks)

    def complete(self, chunks: list[Chunk]) -> None:
        """Computes all chunks, then checks that each slot that a chunk attends to holds the right prefix."""
        for chunk in chunks:
            for position in range(chunk.start, chunk.start + chunk.length):
                self.memory[slot_of(chunk.sequence, position)] = prefix_of(chunk.sequence, position)
        for chunk in chunks:
            for position in range(chunk.start + chunk.length):
                found = self.memory[slot_of(chunk.sequence, position)]
                assert found == prefix_of(chunk.sequence, position)
        full = [chunk.sequence for chunk in chunks if chunk.is_last]
        self.scheduler.advance(chunks)
        for sequence in full:
            sequence.token_ids.append(1)
            if sequence.num_output >= sequence.request.sampling.max_tokens or sequence.num_tokens >= CAPACITY:
                self.end(sequence)

    def spoil(self, chunks: list[Chunk]) -> None:
        """Fills the slots of the chunks with garbage, as a failed step does."""
        for chunk in chunks:
            for position in range(chunk.start, chunk.start + chunk.length):
                self.memory[slot_of(chunk.sequence, position)] = ("garbage",)

    def end(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        self.live.remove(sequence)

    @invariant()
    def every_block_and_row_is_accounted_for(self) -> None:
        self.scheduler.check_integrity()

    @invariant()
    def of_equal_priority_what_runs_arrived_before_what_waits(self) -> None:
        for priority in (-1, 0, 1):
            line = self.scheduler.running + self.scheduler.waiting
            arrivals = [int(one.request.request_id) for one in line if one.request.priority == priority]
            assert arrivals == sorted(arrivals)

    @invariant()
    def statuses_tell_the_truth(self) -> None:
        assert all(one.is_running for one in self.scheduler.running)
        assert all(not one.is_running for one in self.scheduler.waiting)
        assert len(self.scheduler.running) <= SEQS
        assert len(self.live) == len(self.scheduler.running) + len(self.scheduler.waiting)

    def teardown(self) -> None:
        # The first by rank is never preempted for another, so all end within twice the sum of all work.
        bound = 10 + 2 * sum(CAPACITY for _ in self.live) * (1 + len(self.live))
        for _ in range(bound):
            if not self.live:
                break
            self.one_step()
        assert not self.live
        assert self.pool.num_free == BLOCKS
        self.scheduler.check_integrity()


def slot_of(sequence: Sequence, position: int) -> int:
    return sequence.blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE


def prefix_of(sequence: Sequence, position: int) -> Prefix:
    return (sequence.request.cache_salt, sequence.adapter, *sequence.token_ids[: position + 1])


class WithoutPrefixCaching(SchedulerMachine):
    prefix_caching = False


TestNoLeaks = SchedulerMachine.TestCase
TestNoLeaks.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestNoLeaksWithoutPrefixCaching = WithoutPrefixCaching.TestCase
TestNoLeaksWithoutPrefixCaching.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
