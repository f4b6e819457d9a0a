"""The engine replicas as a backend: which are tried, what the loss of one means, and the sum of their figures."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from admission.values import BackendLoad
from gateway.backends.port import BackendState, Completion, Work
from gateway.contracts.events import Delta
from gateway.contracts.features import KNOWN_FEATURES, TOOL_FEATURES
from gateway.contracts.values import FinishReason, Sampling, Usage
from ops.ray.backend import LATE_S, NO_REPLICAS_S
from ops.ray.port import ReplicaLost, ReplicasFull
from ops.ray.wire import Failed, ReplicaPiece, ReplicaSignals
from resilience.failures import BackendFailure, FailureKind
from tests.conformance.harness import collect
from tests.ray.replicas import MAX_RUNNING, RULES, WHOLE, FakeReplicas, ScriptedCall, make_backend

WORK = Work("gen_1", (1, 2, 3), (), Sampling(max_tokens=8), cache_salt="acme")
FIRST_PIECE = ReplicaPiece(replica="a", deltas=(Delta("Hello", 1, token_ids=(5,)),))
LOST = ReplicaLost("ActorDiedError")


async def failure_of(
    replicas: FakeReplicas, work: Work = WORK, *, asks: bool = True, silent_s: float = 30.0
) -> BackendFailure:
    backend = make_backend(
        replicas,
        rules=RULES.model_copy(
            update={"first_token_timeout_seconds": silent_s, "idle_timeout_seconds": silent_s}
        ),
    )
    if asks:
        await backend.ask()
    with pytest.raises(BackendFailure) as caught:
        await collect(backend, work)
    assert replicas.open == 0
    return caught.value


async def test_an_answer_comes_piece_by_piece() -> None:
    replicas = FakeReplicas(WHOLE)
    answer = await collect(make_backend(replicas), WORK)
    assert answer.text == "Hello you"
    assert answer.completion.usage == Usage(3, 2)
    assert replicas.open == 0


async def test_a_replica_lost_before_its_first_token_is_replaced_and_avoided() -> None:
    replicas = FakeReplicas(ScriptedCall([ReplicaPiece(replica="a")], LOST), WHOLE)
    answer = await collect(make_backend(replicas), WORK)
    assert answer.text == "Hello you"
    assert [route.avoid for route in replicas.routes] == [(), ("a",)]


async def test_a_replica_lost_in_the_middle_breaks_the_stream_for_the_journey_to_resume() -> None:
    failure = await failure_of(FakeReplicas(ScriptedCall([FIRST_PIECE], LOST)))
    assert failure.kind is FailureKind.ENGINE_DEAD
    assert failure.policy.resumes
    assert not failure.counts


async def test_a_fault_among_several_replicas_says_nothing_about_the_pool() -> None:
    broken = ScriptedCall(
        [FIRST_PIECE, ReplicaPiece(failed=Failed(FailureKind.INTERNAL, "the engine reported internal"))]
    )
    assert not (await failure_of(FakeReplicas(broken))).counts
    alone = FakeReplicas(broken)
    alone.figures = (ReplicaSignals("a"),)
    assert (await failure_of(alone)).counts


async def test_replicas_that_fail_one_after_the_other_end_the_attempts() -> None:
    replicas = FakeReplicas(*[ScriptedCall([ReplicaPiece(replica=name)], LOST) for name in "abc"])
    failure = await failure_of(replicas)
    assert failure.kind is FailureKind.ENGINE_DEAD
    assert [route.avoid for route in replicas.routes] == [(), ("a",), ("a", "b")]


async def test_a_fault_of_the_request_is_tried_once() -> None:
    refused = Failed(FailureKind.INVALID_INPUT, "stop: too many", param="stop")
    replicas = FakeReplicas(ScriptedCall([ReplicaPiece(replica="a"), ReplicaPiece(failed=refused)]))
    failure = await failure_of(replicas)
    assert (failure.kind, failure.param, str(failure)) == (
        FailureKind.INVALID_INPUT,
        "stop",
        "stop: too many",
    )
    assert len(replicas.routes) == 1


async def test_a_silent_replica_is_left_for_another_one() -> None:
    replicas = FakeReplicas(ScriptedCall([ReplicaPiece(replica="a")], hangs=True), WHOLE)
    backend = make_backend(replicas, rules=RULES.model_copy(update={"first_token_timeout_seconds": 1.0}))
    assert (await collect(backend, WORK)).text == "Hello you"
    assert replicas.routes[1].avoid == ("a",)


async def test_silence_in_the_middle_is_a_timeout() -> None:
    failure = await failure_of(FakeReplicas(ScriptedCall([FIRST_PIECE], hangs=True)), silent_s=0.5)
    assert failure.kind is FailureKind.TIMEOUT


async def test_a_stream_that_just_ends_is_broken() -> None:
    assert (await failure_of(FakeReplicas(ScriptedCall([FIRST_PIECE])))).kind is FailureKind.ENGINE_DEAD


async def test_full_replicas_are_throttling() -> None:
    replicas = FakeReplicas(
        *[ScriptedCall(then=ReplicasFull("every engine replica is full")) for _ in range(3)]
    )
    failure = await failure_of(replicas)
    assert failure.kind is FailureKind.THROTTLED
    assert failure.retry_after_s


async def test_a_cancelled_call_is_left() -> None:
    replicas = FakeReplicas(ScriptedCall([FIRST_PIECE], hangs=True))
    async with asyncio.TaskGroup() as tasks:
        hearing = tasks.create_task(collect(make_backend(replicas), WORK))
        await replicas.called.wait()
        hearing.cancel()
    assert replicas.open == 0


async def test_prompts_of_two_tenants_share_no_fingerprint() -> None:
    replicas = FakeReplicas(WHOLE, WHOLE)
    backend = make_backend(replicas)
    work = replace(WORK, token_ids=tuple(range(64)))
    await collect(backend, work)
    await collect(backend, replace(work, cache_salt="other"))
    one, other = replicas.routes
    assert len(one.chain) == len(other.chain) == 4
    assert not set(one.chain) & set(other.chain)


async def test_the_backend_is_ready_while_a_replica_is_ready() -> None:
    replicas = FakeReplicas()
    backend = make_backend(replicas)
    assert backend.state is BackendState.STARTING
    await backend.ask()
    assert backend.state is BackendState.READY
    replicas.figures = (ReplicaSignals("a", ready=False),)
    await backend.ask()
    assert backend.state is BackendState.STARTING


async def test_tools_are_taken_when_the_engines_of_all_ready_replicas_call_them() -> None:
    replicas, calls_tools = FakeReplicas(), KNOWN_FEATURES | TOOL_FEATURES
    replicas.figures = (
        ReplicaSignals("a", features=calls_tools),
        ReplicaSignals("b", ready=False, features=frozenset()),
    )
    backend = make_backend(replicas)
    assert not backend.features & TOOL_FEATURES
    await backend.ask()
    assert backend.features == calls_tools
    replicas.figures = (ReplicaSignals("a", ready=False),)
    await backend.ask()
    assert backend.features == calls_tools, "a request waits for the next replica instead of a refusal"
    replicas.figures = (ReplicaSignals("a", features=calls_tools), ReplicaSignals("b"))
    await backend.ask()
    assert backend.features == KNOWN_FEATURES


async def test_a_replica_that_no_longer_tells_its_figures_is_avoided_until_it_does() -> None:
    replicas = FakeReplicas(WHOLE, WHOLE)
    backend = make_backend(replicas)
    await backend.ask()
    replicas.figures = (ReplicaSignals("b"),)
    for _ in range(3):
        await backend.ask()
    await collect(backend, WORK)
    replicas.figures = (ReplicaSignals("a"), ReplicaSignals("b"))
    await backend.ask()
    await collect(backend, WORK)
    assert [route.avoid for route in replicas.routes] == [("a",), ()]


async def test_a_caller_that_waits_for_a_replica_is_woken_by_the_next_one() -> None:
    replicas = FakeReplicas()
    replicas.figures = ()
    backend = make_backend(replicas)
    await backend.ask()
    assert not await backend.wait_ready(0.01)
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(backend.wait_ready(10.0))
        await asyncio.sleep(0)
        replicas.figures = (ReplicaSignals("a"),)
        await backend.ask()
    assert waiting.result()


@pytest.mark.parametrize(
    ("silence", "limit_s"), [(LOST, LATE_S), ((), NO_REPLICAS_S)], ids=["late", "an empty table"]
)
async def test_a_short_silence_of_the_replicas_does_not_end_readiness(
    silence: Exception | tuple[ReplicaSignals, ...], limit_s: float
) -> None:
    now = 100.0
    replicas = FakeReplicas()
    backend = make_backend(replicas, clock=lambda: now)
    await backend.ask()
    replicas.figures = silence
    now += limit_s - 0.1
    await backend.ask()
    assert backend.state is BackendState.READY
    now += 0.1
    await backend.ask()
    assert backend.state is BackendState.STARTING


async def test_replicas_that_answer_are_not_silent_however_late_their_figures_are() -> None:
    now = 100.0
    replicas = FakeReplicas(WHOLE, WHOLE)
    backend = make_backend(replicas, clock=lambda: now)
    await backend.ask()
    replicas.figures = LOST
    for _ in range(2):
        now += LATE_S - 0.1
        await collect(backend, WORK)
        await backend.ask()
    assert backend.state is BackendState.READY


async def test_figures_add_up_and_what_was_sent_since_counts_at_once() -> None:
    replicas = FakeReplicas(ScriptedCall([FIRST_PIECE], hangs=True))
    replicas.figures = (
        ReplicaSignals("a", True, BackendLoad(3, 1, 0.5, 100, 16), 4096),
        ReplicaSignals("b", True, BackendLoad(1, 0, 0.1, 300, 16), 2048),
        ReplicaSignals("c", False, BackendLoad(9, 9, 1.0, 300, 16), 1024),
    )
    lengths: list[int] = []
    backend = make_backend(replicas, lengths=lengths, queued=lambda: 7)
    await backend.ask()
    load = backend.load
    assert load is not None
    assert (load.running, load.waiting, load.workers) == (5, 0, 2)
    assert load.max_running == 2 * MAX_RUNNING
    assert load.kv_usage == pytest.approx(0.2)
    assert load.total_blocks == 400
    assert lengths == [2048]
    assert replicas.reports == [("gateway-1", 7)]
    async with asyncio.TaskGroup() as tasks:
        hearing = tasks.create_task(collect(backend, WORK))
        await replicas.called.wait()
        assert backend.load is not None
        assert backend.load.running == 6
        hearing.cancel()


async def test_a_completion_after_other_pieces_is_passed_on_whole() -> None:
    ends = Completion(FinishReason.LENGTH, Usage(3, 4, 2), 0.25, (FinishReason.STOP,))
    answer = await collect(
        make_backend(FakeReplicas(ScriptedCall([FIRST_PIECE, ReplicaPiece(completion=ends)]))), WORK
    )
    assert answer.completion == ends
