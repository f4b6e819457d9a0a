"""The scheduler: which sequences get the token budget and the blocks of a step, and which are preempted."""

from engine.block_pool import BlockPool
from engine.scheduler import AGING_S, Chunk, Scheduler
from engine.sequence import Sequence
from engine.values import GenerationRequest, SamplingParams


def make_sequence(
    name: str,
    prompt_tokens: int,
    *,
    begins_with: tuple[int, ...] = (),
    priority: int = 0,
    arrived_at: float = 0.0,
    salt: str | None = None,
) -> Sequence:
    """A sequence whose prompt has nothing in common with that of another name."""
    first = 1000 * sum(map(ord, name))
    prompt = begins_with + tuple(range(first, first + prompt_tokens - len(begins_with)))
    request = GenerationRequest(name, prompt, SamplingParams(max_tokens=64), priority, salt)
    return Sequence(request, arrived_at=arrived_at, seed=0)


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
    ]  # a takes c's block; b has no newer sequence to take from and is preempted too
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
    old.token_ids.extend([1] * 17)  # it needs two more blocks, and comes after the decode of the newer one
    assert step(scheduler) == [("old", 48, 15)]
    assert not new.is_running


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


def names(sequences: list[Sequence]) -> list[str]:
    return [one.request.request_id for one in sequences]


def test_a_higher_priority_starts_first_and_equal_ones_start_in_the_order_of_arrival() -> None:
    scheduler, _ = make_scheduler(seqs=1)
    for at, (name, priority) in enumerate((("a", 0), ("b", -1), ("c", 1), ("d", 0), ("e", 1))):
        scheduler.add(make_sequence(name, 4, priority=priority, arrived_at=at))
    started = []
    while scheduler.waiting or scheduler.running:
        started += [name for name, _, _ in step(scheduler)]
        scheduler.finish(scheduler.running[0])
    assert started == ["c", "e", "a", "d", "b"]


def test_the_newest_of_the_lowest_priority_is_preempted_and_returns_at_the_head_of_its_class() -> None:
    scheduler, _ = make_scheduler(blocks=4)
    for at, (name, priority) in enumerate((("low", 0), ("newlow", 0), ("high", 1), ("newhigh", 1))):
        scheduler.add(make_sequence(name, 15, priority=priority, arrived_at=at))
    step(scheduler)
    for at, (name, priority) in enumerate((("latelow", 0), ("latehigh", 1))):
        scheduler.add(make_sequence(name, 15, priority=priority, arrived_at=4 + at))
    step(scheduler)
    assert names(scheduler.running) == ["high", "newhigh", "low", "newlow"]
    step(scheduler)  # all four need a second block: the two of high priority take them
    assert names(scheduler.running) == ["high", "newhigh"]
    assert names(scheduler.waiting) == ["latehigh", "low", "newlow", "latelow"]


def test_a_request_of_low_priority_rises_a_class_for_every_aging_interval_it_waits() -> None:
    scheduler, _ = make_scheduler()
    scheduler.add(make_sequence("low", 4, priority=-1, arrived_at=0.0))
    scheduler.add(make_sequence("high", 4, priority=1, arrived_at=2 * AGING_S - 1))
    scheduler.add(make_sequence("too late", 4, priority=1, arrived_at=2 * AGING_S + 1))
    assert names(scheduler.waiting) == ["high", "low", "too late"]


def test_nobody_starves_under_an_endless_stream_of_more_important_requests() -> None:
    """Twice as many requests arrive as can be served; the low one still starts once it has aged enough."""
    scheduler, _ = make_scheduler(seqs=2)
    low = make_sequence("low", 4, priority=-1)
    scheduler.add(low)
    now, served = 0.0, 0
    while not low.is_running:
        for number in range(4):
            high = make_sequence(f"{served}-{number}", 4, priority=1, arrived_at=now)
            scheduler.add(high)
        now += 0.5
        step(scheduler)
        assert now < 4 * AGING_S + 5, "it starves"
        for sequence in [one for one in scheduler.running if one is not low]:
            scheduler.finish(sequence)
            served += 1
    # Requests that arrive in its first 2 * AGING_S, at twice the rate of service, run before it.
    assert 2 * AGING_S <= now <= 4 * AGING_S + 2
    assert served > 0


SHARED = tuple(range(1, 65))


def test_a_sequence_starts_with_the_cached_blocks_of_its_prefix_and_they_cost_no_budget() -> None:
    scheduler, pool = make_scheduler(budget=80)
    scheduler.add(make_sequence("first", 70, begins_with=SHARED))
    step(scheduler)
    second = make_sequence("second", 130, begins_with=SHARED)
    scheduler.add(second)
    assert step(scheduler) == [("first", 70, 1), ("second", 64, 66)]
    assert second.blocks[:4] == scheduler.running[0].blocks[:4]
    assert (second.num_cached, scheduler.prefix_queries, scheduler.prefix_hits) == (64, 200, 64)
    assert pool.num_free == 64 - 5 - 5


def test_blocks_of_prompt_and_answer_stay_cached_after_their_sequence_has_ended() -> None:
    scheduler, pool = make_scheduler(budget=200)
    first = make_sequence("a", 20)
    scheduler.add(first)
    for _ in range(14):
        step(scheduler)
    scheduler.finish(first)
    assert pool.num_free == pool.num_blocks
    turn = make_sequence("b", 60, begins_with=tuple(first.token_ids))
    scheduler.add(turn)
    assert step(scheduler) == [("b", 32, 28)]


def test_the_last_block_of_a_fully_cached_prompt_is_computed_again() -> None:
    scheduler, _ = make_scheduler()
    for name in ("a", "b"):
        scheduler.add(make_sequence(name, 64, begins_with=SHARED))
        chunks = step(scheduler)
        scheduler.finish(scheduler.running[0])
    assert chunks == [("b", 48, 16)]


def test_a_sequence_waits_for_a_block_that_a_running_one_computes_instead_of_computing_it_too() -> None:
    scheduler, _ = make_scheduler(budget=48)
    for name in ("a", "b", "c"):
        scheduler.add(make_sequence(name, 70, begins_with=SHARED))
    assert step(scheduler) == [("a", 0, 48)]
    assert step(scheduler) == [("a", 48, 22)]
    assert step(scheduler) == [("a", 70, 1), ("b", 64, 6), ("c", 64, 6)]


def test_no_sequence_waits_for_a_computed_block_that_is_no_longer_cached() -> None:
    scheduler, pool = make_scheduler(blocks=8, budget=200)
    scheduler.add(make_sequence("a", 64, begins_with=SHARED))
    step(scheduler)
    again = make_sequence("b", 64, begins_with=SHARED)
    scheduler.add(again)
    step(scheduler)  # the cache now refers to b's copy of the last block of the prompt
    scheduler.finish(again)
    pool.release(pool.allocate(pool.num_free))  # evicts that copy while a still runs
    scheduler.add(make_sequence("c", 70, begins_with=SHARED))
    assert step(scheduler)[1] == ("c", 48, 22)


def test_a_sequence_with_another_salt_finds_no_cached_block() -> None:
    scheduler, _ = make_scheduler(budget=200)
    scheduler.add(make_sequence("a", 64, begins_with=SHARED, salt="one"))
    step(scheduler)
    scheduler.add(make_sequence("b", 64, begins_with=SHARED, salt="two"))
    assert step(scheduler)[1] == ("b", 0, 64)
    assert scheduler.prefix_hits == 0


def test_a_preempted_sequence_finds_its_own_blocks_and_its_prompt_counts_once() -> None:
    scheduler, pool = make_scheduler()
    scheduler.add(make_sequence("a", 40))
    step(scheduler)
    scheduler.preempt(scheduler.running[0])
    assert pool.num_free == pool.num_blocks
    assert step(scheduler) == [("a", 32, 9)]
    assert (scheduler.prefix_queries, scheduler.prefix_hits) == (40, 0)
    assert scheduler.running[0].num_cached == 0


def test_without_prefix_caching_everything_is_computed_and_nothing_is_kept() -> None:
    pool = BlockPool(64, 16)
    scheduler = Scheduler(pool, max_num_seqs=8, max_num_batched_tokens=200, prefix_caching=False)
    for name in ("a", "b"):
        scheduler.add(make_sequence(name, 70, begins_with=SHARED))
    assert step(scheduler) == [("a", 0, 70), ("b", 0, 70)]
    assert not any(block in pool.cache for block in range(pool.num_blocks + 1))
    assert scheduler.prefix_queries == 0
