"""Admission in a journey: queues, fallbacks, and what the answer reports."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial

import msgspec

from admission.events import AdmissionEvent, Admitted
from admission.values import BackendLoad
from budgeting.values import Message, Role
from gateway.backends.port import BackendState, Completion, DeltaSink, Work
from gateway.contracts.events import Delta
from gateway.contracts.values import Contract, FinishReason, GenerateRequest, Sampling
from gateway.routing.check import KnownNames
from gateway.routing.revision import Revision, make_revision
from resilience.failures import BackendFailure, FailureKind
from tests.journey.rig import JourneyRig, RecordingSink
from tests.scripted import Script, ScriptedBackend
from tests.virtual_time import loop_time, virtual_time

Build = Callable[..., JourneyRig]
Ask = Callable[..., GenerateRequest]

ONE_AT_A_TIME = BackendLoad(max_running=1)
SLOW = Script(("Hello",) * 5, delay_s=0.03)


class Slow(ScriptedBackend):
    """A backend that runs one call at a time, and none before ``may_begin`` is set."""

    def __init__(self, *scripts: Script, name: str = "local") -> None:
        super().__init__(name, scripts=scripts or (SLOW,), load=ONE_AT_A_TIME)
        self.may_begin = asyncio.Event()

    async def generate(self, work: Work, out: DeltaSink) -> Completion:
        await self.may_begin.wait()
        return await super().generate(work, out)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - a gate sets no event when it changes
            await asyncio.sleep(0.001)


def wait_all_queued(rig: JourneyRig, tasks: Sequence[asyncio.Task[RecordingSink]]) -> bool:
    gate = rig.admission.gate("local")
    return gate.in_flight + gate.queued + sum(task.done() for task in tasks) == len(tasks)


async def run_queued(rig: JourneyRig, *requests: GenerateRequest) -> list[RecordingSink]:
    """Runs requests that arrive one after the other, each when the one before it is queued.

    The first answer begins when all requests have arrived.
    """
    backend = rig.backends["local"]
    assert isinstance(backend, Slow)
    async with asyncio.TaskGroup() as tasks:
        running: list[asyncio.Task[RecordingSink]] = []
        for number, request in enumerate(requests):
            named = msgspec.structs.replace(
                request, request_id=f"req_{number}", generation_id=f"gen_{number}"
            )
            running.append(tasks.create_task(rig.run(named)))
            await until(partial(wait_all_queued, rig, running))
        backend.may_begin.set()
    return [task.result() for task in running]


async def test_a_request_is_accepted_before_it_waits_and_one_that_is_refused_is_not(
    build_rig: Build, ask: Ask
) -> None:
    backend, accepted = Slow(), list[str]()
    rig = build_rig(backends=[backend])
    async with asyncio.TaskGroup() as tasks:
        for name in ("first", "second"):
            asked = ask(request_id=name, generation_id=f"gen_{name}")
            told = partial(accepted.append, name)
            tasks.create_task(rig.journey.run(asked, RecordingSink(), told))
        await until(lambda: rig.admission.gate("local").queued == 1)
        assert accepted == ["first", "second"]
        backend.may_begin.set()
    refused = RecordingSink()
    await rig.journey.run(ask(model="none"), refused, partial(accepted.append, "refused"))
    assert refused.error is not None and refused.error.code == "unknown_model"
    assert accepted == ["first", "second"]


@virtual_time
async def test_a_request_waits_for_its_turn_and_says_how_long(build_rig: Build, ask: Ask) -> None:
    rig = build_rig(backends=[Slow()])
    first, second = await run_queued(rig, ask(), ask())
    assert first.answer is not None and second.answer is not None
    assert second.answer.fallback is None
    waits_ms = [sink.answer.timings.queue_wait_ms for sink in (first, second) if sink.answer is not None]
    assert waits_ms[0] < waits_ms[1] and waits_ms[1] >= 150, "the answer before it takes 150 ms"
    assert rig.in_use() == []


@virtual_time
async def test_the_wait_for_a_fallback_target_counts_as_queue_wait(build_rig: Build, ask: Ask) -> None:
    pool = Slow(name="pool")
    dead = ScriptedBackend("local", state=BackendState.DEAD)
    rig = build_rig(backends=[dead, pool], route={"fallback": ["pool"]})
    gate = rig.admission.gate("pool")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(rig.run(ask()))
        await until(lambda: gate.in_flight == 1)
        waiting = tasks.create_task(rig.run(ask(request_id="req_2", generation_id="gen_2")))
        await until(lambda: gate.queued == 1)
        pool.may_begin.set()
    answer = waiting.result().answer
    assert answer is not None and answer.backend_name == "pool"
    waited_ms = answer.timings.queue_wait_ms
    assert waited_ms >= 150, "the answer before it takes 150 ms"
    assert answer.timings.ttft_ms is not None and waited_ms <= answer.timings.ttft_ms
    row = next(row for row in rig.outbox.rows if row.generation_id == "gen_2")
    record = next(record for record in rig.records if record.generation_id == "gen_2")
    assert row.queue_wait_ms == record.queue_wait_ms == waited_ms
    assert record.generation_ms is not None and record.generation_ms + waited_ms <= record.total_ms


@virtual_time
async def test_the_wait_in_a_queue_that_refused_in_the_end_counts_as_queue_wait(
    build_rig: Build, ask: Ask
) -> None:
    rig = build_rig(
        backends=[Slow(), ScriptedBackend("pool")],
        route={"admission": {"max_wait_ms": 100}, "fallback": ["pool"]},
    )
    gate = rig.admission.gate("local")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(rig.run(ask()))
        await until(lambda: gate.in_flight == 1)
        second = await rig.run(ask(request_id="req_2", generation_id="gen_2"))
        backend = rig.backends["local"]
        assert isinstance(backend, Slow)
        backend.may_begin.set()
    assert second.answer is not None and second.answer.backend_name == "pool"
    assert second.answer.timings.queue_wait_ms >= 100


@virtual_time
async def test_a_request_that_broke_off_reports_its_wait_too(build_rig: Build, ask: Ask) -> None:
    broken = Script((), failure=BackendFailure(FailureKind.INVALID_INPUT, "no"))
    rig = build_rig(backends=[Slow(SLOW, broken)])
    await run_queued(rig, ask(), ask())
    row = rig.outbox.rows[-1]
    assert (row.finish_reason, row.error_code) == ("error", "invalid_request")
    assert row.queue_wait_ms >= 150
    [waited] = [one.queue_wait_ms for one in rig.records if one.request_id == row.request_id]
    assert waited == row.queue_wait_ms


@virtual_time
async def test_a_caller_who_leaves_the_queue_leaves_nothing_there(build_rig: Build, ask: Ask) -> None:
    backend = Slow()
    rig = build_rig(backends=[backend])
    gate = rig.admission.gate("local")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(rig.run(ask()))
        await until(lambda: gate.in_flight == 1)
        waiting = tasks.create_task(rig.run(ask(request_id="req_2", generation_id="gen_2")))
        await until(lambda: gate.queued == 1)
        waiting.cancel()
        await until(lambda: gate.queued == 0)
        assert gate.in_flight == 1
        backend.may_begin.set()
    assert len(backend.calls) == 1
    assert rig.in_use() == []


@virtual_time
async def test_a_long_queue_shortens_answers_and_says_so(build_rig: Build, ask: Ask) -> None:
    route = {"admission": {"ladder": [{"depth": 1, "max_tokens": 7}]}}
    rig = build_rig(backends=[Slow()], route=route)
    asked = ask(sampling=Sampling(max_tokens=100))
    *_, last = await run_queued(rig, asked, asked, asked)
    assert last.answer is not None
    [warning] = last.answer.warnings
    assert "max_tokens was lowered to 7" in warning
    assert [work.sampling.max_tokens for work in rig.backends["local"].calls] == [100, 100, 7]


@virtual_time
async def test_an_answer_that_a_long_queue_cut_replaces_no_stored_one(build_rig: Build, ask: Ask) -> None:
    slow = Slow(Script(), Script(), Script(("Hel",), finish_reason=FinishReason.LENGTH))
    ladder = {"ladder": [{"depth": 1, "max_tokens": 1}]}
    rig = build_rig(backends=[slow], route={"admission": ladder, "fallback": ["response_cache", "degraded"]})
    whole, _, cut = await run_queued(rig, ask(), ask(), ask())
    slow.state = BackendState.DEAD
    stored = (await rig.run(ask(generation_id="gen_9"))).answer
    assert whole.answer is not None and cut.answer is not None and stored is not None
    assert cut.answer.output_text == "Hel"
    assert (stored.output_text, stored.finish_reason) == (whole.answer.output_text, FinishReason.STOP)


@virtual_time
async def test_a_request_pushed_out_of_the_queue_is_answered_by_the_fallback_chain(
    build_rig: Build, ask: Ask
) -> None:
    rig = build_rig(backends=[Slow()], route={"admission": {"max_queue": 1}})
    # A queue of one has room for a second request of high priority; the third one pushes the low one out.
    _, low, *high = await run_queued(rig, ask(), ask(priority=-1), ask(priority=1), ask(priority=1))
    assert low.answer is not None and low.answer.fallback is not None
    assert (low.answer.fallback.kind, low.answer.fallback.reason) == (
        "degraded_response", "low_priority_shed",
    )  # fmt: skip
    assert low.answer.fallback.retry_after_ms is not None
    assert all(sink.answer is not None and sink.answer.fallback is None for sink in high)
    assert rig.in_use() == []


@virtual_time
async def test_a_deadline_that_passes_in_the_queue_ends_the_wait_at_once(build_rig: Build, ask: Ask) -> None:
    backend = Slow()
    rig = build_rig(backends=[backend])
    gate = rig.admission.gate("local")
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(rig.run(ask()))
        await until(lambda: gate.in_flight == 1)
        hurried = ask(request_id="req_2", generation_id="gen_2", deadline=loop_time() + 1.0)
        late = await rig.run(hurried)
        assert not first.done()
        backend.may_begin.set()
    assert late.answer is not None and late.answer.fallback is not None
    assert late.answer.fallback.reason == "wait_exceeded"


@virtual_time
async def test_the_wait_in_the_queue_is_limited_by_the_route(build_rig: Build, ask: Ask) -> None:
    rig = build_rig(
        backends=[Slow(Script(("a",) * 40, delay_s=0.02))], route={"admission": {"max_wait_ms": 100}}
    )
    _, second = await run_queued(rig, ask(), ask(allow_fallback=False))
    assert second.error is not None
    assert (second.error.status, second.error.code) == (503, "wait_exceeded")
    assert second.error.retry_after_ms is not None


def checked_for(seconds: float) -> Callable[[GenerateRequest], Awaitable[GenerateRequest]]:
    async def check(request: GenerateRequest) -> GenerateRequest:
        return msgspec.structs.replace(request, checked_s=seconds)

    return check


@virtual_time
async def test_the_time_in_which_a_grammar_was_checked_is_no_wait_for_a_backend(
    build_rig: Build, ask: Ask
) -> None:
    route = {"slo": {"ttft_ms": 3_000}, "admission": {"refuse_late": True}}
    began_at = loop_time() - 20.0
    request = ask(arrived_at=began_at, allow_fallback=False)
    assert (await build_rig(route=route, check_shape=checked_for(20.0)).run(request)).answer is not None
    late = await build_rig(route=route, check_shape=checked_for(10.0)).run(request)
    assert late.error is not None and late.error.code == "wait_exceeded"
    assert "grammar" not in late.error.message


@virtual_time
async def test_a_deadline_that_passes_while_a_grammar_is_checked_names_the_check_as_the_cause(
    build_rig: Build, ask: Ask
) -> None:
    began_at = loop_time() - 60.0
    request = ask(arrived_at=began_at, deadline=began_at + 2.0, allow_fallback=False)
    late = await build_rig(check_shape=checked_for(59.9)).run(request)
    assert late.error is not None and (late.error.status, late.error.code) == (503, "wait_exceeded")
    assert (
        "the check of its grammar took 59900 ms: use a simpler one, or a later deadline" in late.error.message
    )


@virtual_time
async def test_requests_queued_for_an_engine_that_dies_are_answered_at_once(
    build_rig: Build, ask: Ask
) -> None:
    backend = Slow(Script(("a",), failure=BackendFailure(FailureKind.ENGINE_DEAD, "gone")))
    rig = build_rig(backends=[backend])
    gate = rig.admission.gate("local")
    async with asyncio.TaskGroup() as tasks:
        running = []
        for number in range(6):
            request = ask(request_id=f"req_{number}", generation_id=f"gen_{number}")
            running.append(tasks.create_task(rig.run(request)))
        await until(lambda: gate.queued == 5)
        backend.state = BackendState.DEAD
        backend.may_begin.set()
        begun = loop_time()
        await until(lambda: gate.queued == 0 and gate.in_flight == 0)
    assert loop_time() - begun < 0.1
    for task in running[1:]:
        answer = task.result().answer
        assert answer is not None and answer.fallback is not None
        assert answer.fallback.reason == "engine_dead"
    assert len(backend.calls) == 1
    assert rig.in_use() == []


@virtual_time
async def test_a_backend_that_is_not_ready_yet_does_not_count_as_failed(build_rig: Build, ask: Ask) -> None:
    backend = Slow(Script())
    backend.may_begin.set()
    backend.state = BackendState.STARTING
    rig = build_rig(backends=[backend])
    for number in range(20):
        sink = await rig.run(ask(generation_id=f"gen_{number}"))
        assert sink.answer is not None and sink.answer.fallback is not None
        assert sink.answer.fallback.reason == "backend_unavailable"
    backend.state = BackendState.READY
    sink = await rig.run(ask())
    assert sink.answer is not None and sink.answer.fallback is None


async def test_a_prompt_longer_than_the_routes_limit_is_trimmed_to_it(build_rig: Build, ask: Ask) -> None:
    rig = build_rig(route={"admission": {"max_input_tokens": 300}, "budgets": {"recent_turns": 1200}})
    turns = tuple(
        Message(Role.USER if i % 2 == 0 else Role.ASSISTANT, f"turn {i} " + "word " * 40) for i in range(21)
    )
    answer = (await rig.run(ask(messages=turns))).answer
    assert answer is not None and answer.fallback is None
    assert answer.usage.input_tokens <= 300
    assert answer.budget.dropped_turns > 0


async def test_truncation_drops_the_oldest_turns_that_do_not_fit_and_nothing_else(
    build_rig: Build, ask: Ask
) -> None:
    turns = tuple(
        Message(Role.USER if i % 2 == 0 else Role.ASSISTANT, f"turn {i} " + "word " * 300) for i in range(41)
    )
    asked = partial(ask, contract=Contract.CHAT, truncate=True)
    whole = (await build_rig().run(asked(messages=turns[:5]))).answer
    assert whole is not None and whole.budget.dropped_turns == 0
    cut = (await build_rig().run(asked(messages=turns))).answer
    assert cut is not None and 0 < cut.budget.dropped_turns < 40
    assert cut.usage.input_tokens > whole.usage.input_tokens
    assert (await build_rig().run(ask(contract=Contract.CHAT, messages=turns))).answer is None


async def test_the_routes_limit_yields_to_a_prompt_that_may_not_be_trimmed(
    build_rig: Build, ask: Ask
) -> None:
    rig = build_rig(route={"admission": {"max_input_tokens": 300}, "budgets": {"recent_turns": 1200}})
    turns = (Message(Role.USER, "old"), Message(Role.ASSISTANT, "older"), Message(Role.USER, "word " * 400))
    answer = (await rig.run(ask(messages=turns))).answer
    assert answer is not None and answer.fallback is None
    assert answer.usage.input_tokens > 300
    assert answer.budget.dropped_turns == 2


async def test_a_prompt_that_does_not_fit_the_model_is_refused(build_rig: Build, ask: Ask) -> None:
    rig = build_rig(route={"admission": {"max_input_tokens": 300}, "budgets": {"recent_turns": 1200}})
    sink = await rig.run(ask("word " * 4_000))
    assert sink.error is not None and (sink.error.status, sink.error.code) == (422, "context_too_long")
    assert rig.backends["local"].calls == []


@virtual_time
async def test_a_new_revision_changes_the_limits_of_the_next_request(build_rig: Build, ask: Ask) -> None:
    backend = Slow()
    rig = build_rig(backends=[backend])
    backends = [{"name": "local", "weight": 100}]

    def revision(number: int, max_queue: int) -> Revision:
        config = {"backends": backends, "admission": {"max_queue": max_queue}}
        routes = {"routes": {"self_hosted_generation": config}}
        return make_revision(number, routes, KnownNames(["local"], [], []))

    in_force = [revision(1, 5)]
    rig.journey = replace(rig.journey, revision=lambda: in_force[0])
    gate = rig.admission.gate("local")
    async with asyncio.TaskGroup() as tasks:
        for number in range(3):
            request = ask(request_id=f"req_{number}", generation_id=f"gen_{number}")
            tasks.create_task(rig.run(request))
        await until(lambda: gate.queued == 2)
        in_force[0] = revision(2, 2)
        refused = await rig.run(ask(request_id="req_9", generation_id="gen_9", allow_fallback=False))
        assert refused.error is not None and refused.error.code == "queue_full"
        assert gate.queued == 2, "those who wait already stay"
        backend.may_begin.set()


@virtual_time
async def test_a_request_on_a_fallback_backend_takes_a_slot_of_that_backend(
    build_rig: Build, ask: Ask
) -> None:
    gone = BackendFailure(FailureKind.ENGINE_DEAD, "gone")
    pool = ScriptedBackend("pool", scripts=(SLOW,))
    local = Slow(Script((), failure=gone))
    local.may_begin.set()
    rig = build_rig(backends=[local, pool], route={"fallback": ["pool", "degraded"]})
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(rig.run(ask()))
        await until(lambda: rig.admission.gate("pool").in_flight == 1)
        assert rig.admission.gate("local").in_flight == 0
    answer = task.result().answer
    assert answer is not None and answer.fallback is not None and answer.fallback.kind == "pool"
    assert rig.in_use() == []


async def test_bad_input_never_opens_the_circuit_for_others(build_rig: Build, ask: Ask) -> None:
    refused = Script(pieces=(), failure=BackendFailure(FailureKind.INVALID_INPUT, "no such field"))
    rig = build_rig(backends=[ScriptedBackend(scripts=[*[refused] * 30, Script()])])
    for number in range(30):
        sink = await rig.run(ask(generation_id=f"gen_{number}"))
        assert sink.error is not None and sink.error.status < 500
    answer = (await rig.run(ask())).answer
    assert answer is not None and answer.fallback is None


@virtual_time
async def test_admission_learns_of_a_stream_when_its_first_piece_was_sent_or_cannot_be(
    build_rig: Build, ask: Ask
) -> None:
    rig = build_rig(Script(("Hello", " there")))
    rates, known = rig.admission.gate("local").rates, list[int]()

    class NotReading(RecordingSink):
        async def delta(self, delta: Delta) -> None:
            known.append(rates.first_tokens)
            await until(lambda: rates.first_tokens == 1)

    await rig.journey.run(ask(stream=True), NotReading())
    assert known[:2] == [0, 1]


async def test_the_degraded_text_is_no_first_token_of_the_backend_that_failed(
    build_rig: Build, ask: Ask
) -> None:
    for stream in (False, True):
        rig = build_rig(Script((), failure=BackendFailure(FailureKind.BACKEND_UNAVAILABLE, "away")))
        events = list[AdmissionEvent]()
        rig.admission.emit = events.append
        sink = await rig.run(ask(stream=stream))
        assert sink.answer is not None and sink.answer.backend == "degraded"
        assert [type(event) for event in events] == [Admitted]
