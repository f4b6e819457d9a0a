"""One request through every production stage."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from adapters.values import Adapter
from admission.values import AdmissionLimits, BackendLoad
from budgeting.values import EvidenceChunk, Message, Role, Tool, ToolChoice, ToolChoiceMode
from gateway.backends.port import BackendState
from gateway.contracts.events import Delta
from gateway.contracts.features import Feature
from gateway.contracts.values import (
    Contract,
    FinishReason,
    FormatType,
    GenerateRequest,
    ResponseFormat,
    Sampling,
)
from gateway.errors import PublicError
from resilience.failures import BackendFailure, FailureKind
from resilience.turns import Turns, Urgent
from tests.journey.rig import JourneyRig, RecordingSink
from tests.scripted import Script, ScriptedBackend
from tests.virtual_time import loop_time, virtual_time

Build = Callable[..., JourneyRig]
Ask = Callable[..., GenerateRequest]


async def test_an_answer_passes_every_stage_and_is_billed_once(build_rig: Build, ask: Ask) -> None:
    rig = build_rig()
    sink = await rig.run(ask())
    answer = sink.answer
    assert answer is not None
    assert (answer.output_text, answer.finish_reason) == ("Hello there.", FinishReason.STOP)
    assert answer.backend_name == "local"
    assert answer.usage.output_tokens == 3
    [row] = rig.outbox.rows
    assert (row.input_tokens, row.output_tokens) == (answer.usage.input_tokens, 3)
    assert row.finish_reason == "stop"
    [record] = rig.records
    assert list(record.stage_ms) == [
        "canonicalize", "adapter", "rank", "budget", "admit", "generate", "respond",
    ]  # fmt: skip
    ours_ms = sum(ms for stage, ms in record.stage_ms.items() if stage not in ("admit", "generate"))
    assert record.overhead_ms == pytest.approx(ours_ms)
    assert rig.in_use() == []


class NotedTurns(Turns):
    """Counts how often urgent work has begun."""

    begun_count = 0

    def urgent(self) -> Urgent:
        self.begun_count += 1
        return super().urgent()


async def test_a_chat_is_urgent_until_it_is_passed_to_the_backend(build_rig: Build, ask: Ask) -> None:
    rig = build_rig(Script(("a", "b"), delay_s=0.05))
    turns = NotedTurns()
    rig.journey = dataclasses.replace(rig.journey, turns=turns)
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        chat = group.create_task(rig.run(ask()))
        for _ in range(1_000):
            if not rig.admission.gate("local").in_flight:
                await asyncio.sleep(0)
        assert (turns.begun_count, turns.urgent_count, chat.done()) == (1, 0, False)
    assert (turns.begun_count, turns.urgent_count) == (1, 0)


async def test_the_budget_counts_add_up_to_the_input_tokens(build_rig: Build, ask: Ask) -> None:
    request = ask(
        chunks=(EvidenceChunk("m1", "catalog", "Vinland Saga, 27 volumes"),),
        context={"time": "2026-11-20T10:00:00Z"},
        prompt_version="chat-manga-2.1",
    )
    answer = (await build_rig().run(request)).answer
    assert answer is not None
    budget = answer.budget
    total = budget.system + budget.retrieval + budget.recent_turns + budget.older_summary
    assert total == answer.usage.input_tokens
    assert budget.retrieval > 0
    assert total + budget.generation_reserve <= 4096


async def test_the_native_contract_puts_the_routes_prompt_version_first(build_rig: Build, ask: Ask) -> None:
    rig = build_rig(route={"prompt_version": "chat-manga-2.1"})
    await rig.run(ask())
    [work] = rig.backends["local"].calls
    assert work.messages[0].role is Role.SYSTEM
    assert work.messages[0].content.startswith("You are a manga shopping assistant.")


async def test_the_tenant_is_the_salt_of_the_backends_prefix_cache(build_rig: Build, ask: Ask) -> None:
    rig = build_rig()
    await rig.run(ask())
    [work] = rig.backends["local"].calls
    assert work.cache_salt == "acme"


async def test_openais_contract_adds_nothing_unless_asked(build_rig: Build, ask: Ask) -> None:
    rig = build_rig(route={"prompt_version": "chat-manga-2.1"})
    await rig.run(ask(contract=Contract.CHAT, model="scripted"))
    [work] = rig.backends["local"].calls
    assert [message.role for message in work.messages] == [Role.USER]


async def test_volatile_context_changes_nothing_before_the_boundary(build_rig: Build, ask: Ask) -> None:
    rig = build_rig(route={"prompt_version": "chat-manga-2.1"})
    history = (Message(Role.USER, "hi"), Message(Role.ASSISTANT, "hello"), Message(Role.USER, "and now?"))
    for second in ("00", "01"):
        await rig.run(
            ask(
                messages=history,
                context={"time": f"2026-11-20T10:00:{second}Z"},
                generation_id=f"gen_{second}",
            )
        )
    first, second_ids = (work.token_ids for work in rig.backends["local"].calls)
    shared = next(i for i, (a, b) in enumerate(zip(first, second_ids, strict=True)) if a != b)
    await rig.run(ask(messages=history[:2] + history[:1], generation_id="gen_x"))
    assert shared > 60, "the system part and the earlier turns are shared"


async def test_an_unknown_route_is_refused_by_name(build_rig: Build, ask: Ask) -> None:
    sink = await build_rig().run(ask(route="nowhere"))
    assert sink.error is not None
    assert (sink.error.status, sink.error.code, sink.error.param) == (404, "unknown_route", "route")


async def test_an_unknown_model_an_unknown_adapter_and_an_unknown_version_are_refused(
    build_rig: Build, ask: Ask
) -> None:
    rig = build_rig()
    for changes, code in (
        ({"contract": Contract.CHAT, "model": "gpt-9"}, "unknown_model"),
        ({"adapter_id": "nope"}, "unknown_adapter"),
        ({"prompt_version": "nope"}, "unknown_prompt_version"),
    ):
        sink = await rig.run(ask(**changes))
        assert sink.error is not None and sink.error.code == code
    assert rig.outbox.rows == [], "nothing was generated, nothing is billed"
    assert rig.in_use() == []


async def test_a_backend_named_as_model_is_the_only_candidate(build_rig: Build, ask: Ask) -> None:
    rig = build_rig(backends=[ScriptedBackend("local"), ScriptedBackend("other")])
    answer = (await rig.run(ask(contract=Contract.CHAT, model="other"))).answer
    assert answer is not None and answer.backend_name == "other"


@virtual_time
async def test_a_request_of_the_same_id_in_flight_is_a_duplicate_of_its_own_tenant_only(
    build_rig: Build, ask: Ask
) -> None:
    rig = build_rig(Script(delay_s=0.05))
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(rig.run(ask()))
        await asyncio.sleep(0.02)
        second = await rig.run(ask(generation_id="gen_2"))
    assert first.result().answer is not None
    assert second.error is not None and second.error.code == "duplicate_request"


async def test_the_sink_gets_the_prompt_before_the_first_piece(build_rig: Build, ask: Ask) -> None:
    sink = await build_rig().run(ask(stream=True))
    assert sink.answer is not None
    (plan,) = sink.plans
    assert (plan.counts.total, plan.generation_reserve) == (
        sink.answer.usage.input_tokens,
        sink.answer.budget.generation_reserve,
    )


@virtual_time
async def test_requests_whose_label_came_by_a_header_may_share_it(build_rig: Build, ask: Ask) -> None:
    rig = build_rig(Script(delay_s=0.05))
    async with asyncio.TaskGroup() as tasks:
        runs = [
            tasks.create_task(rig.run(ask(generation_id=f"gen_{number}", labelled=False)))
            for number in range(3)
        ]
    assert all(run.result().answer is not None for run in runs)
    assert rig.in_flight.in_flight == 0


@virtual_time
async def test_a_draining_gateway_finishes_what_it_has_and_takes_nothing_new(
    build_rig: Build, ask: Ask
) -> None:
    rig = build_rig(Script(delay_s=0.02))
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(rig.run(ask()))
        await asyncio.sleep(0.01)
        rig.in_flight.drain()
        refused = await rig.run(ask(request_id="req_2", generation_id="gen_2"))
        await rig.in_flight.drained()
    assert first.result().answer is not None
    assert refused.error is not None and (refused.error.status, refused.error.code) == (503, "draining")


async def test_a_drain_waits_until_a_cut_request_has_got_its_error(build_rig: Build, ask: Ask) -> None:
    may_send = asyncio.Event()

    class Slow(RecordingSink):
        async def fail(self, error: PublicError) -> None:
            await may_send.wait()
            await super().fail(error)

    rig, sink = build_rig(Script(delay_s=60)), Slow()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(rig.journey.run(ask(), sink))
        while not rig.backends["local"].active:  # noqa: ASYNC110 - the backend sets no event
            await asyncio.sleep(0)
        rig.in_flight.cut()
        drained = tasks.create_task(rig.in_flight.drained())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not drained.done() and rig.in_flight.in_flight == 1
        may_send.set()
    assert sink.error is not None and sink.error.code == "draining"
    assert rig.in_use() == []


async def test_memory_pressure_gives_the_degraded_answer_with_its_reason(build_rig: Build, ask: Ask) -> None:
    full = ScriptedBackend(
        load=BackendLoad(running=1, kv_usage=0.97, total_blocks=100, block_size=16, max_running=8)
    )
    rig = build_rig(backends=[full])
    answer = (await rig.run(ask())).answer
    assert answer is not None and answer.fallback is not None
    assert (answer.fallback.kind, answer.fallback.reason) == ("degraded_response", "memory_pressure")
    assert answer.finish_reason is FinishReason.DEGRADED
    assert answer.usage.input_tokens == answer.usage.output_tokens == 0
    [row] = rig.outbox.rows
    assert (row.fallback, row.input_tokens, row.output_tokens) == ("degraded_response", 0, 0)


async def test_a_caller_who_wants_errors_gets_503_and_when_to_come_back(build_rig: Build, ask: Ask) -> None:
    full = ScriptedBackend(load=BackendLoad(running=8, waiting=100, max_running=8))
    rig = build_rig(backends=[full], limits=AdmissionLimits(max_queue=100))
    sink = await rig.run(ask(allow_fallback=False))
    assert sink.error is not None
    assert (sink.error.status, sink.error.code) == (503, "queue_full")
    assert sink.error.retry_after_ms is not None and sink.error.retry_after_ms > 0


async def test_a_remembered_answer_is_given_when_the_engine_is_dead(build_rig: Build, ask: Ask) -> None:
    rig = build_rig(route={"fallback": ["response_cache", "degraded"]})
    await rig.run(ask())
    rig.backends["local"].state = BackendState.DEAD
    answer = (await rig.run(ask(generation_id="gen_2"))).answer
    assert answer is not None and answer.fallback is not None
    assert (answer.output_text, answer.fallback.kind, answer.fallback.reason) == (
        "Hello there.", "response_cache", "engine_dead",
    )  # fmt: skip
    other = (await rig.run(ask("Another question", generation_id="gen_3"))).answer
    assert other is not None and other.fallback is not None and other.fallback.kind == "degraded_response"


async def test_another_backend_can_be_a_fallback_target(build_rig: Build, ask: Ask) -> None:
    broken = ScriptedBackend(
        "local", scripts=[Script((), failure=BackendFailure(FailureKind.ENGINE_DEAD, "gone"))]
    )
    rig = build_rig(backends=[broken, ScriptedBackend("pool")], route={"fallback": ["pool", "degraded"]})
    answer = (await rig.run(ask())).answer
    assert answer is not None and answer.fallback is not None
    assert (answer.backend_name, answer.fallback.kind, answer.output_text) == ("pool", "pool", "Hello there.")


async def test_a_failure_that_may_be_retried_is_invisible_before_the_first_token(
    build_rig: Build, ask: Ask
) -> None:
    oom = Script((), failure=BackendFailure(FailureKind.CUDA_OOM, "no memory"))
    rig = build_rig(oom, Script())
    answer = (await rig.run(ask())).answer
    assert answer is not None and answer.fallback is None
    assert len(rig.backends["local"].calls) == 2
    assert len(rig.outbox.rows) == 1


async def test_a_request_that_no_backend_began_to_answer_has_no_tokens_that_lack_a_price(
    build_rig: Build, ask: Ask
) -> None:
    failing = Script((), failure=BackendFailure(FailureKind.ENGINE_DEAD, "answered with status 500"))
    rig = build_rig(*[failing] * 9, route={"fallback": []})
    sink = await rig.run(ask())
    assert sink.error is not None and rig.backends["local"].calls
    [row], [record] = rig.outbox.rows, rig.records
    assert (row.backend_name, row.input_tokens, record.input_tokens) == (None, 0, 0)


async def test_a_stream_that_breaks_ends_in_an_error_and_bills_what_was_delivered(
    build_rig: Build, ask: Ask
) -> None:
    rig = build_rig(
        Script(("a", "b"), failure=BackendFailure(FailureKind.ENGINE_DEAD, "gone")),
    )
    sink = await rig.run(ask(stream=True))
    assert sink.text == "ab"
    assert sink.error is not None and sink.error.code == "backend_unavailable"
    [row] = rig.outbox.rows
    assert (row.finish_reason, row.output_tokens, row.error_code) == ("error", 2, "backend_unavailable")
    assert row.input_tokens > 0


@virtual_time
async def test_a_deadline_after_the_first_token_ends_the_answer_with_what_there_is(
    build_rig: Build, ask: Ask
) -> None:
    rig = build_rig(Script(("a",) * 200, delay_s=0.01))
    sink = await rig.run(ask(deadline=loop_time() + 1.0))
    assert sink.answer is not None and sink.answer.finish_reason is FinishReason.DEADLINE
    assert 0 < sink.answer.usage.output_tokens < 200
    assert rig.outbox.rows[0].output_tokens == sink.answer.usage.output_tokens
    assert rig.in_use() == []


@pytest.mark.parametrize("stream", [True, False])
@virtual_time
async def test_the_time_of_a_route_ends_an_answer_without_a_deadline_with_what_there_is(
    build_rig: Build, ask: Ask, stream: bool
) -> None:
    rig = build_rig(Script(("a",) * 200, delay_s=0.01), route={"timeout_ms": 1000})
    sink = await rig.run(ask(stream=stream))
    assert sink.answer is not None and sink.answer.finish_reason is FinishReason.DEADLINE
    assert 0 < sink.answer.usage.output_tokens < 200
    assert sink.answer.output_text == "a" * sink.answer.usage.output_tokens
    assert rig.in_use() == []


@virtual_time
async def test_a_backend_that_hangs_holds_a_caller_no_longer_than_the_routes_time(
    build_rig: Build, ask: Ask
) -> None:
    rig = build_rig(Script(("a",), delay_s=3600), route={"timeout_ms": 100, "fallback": []})
    sink = await rig.run(ask())
    assert sink.error is not None and (sink.error.status, sink.error.code) == (504, "deadline_exceeded")
    assert rig.in_use() == []


@virtual_time
async def test_a_callers_own_deadline_takes_the_place_of_the_routes_time(build_rig: Build, ask: Ask) -> None:
    rig = build_rig(Script(("a",) * 4, delay_s=0.05), route={"timeout_ms": 10})
    sink = await rig.run(ask(deadline=loop_time() + 60))
    assert sink.answer is not None and sink.answer.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("asked", [{"allow_fallback": False}, {}], ids=["no fallback", "no degraded leg"])
@virtual_time
async def test_a_deadline_before_the_first_token_is_504(
    build_rig: Build, ask: Ask, asked: dict[str, bool]
) -> None:
    rig = build_rig(Script(("a",), delay_s=50), route={} if asked else {"fallback": []})
    sink = await rig.run(ask(deadline=loop_time() + 0.25, **asked))
    assert sink.error is not None and (sink.error.status, sink.error.code) == (504, "deadline_exceeded")
    assert rig.in_use() == []


@virtual_time
async def test_before_a_deadline_without_a_token_the_degraded_text_is_given(
    build_rig: Build, ask: Ask
) -> None:
    rig = build_rig(Script(("a",), delay_s=50))
    sink = await rig.run(ask(deadline=loop_time() + 2))
    assert sink.answer is not None and sink.answer.finish_reason is FinishReason.DEGRADED
    assert sink.answer.fallback is not None
    assert (sink.answer.fallback.kind, sink.answer.fallback.reason) == ("degraded_response", "wait_exceeded")
    assert sink.answer.usage.output_tokens == 0
    assert rig.in_use() == []


async def test_a_field_that_no_backend_supports_is_refused_by_name(build_rig: Build, ask: Ask) -> None:
    plain = ScriptedBackend(features=frozenset({Feature.TEMPERATURE}))
    rig = build_rig(backends=[plain])
    shaped = ask(response_format=ResponseFormat(FormatType.JSON_OBJECT))
    sink = await rig.run(shaped)
    assert sink.error is not None and (sink.error.code, sink.error.param) == (
        "invalid_request",
        "response_format",
    )
    openai = ask(contract=Contract.CHAT, model="scripted", sampling=Sampling(presence_penalty=1.0))
    sink = await rig.run(openai)
    assert sink.error is not None and sink.error.param == "presence_penalty"


async def test_a_constrained_answer_ends_where_its_form_does_though_the_caller_ignores_the_end_token(
    build_rig: Build, ask: Ask
) -> None:
    backend = ScriptedBackend()
    rig = build_rig(backends=[backend])
    endless = Sampling(ignore_eos=True)
    await rig.run(ask(sampling=endless, response_format=ResponseFormat(FormatType.JSON_OBJECT)))
    forced = ToolChoice(ToolChoiceMode.REQUIRED)
    await rig.run(ask(sampling=endless, tools=(Tool("look_up"),), tool_choice=forced))
    await rig.run(ask(sampling=endless, tools=(Tool("look_up"),)))
    assert [work.sampling.ignore_eos for work in backend.calls] == [False, False, True]


async def test_a_sampling_hint_that_a_backend_lacks_is_dropped_and_named_in_the_native_contract(
    build_rig: Build, ask: Ask
) -> None:
    rig = build_rig(backends=[ScriptedBackend(features=frozenset({Feature.TEMPERATURE}))])
    answer = (await rig.run(ask(sampling=Sampling(top_k=5, temperature=0.3)))).answer
    assert answer is not None
    assert len(answer.warnings) == 1 and "top_k" in answer.warnings[0]
    [work] = rig.backends["local"].calls
    assert (work.sampling.top_k, work.sampling.temperature) == (None, 0.3)


async def test_the_rule_that_chose_an_adapter_is_on_record(build_rig: Build, ask: Ask) -> None:
    adapter = Adapter("jp_style_v1", 1, "scripted", "adapters/jp")
    rig = build_rig(
        adapters=[adapter], route={"adapter_rules": [{"when": {"locale": "ja"}, "adapter": "jp_style_v1"}]}
    )
    answer = (await rig.run(ask(locale="ja"))).answer
    assert answer is not None and answer.backend_version == "scripted+jp_style_v1"
    assert rig.records[0].adapter_rule == "rule[0]"
    assert rig.adapters.leased() == {}


async def test_a_prompt_that_cannot_be_trimmed_is_refused_not_sent(build_rig: Build, ask: Ask) -> None:
    rig = build_rig()
    sink = await rig.run(ask("volume " * 6000))
    assert sink.error is not None and (sink.error.status, sink.error.code) == (422, "context_too_long")
    assert rig.backends["local"].calls == []


async def test_a_defect_of_the_gateway_tells_the_caller_nothing(build_rig: Build, ask: Ask) -> None:
    class Broken(ScriptedBackend):
        @property
        def load(self) -> BackendLoad | None:
            raise RuntimeError("secret detail")

        @load.setter
        def load(self, value: BackendLoad | None) -> None:
            del value

    rig = build_rig(backends=[Broken()])
    sink = await rig.run(ask())
    assert sink.error is not None and (sink.error.status, sink.error.code) == (500, "internal")
    assert "secret" not in sink.error.message
    assert rig.in_use() == []


async def test_several_texts_and_their_logprobs_reach_the_answer_and_are_billed_together(
    build_rig: Build, ask: Ask
) -> None:
    rig = build_rig(Script(("Hello", " there.")))
    asked = ask(contract=Contract.CHAT, model="scripted", sampling=Sampling(n=3, logprobs=0), stream=True)
    sink = await rig.run(asked)
    answer = sink.answer
    assert answer is not None
    assert [choice.text for choice in answer.choices] == ["Hello there."] * 3
    assert {choice.finish_reason for choice in answer.choices} == {FinishReason.STOP}
    for choice in answer.choices:
        assert [entry.text for entry in choice.logprobs or ()] == ["Hello", " there."]
    assert [delta.index for delta in sink.deltas] == [0, 1, 2] * 2
    assert answer.usage.output_tokens == 6
    assert answer.usage.input_tokens == rig.outbox.rows[0].input_tokens
    assert rig.outbox.rows[0].output_tokens == 6
    assert rig.in_use() == []


async def test_a_plain_answer_has_one_choice_and_no_logprobs(build_rig: Build, ask: Ask) -> None:
    answer = (await build_rig().run(ask())).answer
    assert answer is not None
    assert [(choice.text, choice.logprobs) for choice in answer.choices] == [("Hello there.", None)]


async def test_log_probabilities_that_no_token_has_are_null(build_rig: Build, ask: Ask) -> None:
    rig = build_rig(
        Script(events=(Delta("a", 1), Delta("b", 1, index=1)), finish_reasons=(FinishReason.STOP,) * 2)
    )
    asked = ask(contract=Contract.CHAT, model="scripted", sampling=Sampling(n=2, logprobs=0))
    answer = (await rig.run(asked)).answer
    assert answer is not None
    assert [(choice.text, choice.logprobs) for choice in answer.choices] == [("a", None), ("b", None)]


@virtual_time
async def test_a_deadline_ends_every_text_with_what_there_is(build_rig: Build, ask: Ask) -> None:
    rig = build_rig(Script(("a",) * 200, delay_s=0.01))
    asked = ask(contract=Contract.CHAT, model="scripted", sampling=Sampling(n=2))
    sink = await rig.run(replace(asked, deadline=loop_time() + 1.0))
    assert sink.answer is not None
    choices = sink.answer.choices
    assert [choice.finish_reason for choice in choices] == [FinishReason.DEADLINE] * 2
    assert sum(len(choice.text) for choice in choices) == sink.answer.usage.output_tokens > 0


async def test_the_response_cache_keeps_plain_answers_only(build_rig: Build, ask: Ask) -> None:
    gone = Script((), failure=BackendFailure(FailureKind.ENGINE_DEAD, "gone"))
    for sampling, kind in (
        (Sampling(temperature=0.5), "response_cache"),
        (Sampling(n=2), "degraded_response"),
    ):
        rig = build_rig(Script(), gone, route={"fallback": ["response_cache", "degraded"]})
        asked = ask(contract=Contract.CHAT, model="scripted", sampling=sampling)
        await rig.run(asked)
        answer = (await rig.run(replace(asked, request_id="again"))).answer
        assert answer is not None and answer.fallback is not None
        assert answer.fallback.kind == kind


async def test_a_field_that_the_backend_refuses_is_named(build_rig: Build, ask: Ask) -> None:
    bad = BackendFailure(FailureKind.INVALID_INPUT, "the regex is not valid", param="response_format")
    sink = await build_rig(Script((), failure=bad)).run(ask())
    assert sink.error is not None
    assert (sink.error.status, sink.error.code, sink.error.param) == (
        422,
        "invalid_request",
        "response_format",
    )
