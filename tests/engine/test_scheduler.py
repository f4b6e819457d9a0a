"""The scheduler: who gets the token budget and the blocks of a step, and who gives them back."""

from engine.block_pool import BlockPool
from engine.scheduler import Chunk, Scheduler
from engine.sequence import Sequence, Status
from engine.values import GenerationRequest, SamplingParams


def make_sequence(name: str, prompt_tokens: int) -> Sequence:
    request = GenerationRequest(name, tuple(range(1, prompt_tokens + 1)), SamplingParams(max_tokens=64))
    return Sequence(request, arrived_at=0.0, seed=0)


def make_scheduler(*, blocks: int = 64, seqs: int = 8, budget: int = 64) -> tuple[Scheduler, BlockPool]:
    pool = BlockPool(blocks, 16)
    return Scheduler(pool, max_num_seqs=seqs, max_num_batched_tokens=budget), pool


def step(scheduler: Scheduler) -> list[tuple[str, int, int]]:
    """One step in which every complete sequence gets a token; returns (name, start, length) of each chunk."""
    chunks = scheduler.schedule()
    complete = [chunk.sequence for chunk in chunks if chunk.is_last]
    scheduler.advance(chunks)
    for sequence in complete:
        sequence.token_ids.append(1)
    scheduler.check_integrity()
    return [described(chunk) for chunk in chunks]


def described(chunk: Chunk) -> tuple[str, int, int]:
    return chunk.sequence.request.request_id, chunk.start, chunk.length


def test_prompts_that_fit_the_budget_run_together_in_order_of_arrival() -> None:
    scheduler, _ = make_scheduler()
    scheduler.add(make_sequence("a", 20))
    scheduler.add(make_sequence("b", 30))
    assert step(scheduler) == [("a", 0, 20), ("b", 0, 30)]
    assert step(scheduler) == [("a", 20, 1), ("b", 30, 1)]


def test_a_long_prompt_is_computed_in_chunks_of_what_the_budget_leaves() -> None:
    scheduler, _ = make_scheduler(budget=32)
    scheduler.add(make_sequence("long", 70))
    assert [step(scheduler) for _ in range(4)] == [
        [("long", 0, 32)],
        [("long", 32, 32)],
        [("long", 64, 6)],
        [("long", 70, 1)],
    ]


def test_running_decodes_come_before_the_chunks_of_a_prompt() -> None:
    scheduler, _ = make_scheduler(budget=32)
    scheduler.add(make_sequence("a", 8))
    step(scheduler)
    scheduler.add(make_sequence("long", 100))
    scheduler.add(make_sequence("late", 4))
    assert step(scheduler) == [("a", 8, 1), ("long", 0, 31)]
    assert step(scheduler) == [("a", 9, 1), ("long", 31, 31)]
    assert step(scheduler) == [("a", 10, 1), ("long", 62, 31)]
    assert step(scheduler) == [("a", 11, 1), ("long", 93, 7), ("late", 0, 4)]


def test_no_more_sequences_run_than_max_num_seqs() -> None:
    scheduler, _ = make_scheduler(seqs=2)
    for name in "abc":
        scheduler.add(make_sequence(name, 4))
    assert [name for name, _, _ in step(scheduler)] == ["a", "b"]
    scheduler.finish(scheduler.running[0])
    assert [name for name, _, _ in step(scheduler)] == ["b", "c"]


def test_a_prompt_starts_only_when_all_of_its_blocks_are_free_and_later_ones_do_not_pass_it() -> None:
    scheduler, pool = make_scheduler(blocks=4)
    scheduler.add(make_sequence("a", 16))
    scheduler.add(make_sequence("big", 60))
    scheduler.add(make_sequence("small", 4))
    assert step(scheduler) == [("a", 0, 16)]
    assert pool.num_free == 3
    assert step(scheduler) == [("a", 16, 1)]
    scheduler.finish(scheduler.running[0])
    assert step(scheduler) == [("big", 0, 60)]


def test_when_blocks_run_out_the_newest_is_preempted_and_returns_at_the_head_of_the_queue() -> None:
    scheduler, pool = make_scheduler(blocks=3)
    for name, length in (("a", 15), ("b", 15), ("c", 15)):
        scheduler.add(make_sequence(name, length))
    scheduler.add(make_sequence("d", 15))
    assert len(step(scheduler)) == 3
    assert len(step(scheduler)) == 3  # the sixteenth token still fits the first block
    assert step(scheduler) == [
        ("a", 16, 1)
    ]  # a takes c's block, b has no newer one to take from and leaves too
    assert [one.request.request_id for one in scheduler.waiting] == ["b", "c", "d"]
    assert scheduler.preemptions == 2
    assert pool.num_free == 1
    assert all(one.num_computed == 0 and not one.blocks for one in scheduler.waiting)


def test_a_preempted_sequence_is_computed_again_with_the_tokens_it_had() -> None:
    scheduler, _ = make_scheduler(blocks=2)
    scheduler.add(make_sequence("a", 15))
    scheduler.add(make_sequence("b", 14))
    for _ in range(3):
        step(scheduler)
    assert scheduler.preemptions == 1
    scheduler.finish(scheduler.running[0])
    assert step(scheduler) == [("b", 0, 16)]


def test_a_chunk_already_planned_for_a_sequence_is_withdrawn_when_it_is_preempted() -> None:
    scheduler, _ = make_scheduler(blocks=4, budget=16)
    old, new = make_sequence("old", 47), make_sequence("new", 2)
    scheduler.add(old)
    step(scheduler)
    step(scheduler)
    step(scheduler)
    scheduler.add(new)
    step(scheduler)
    old.token_ids.extend([1] * 17)  # now wants two more blocks, and is behind the decode of the newer one
    assert step(scheduler) == [("old", 48, 15)]
    assert new.status is Status.WAITING


def test_finishing_frees_blocks_and_row_at_once_wherever_the_sequence_is() -> None:
    scheduler, pool = make_scheduler(seqs=1)
    running, waiting = make_sequence("running", 40), make_sequence("waiting", 4)
    scheduler.add(running)
    scheduler.add(waiting)
    step(scheduler)
    scheduler.finish(waiting)
    scheduler.finish(running)
    assert pool.num_free == pool.num_blocks
    assert not scheduler.running
    assert not scheduler.waiting
    assert scheduler.schedule() == []


def test_shedding_keeps_the_older_half() -> None:
    scheduler, _ = make_scheduler()
    for name in "abcde":
        scheduler.add(make_sequence(name, 4))
    kept = scheduler.shed(scheduler.schedule())
    assert [described(chunk)[0] for chunk in kept] == ["a", "b", "c"]
    assert [one.request.request_id for one in scheduler.waiting] == ["d", "e"]
    scheduler.check_integrity()
