"""Shadow requests in a whole request journey."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from admission.values import Demand
from budgeting.counting import ChatTokenizer
from budgeting.values import NO_KWARGS, EvidenceChunk, ImageContent, Message, Role, Tool, ToolCall
from gateway.backends.port import BackendState
from gateway.contracts.events import Reasoning, ToolArgs, ToolBegin, ToolEnd
from gateway.contracts.features import Feature
from gateway.contracts.values import FinishReason, FormatType, GenerateRequest, ResponseFormat, Sampling
from gateway.prompts.canonical import Canonicalizer
from gateway.prompts.text import Models, ModelText
from gateway.shadow.personal import redact_json, redact_personal
from gateway.shadow.report import make_report
from gateway.shadow.sampling import Copy, ShadowOutcome, ShadowQueue, chosen
from resilience.failures import BackendFailure, FailureKind
from tests.images.samples import data_url, sample
from tests.journey.rig import ROOT
from tests.scripted import Script
from tests.shadow.conftest import BEDROCK_FEATURES, ShadowRig

Build = Callable[..., ShadowRig]
Ask = Callable[..., GenerateRequest]


async def test_an_answered_request_is_asked_again_and_both_answers_are_compared(
    build: Build, ask: Ask
) -> None:
    rig = build()
    async with rig.running():
        sink = await rig.run(ask(intent="greeting"))
        await rig.until(ShadowOutcome.COMPARED)
    assert sink.answer is not None and sink.answer.output_text == "Hello there."
    [pair] = rig.store.pairs
    assert (pair.generation_id, pair.route, pair.intent) == ("gen_1", "self_hosted_generation", "greeting")
    assert (pair.primary.backend, pair.primary.chars) == ("local", len("Hello there."))
    assert (pair.shadow.backend, pair.shadow.version, pair.shadow.chars) == (
        "other",
        "haiku",
        len("Good day."),
    )
    assert pair.shadow.finish_reason == "stop" and pair.shadow.output_tokens == 3
    assert pair.shadow.cost_nanousd > 0 and pair.primary.cost_nanousd == 0
    assert pair.likeness is not None and 0 <= pair.likeness < 0.5
    assert pair.primary.text is None and pair.shadow.text is None
    assert not rig.base.in_use()


async def test_a_request_with_images_is_not_copied(build: Build, ask: Ask) -> None:
    image = ImageContent(data_url(sample("png")), param="messages.0.content.0.image_url.url")
    seen = Message(Role.USER, "", parts=(image,))
    rig = build()
    async with rig.running():
        await rig.run(ask(messages=(seen,), needs=frozenset({Feature.IMAGES})))
        await rig.run(ask(generation_id="gen_2"))
        await rig.until(ShadowOutcome.COMPARED)
    assert [pair.generation_id for pair in rig.store.pairs] == ["gen_2"]


async def test_a_shadow_has_a_row_of_its_own_kind_in_no_tenants_usage(build: Build, ask: Ask) -> None:
    rig = build()
    async with rig.running():
        await rig.run(ask())
        await rig.until(ShadowOutcome.COMPARED)
    own, shadow = rig.base.outbox.rows
    assert (own.kind, own.tenant, own.generation_id) == ("request", "acme", "gen_1")
    assert (shadow.kind, shadow.tenant, shadow.key_id) == ("shadow", "", "")
    assert (shadow.backend_name, shadow.output_tokens, shadow.finish_reason) == ("other", 3, "stop")
    assert shadow.model == rig.other.model, "prices of models hold for shadows"
    assert shadow.input_tokens == own.input_tokens
    assert shadow.billable_input_tokens == shadow.billable_output_tokens == 0
    assert shadow.generation_id == rig.store.pairs[0].pair_id


async def test_the_caller_has_the_answer_before_the_other_backend_is_asked(build: Build, ask: Ask) -> None:
    rig = build()
    sink = await rig.run(ask())
    assert sink.answer is not None
    assert rig.other.calls == [] and len(rig.shadow.queue) == 1


async def test_a_shadow_is_asked_at_the_lowest_priority_without_stream_or_copies(
    build: Build, ask: Ask
) -> None:
    rig = build(features=frozenset(Feature))
    async with rig.running():
        await rig.run(ask(stream=True, priority=1, sampling=Sampling(n=3, logprobs=2, seed=4)))
        await rig.until(ShadowOutcome.COMPARED)
    [work] = rig.other.calls
    assert (work.priority, work.stream, work.sampling.n, work.sampling.logprobs) == (-1, False, 1, None)
    assert work.sampling.seed == 4
    assert work.generation_id != "gen_1"


async def test_hints_that_the_other_backend_lacks_are_dropped_and_what_it_must_honour_is_not(
    build: Build, ask: Ask
) -> None:
    rig = build()
    async with rig.running():
        await rig.run(ask(sampling=Sampling(top_k=3, seed=1)))
        await rig.until(ShadowOutcome.COMPARED)
        await rig.run(ask(generation_id="gen_2", response_format=ResponseFormat(FormatType.JSON_OBJECT)))
        await rig.until(ShadowOutcome.UNABLE)
    [work] = rig.other.calls
    assert work.sampling.top_k is None and work.sampling.seed is None


async def test_personal_data_leaves_the_prompt_before_it_is_sent_and_the_texts_before_they_are_stored(
    build: Build, ask: Ask
) -> None:
    rig = build(keep_texts=True, primary=Script(("Write", " to", " boss@shop.example")))
    async with rig.running():
        await rig.run(ask("I am jo@mail.example, call +49 170 1234567"))
        await rig.until(ShadowOutcome.COMPARED)
    [work] = rig.other.calls
    assert work.messages[-1].content == "I am [mail], call [phone]"
    tokenizer = rig.base.journey.models.default.tokenizer
    sent = b"".join(tokenizer.token_bytes(one) for one in work.token_ids).decode()
    assert "[mail]" in sent and "jo@mail" not in sent
    [pair] = rig.store.pairs
    assert pair.primary.text == "Write to [mail]"
    assert pair.primary.checks["pii"] is False and pair.shadow.checks["pii"] is True
    assert "mail.example" not in repr(pair) and "shop.example" not in repr(pair)


async def test_a_request_that_cannot_be_redacted_is_neither_sent_nor_stored(build: Build, ask: Ask) -> None:
    def broken(text: str) -> str:
        raise RuntimeError("no model")

    rig = build(redact=broken)
    async with rig.running():
        await rig.run(ask())
        await rig.until(ShadowOutcome.REDACTION_FAILED)
    assert rig.other.calls == [] and rig.store.pairs == []
    assert not rig.base.in_use()


async def test_a_failing_shadow_is_stored_and_harms_no_caller(build: Build, ask: Ask) -> None:
    failure = BackendFailure(FailureKind.THROTTLED, "slow down")
    rig = build(other=Script(failure=failure, breaks_after=1))
    async with rig.running():
        for number in range(30):
            await rig.run(ask(generation_id=f"gen_{number}"))
        await rig.until(ShadowOutcome.FAILED, 30)
    assert {pair.shadow.failure for pair in rig.store.pairs} == {"throttled"}
    assert len(rig.other.calls) == 30  # each once: only callers' requests are retried
    gate = rig.base.admission.gate("other")
    assert gate.circuit.admits(rig.base.journey.clock())
    assert not rig.base.in_use()


async def test_a_shadow_that_hangs_is_ended_at_its_deadline(build: Build, ask: Ask) -> None:
    rig = build(other=Script(delay_s=60.0), deadline_s=1.0)
    async with rig.running():
        await rig.run(ask())
        await rig.until(ShadowOutcome.FAILED)
    assert rig.store.pairs[0].shadow.failure == "timeout"
    assert not rig.base.in_use()


async def test_the_newest_copies_are_dropped_when_the_line_is_full(build: Build, ask: Ask) -> None:
    rig = build(queue=3)
    for number in range(5):
        await rig.run(ask(generation_id=f"gen_{number}"))
    assert rig.count(ShadowOutcome.QUEUE_FULL) == 2
    async with rig.running():
        await rig.until(ShadowOutcome.COMPARED, 3)
    assert sorted(pair.generation_id for pair in rig.store.pairs) == ["gen_0", "gen_1", "gen_2"]


async def test_nothing_is_shadowed_outside_the_sample_or_without_a_models_answer(
    build: Build, ask: Ask
) -> None:
    none = build(sample=0.0)
    await none.run(ask())
    assert len(none.shadow.queue) == 0
    down = build(primary=Script(failure=BackendFailure(FailureKind.ENGINE_DEAD, "gone")))
    sink = await down.run(ask())
    assert sink.answer is not None and sink.answer.finish_reason == "degraded"
    assert len(down.shadow.queue) == 0
    raw = build()
    await raw.run(ask(messages=(), raw_prompt="Once upon"))
    assert len(raw.shadow.queue) == 0


async def test_no_shadow_is_sent_to_a_backend_that_callers_keep_busy(build: Build, ask: Ask) -> None:
    rig = build(deadline_s=0.3)
    demand = Demand("other", "acme", 0, 10, 10, 0.0)
    limits = replace(rig.base.admission.gate("other").limits, max_in_flight=1)
    async with rig.base.admission.admit(structs.replace(demand, limits=limits)):
        gate = rig.base.admission.gate("other")
        busy = int(gate.work.capacity(rig.base.journey.clock()) * 0.5)
        held = [rig.base.admission.admit(demand) for _ in range(busy)]
        for one in held:
            await one.__aenter__()
        async with rig.running():
            await rig.run(ask())
            await rig.until(ShadowOutcome.TOO_OLD)
        for one in held:
            await one.__aexit__(None, None, None)
    assert rig.other.calls == []
    assert not rig.base.in_use()


async def test_a_backend_that_is_not_ready_is_waited_for(build: Build, ask: Ask) -> None:
    rig = build()
    rig.other.state = BackendState.STARTING
    async with rig.running():
        await rig.run(ask())
        await asyncio.sleep(0.05)
        assert rig.other.calls == []
        rig.other.state = BackendState.READY
        await rig.until(ShadowOutcome.COMPARED)


async def test_shadows_stop_at_their_own_spending_limit(build: Build, ask: Ask) -> None:
    rig = build(spend_nanousd=1)
    async with rig.running():
        await rig.run(ask())
        await rig.until(ShadowOutcome.SPEND)
    assert rig.other.calls == []
    assert not rig.base.skipped


async def test_no_more_than_the_configured_number_are_asked_at_once(build: Build, ask: Ask) -> None:
    rig = build(other=Script(delay_s=0.02), concurrency=2)
    most = 0
    async with rig.running():
        for number in range(8):
            await rig.run(ask(generation_id=f"gen_{number}"))
        while rig.count(ShadowOutcome.COMPARED) < 8:
            most = max(most, rig.other.active)
            await asyncio.sleep(0.002)
    assert most == 2


async def test_pairs_wait_for_an_unavailable_database(build: Build, ask: Ask) -> None:
    rig = build()
    rig.store.unavailable = True
    async with rig.running():
        await rig.run(ask())
        await rig.until(ShadowOutcome.COMPARED)
        await rig.shadow._write()
        assert rig.shadow.pairs_made["written"] == 0
        rig.store.unavailable = False
    assert len(rig.store.pairs) == 1 and rig.shadow.pairs_made["written"] == 1


async def test_stopping_in_the_middle_leaves_nothing_behind(build: Build, ask: Ask) -> None:
    rig = build(other=Script(delay_s=30.0))
    async with rig.running():
        await rig.run(ask())
        async with asyncio.timeout(60):
            while not rig.other.active:  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0.002)
    assert not rig.base.in_use()
    assert rig.limits.figures()["other"].in_use == 0
    assert rig.base.outbox.rows[-1].finish_reason == "cancelled"


async def test_a_judge_sees_redacted_texts_in_either_order_and_its_verdict_is_stored(
    build: Build, ask: Ask
) -> None:
    rig = build(judge=Script(("A",)))
    async with rig.running():
        for number in range(8):
            await rig.run(
                ask(
                    "mail me at a@b.example",
                    generation_id=f"gen_{number}",
                    chunks=(EvidenceChunk("c1", "catalog", "Berserk, by Kentaro Miura"),),
                )
            )
        await rig.until(ShadowOutcome.COMPARED, 8)
    judged = [pair.judged for pair in rig.store.pairs]
    calls = rig.base.backends["judge"].calls
    assert len(calls) == 8 and set(judged) == {"primary", "shadow"}
    asked = calls[0].messages[-1].content
    assert "[mail]" in asked and "a@b.example" not in asked
    assert "Berserk" in asked and "Good day." in asked and "Hello there." in asked


async def test_a_judge_gets_nothing_of_what_the_caller_asked_of_the_answer(build: Build, ask: Ask) -> None:
    rig = build(judge=Script(("A",)), features=TOOLS | {Feature.REASONING_EFFORT})
    asked = ask(
        "Which manga?",
        tools=(STOCK,),
        needs=frozenset({Feature.TOOLS}),
        reasoning_effort="high",
        template_kwargs={"continue_final_message": True},
    )
    rig.base.backends["judge"].features = BEDROCK_FEATURES
    async with rig.running():
        await rig.run(asked)
        await rig.until(ShadowOutcome.COMPARED)
    [work] = rig.base.backends["judge"].calls
    assert (work.tools, work.reasoning_effort, work.template_kwargs) == ((), None, {})
    assert rig.store.pairs[0].judged is not None


def test_the_sample_is_the_same_everywhere_and_as_large_as_asked() -> None:
    ids = [f"gen_{number}" for number in range(20_000)]
    taken = [one for one in ids if chosen(one, 0.05)]
    assert taken == [one for one in ids if chosen(one, 0.05)]
    assert 0.04 < len(taken) / len(ids) < 0.06
    assert set(taken) <= {one for one in ids if chosen(one, 0.2)}
    assert not any(chosen(one, 0.0) for one in ids) and all(chosen(one, 1.0) for one in ids)


async def test_a_queue_is_bounded_by_the_bytes_of_its_copies(build: Build, ask: Ask) -> None:
    rig = build()
    await rig.run(ask())
    copy = rig.shadow.queue.take()
    assert isinstance(copy, Copy)
    thoughtful = structs.replace(copy.plan, messages=(Message(Role.ASSISTANT, "", reasoning="Hm " * 100),))
    assert replace(copy, plan=thoughtful).size_bytes >= 1_200
    line = ShadowQueue(1_000, 3 * copy.size_bytes)
    assert [line.offer(copy) for _ in range(4)] == [True, True, True, False]
    assert line.size_bytes == 3 * copy.size_bytes
    while line.take() is not None:
        continue
    assert line.size_bytes == 0 and line.offer(copy)


STOCK = Tool("stock", description="Ask ann@shop.example", parameters='{"type":"object"}')
TOOLS = BEDROCK_FEATURES | {Feature.TOOLS}


def calling(title: str, id: str = "c1", spaces: str = "") -> Script:
    """Return a script of reasoning and a call of ``stock``, without text."""
    events = (
        Reasoning("Hm.", 1),
        ToolBegin("stock", 1, id=id),
        ToolArgs(f'{{"mail":{spaces}"jo@mail.example", "title":{spaces}"{title}"}}', 1),
        ToolEnd("", 0),
    )
    return Script(events=events, finish_reasons=(FinishReason.TOOL_CALLS,))


@pytest.mark.parametrize(("title", "same"), [("Berserk", True), ("Vinland Saga", False)])
async def test_calls_of_tools_are_compared_by_their_names_and_arguments(
    build: Build, ask: Ask, title: str, same: bool
) -> None:
    rig = build(
        primary=calling("Berserk"), other=calling(title, "c2", " "), features=TOOLS, judge=Script(("A",))
    )
    async with rig.running():
        sink = await rig.run(ask(tools=(STOCK,), needs=frozenset({Feature.TOOLS})))
        await rig.until(ShadowOutcome.COMPARED)
    assert sink.answer is not None and len(sink.answer.tool_calls) == 1
    [pair] = rig.store.pairs
    for side in (pair.primary, pair.shadow):
        assert (side.tool_calls, side.tools, side.reasoning_chars, side.chars) == (1, "stock", 3, 0)
        assert side.checks["shape"] is True and side.finish_reason == "tool_calls"
    assert pair.primary.calls and (pair.primary.calls == pair.shadow.calls) is same
    assert (pair.likeness, pair.judged) == (None, None)
    assert "mail.example" not in repr(pair)
    [group] = make_report([pair])["groups"]
    assert (group["same_tools"]["mean"], group["same_calls"]["mean"]) == (1.0, float(same))


async def test_personal_data_leaves_calls_of_the_history_and_descriptions_of_tools(
    build: Build, ask: Ask
) -> None:
    call = ToolCall("c0", "stock", '{"mail": "jo@mail.example", "count": 2}')
    turns = (
        Message(Role.USER, "How many?"),
        Message(Role.ASSISTANT, "", tool_calls=(call,)),
        Message(Role.TOOL, "7, says jo@mail.example", tool_call_id="c0"),
    )
    rig = build(features=TOOLS)
    async with rig.running():
        await rig.run(ask(messages=turns, tools=(STOCK,), needs=frozenset({Feature.TOOLS})))
        await rig.until(ShadowOutcome.COMPARED)
    [work] = rig.other.calls
    [sent] = [one for message in work.messages for one in message.tool_calls]
    assert (sent.id, json.loads(sent.arguments)) == ("c0", {"mail": "[mail]", "count": 2})
    assert work.messages[-1].content == "7, says [mail]"
    assert [(tool.name, tool.description) for tool in work.tools] == [("stock", "Ask [mail]")]
    assert ".example" not in repr(work)


async def test_personal_data_leaves_all_that_a_request_has_besides_its_prompt(build: Build, ask: Ask) -> None:
    mail = "jo@mail.example"
    rig = build(features=frozenset(Feature))
    request = ask(
        "hi",
        user=mail,
        session_id=f"mailbox of {mail}",
        sampling=Sampling(stop=(mail, "END"), max_tokens=4),
        response_format=ResponseFormat(FormatType.CHOICE, json.dumps(["yes", mail])),
        extra={"metadata": {"mail": mail, "count": 2}},
        template_kwargs={"user_name": mail},
    )
    async with rig.running():
        await rig.run(request)
        await rig.until(ShadowOutcome.COMPARED)
    [work] = rig.other.calls
    assert (work.user, work.session_id, work.sampling.stop) == (None, None, ("[mail]", "END"))
    assert json.loads(work.response_format.spec) == ["yes", "[mail]"]
    assert work.extra == {"metadata": {"mail": "[mail]", "count": 2}}
    assert mail not in repr(work)


class RecordingTokenizer(ChatTokenizer):
    """Records the variables with which prompts are rendered."""

    rendered: list[dict[str, object]]

    def encode_parts(self, *given: Any, kwargs: Mapping[str, object] = NO_KWARGS, **more: Any) -> Any:
        self.rendered.append(dict(kwargs))
        return super().encode_parts(*given, kwargs=kwargs, **more)


async def test_a_prompt_that_is_rendered_with_personal_data_is_rendered_again(build: Build, ask: Ask) -> None:
    rig, tokenizer = build(features=frozenset(Feature)), RecordingTokenizer(ROOT / "models" / "demo")
    tokenizer.rendered = []
    models = Models(ModelText(tokenizer, 4096, Canonicalizer()))
    rig.shadow.asker = replace(rig.shadow.asker, models=models)
    async with rig.running():
        for name in ("jo", "jo@mail.example"):
            await rig.run(ask("hi", template_kwargs={"user_name": name}))
        await rig.until(ShadowOutcome.COMPARED, 2)
    assert tokenizer.rendered == [{"user_name": "[mail]"}]


async def test_a_request_with_tools_is_not_sent_to_a_backend_without_them(build: Build, ask: Ask) -> None:
    rig = build(primary=calling("Berserk"))
    async with rig.running():
        await rig.run(ask(tools=(STOCK,), needs=frozenset({Feature.TOOLS})))
        await rig.until(ShadowOutcome.UNABLE)
    assert rig.other.calls == []


def test_json_is_redacted_leaf_by_leaf_and_stays_json() -> None:
    card = 4_111_111_111_111_111
    text = json.dumps({"a": [card, True, None, 5], "b": {"jo@mail.example": "x"}})
    assert json.loads(redact_json(text, redact_personal)) == {
        "a": ["[card]", True, None, 5],
        "b": {"[mail]": "x"},
    }
    assert redact_json('{"a": 1}', redact_personal) == '{"a": 1}'
    assert redact_json("jo@mail.example {", redact_personal) == "[mail] {"
