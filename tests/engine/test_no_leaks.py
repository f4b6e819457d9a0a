"""Any order of arrivals, steps, aborts and failed steps: no block leaks, none has two owners, everybody ends."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.block_pool import BlockPool
from engine.scheduler import Scheduler
from engine.sequence import Sequence, Status
from engine.values import GenerationRequest, SamplingParams

BLOCKS, BLOCK_SIZE, SEQS, BUDGET = 12, 4, 5, 10
CAPACITY = BLOCKS * BLOCK_SIZE


class SchedulerMachine(RuleBasedStateMachine):
    """Drives a scheduler and a pool as the engine does, with lengths chosen to make blocks scarce."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS, BLOCK_SIZE)
        self.scheduler = Scheduler(self.pool, max_num_seqs=SEQS, max_num_batched_tokens=BUDGET)
        self.arrivals: dict[Sequence, int] = {}
        self.live: list[Sequence] = []

    @rule(prompt=st.integers(1, CAPACITY - 1), answer=st.integers(1, 30))
    def add(self, prompt: int, answer: int) -> None:
        request = GenerationRequest(str(len(self.arrivals)), (1,) * prompt, SamplingParams(max_tokens=answer))
        sequence = Sequence(request, arrived_at=0.0, seed=0)
        self.arrivals[sequence] = len(self.arrivals)
        self.live.append(sequence)
        self.scheduler.add(sequence)

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.one_step()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        held = len(sequence.blocks)
        free = self.pool.num_free
        self.scheduler.finish(sequence)
        self.live.remove(sequence)
        assert self.pool.num_free == free + held

    @rule()
    def failed_step(self) -> None:
        chunks = self.scheduler.schedule()
        while len(chunks) > 1:
            kept = self.scheduler.shed(chunks)
            assert 0 < len(kept) < len(chunks)
            chunks = kept

    def one_step(self) -> None:
        chunks = self.scheduler.schedule()
        assert sum(chunk.length for chunk in chunks) <= BUDGET
        assert bool(chunks) == bool(self.live)
        for chunk in chunks:
            assert chunk.length > 0
            assert chunk.start == chunk.sequence.num_computed
            assert len(chunk.sequence.blocks) * BLOCK_SIZE >= chunk.start + chunk.length
        complete = [chunk.sequence for chunk in chunks if chunk.is_last]
        self.scheduler.advance(chunks)
        for sequence in complete:
            sequence.token_ids.append(1)
            if sequence.num_output >= sequence.request.sampling.max_tokens or sequence.num_tokens >= CAPACITY:
                self.scheduler.finish(sequence)
                self.live.remove(sequence)

    @invariant()
    def every_block_and_row_is_accounted_for(self) -> None:
        self.scheduler.check_integrity()

    @invariant()
    def what_runs_arrived_before_what_waits(self) -> None:
        running = [self.arrivals[one] for one in self.scheduler.running]
        waiting = [self.arrivals[one] for one in self.scheduler.waiting]
        assert running + waiting == sorted(running + waiting)
        assert len(running) <= SEQS

    @invariant()
    def statuses_tell_the_truth(self) -> None:
        assert all(one.status is Status.RUNNING for one in self.scheduler.running)
        assert all(one.status is Status.WAITING for one in self.scheduler.waiting)
        assert len(self.live) == len(self.scheduler.running) + len(self.scheduler.waiting)

    def teardown(self) -> None:
        # The oldest is never preempted for another, so all of it ends within the sum of all work, twice over.
        bound = 10 + 2 * sum(CAPACITY for _ in self.live) * (1 + len(self.live))
        for _ in range(bound):
            if not self.live:
                break
            self.one_step()
        assert not self.live
        assert self.pool.num_free == BLOCKS
        self.scheduler.check_integrity()


TestNoLeaks = SchedulerMachine.TestCase
TestNoLeaks.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
