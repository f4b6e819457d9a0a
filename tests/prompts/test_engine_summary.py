from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from admission.values import BackendLoad
from budgeting.counting import ChatTokenizer
from budgeting.errors import TemplateRefused
from budgeting.plan import BudgetPlanner
from budgeting.summary import ExtractiveSummarizer, Summary
from budgeting.values import (
    BudgetRequest,
    CanonicalPrompt,
    Message,
    Role,
    SectionBudgets,
    SummaryKind,
)
from gateway.backends.port import BackendState
from gateway.prompts import engine_summary
from gateway.prompts.engine_summary import EngineSummarizer
from resilience.failures import BackendFailure, FailureKind
from tests.budgeting.conftest import DEMO
from tests.scripted import Script, ScriptedBackend

WRITTEN = "The user ordered Vinland Saga, order 88123; it goes to the office."


class Encoder:
    """Counts one token for every four characters."""

    def encode_chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return tuple(range(sum(len(m.content) for m in messages) // 4))

    # For the planner.
    def count(self, text: str) -> int:
        return (len(text) + 3) // 4


class Refusing(Encoder):
    def encode_chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        raise TemplateRefused("no such role")


def turns(number: int, words: int = 6) -> list[Message]:
    roles = (Role.USER, Role.ASSISTANT)
    return [Message(roles[at % 2], f"Order {at} is told of here. " * words) for at in range(number)]


class SummarizerRig:
    """A summarizer on a scripted backend, and the failures that it reported."""

    def __init__(
        self,
        *scripts: Script,
        encoder: Encoder | None = None,
        load: BackendLoad | None = None,
        length: int = 4096,
    ) -> None:
        self.backend = ScriptedBackend(scripts=scripts or (Script(pieces=(WRITTEN,)),), load=load)
        self.failures: list[str] = []
        self.slept: list[float] = []
        self.encoder = encoder or Encoder()
        self.summarizer = EngineSummarizer(
            self.backend,
            encoder=self.encoder,
            max_model_len=lambda: length,
            until_written=ExtractiveSummarizer(),
            new_id=lambda prefix: f"{prefix}_1",
            sleep=self._sleep,
            on_failure=self.failures.append,
        )

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(0)

    def ask(self, asked: Sequence[Message], max_tokens: int = 200, owner: str = "acme") -> Summary | None:
        return self.summarizer.summarize(asked, max_tokens=max_tokens, count=self.encoder.count, owner=owner)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as loops:
            task = loops.create_task(self.summarizer.run())
            try:
                yield
            finally:
                task.cancel()


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not true():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.001)


async def test_the_first_request_gets_picked_sentences_and_the_next_the_written_summary() -> None:
    rig = SummarizerRig()
    async with rig.running():
        first = rig.ask(turns(6))
        assert first is not None and first.text != WRITTEN
        assert rig.backend.calls == []  # the request did not wait for a summary
        await until(lambda: rig.ask(turns(6)) == Summary(WRITTEN, 6))
    [work] = rig.backend.calls
    assert work.priority < -1
    assert work.cache_salt is not None
    assert "user: Order 0" in work.messages[0].content


async def test_a_summary_written_for_a_tenant_and_the_prefix_it_was_made_of_serve_no_other_tenant() -> None:
    other = "A customer of umbra asked for a parcel."
    rig = SummarizerRig(Script(pieces=(WRITTEN,)), Script(pieces=(other,)))
    async with rig.running():
        rig.ask(turns(6), owner="acme")
        await until(lambda: rig.ask(turns(6), owner="acme") == Summary(WRITTEN, 6))
        foreign = rig.ask(turns(6), owner="umbra")
        assert foreign is not None and WRITTEN not in foreign.text
        await until(lambda: rig.ask(turns(6), owner="umbra") == Summary(other, 6))
        assert rig.ask(turns(6), owner="acme") == Summary(WRITTEN, 6)
    first, second = (work.cache_salt for work in rig.backend.calls)
    assert first != second


async def test_a_written_summary_serves_the_conversation_as_it_goes_on() -> None:
    rig = SummarizerRig()
    async with rig.running():
        rig.ask(turns(6))
        await until(lambda: rig.ask(turns(6)) == Summary(WRITTEN, 6))
        longer = rig.ask(turns(8))
        assert longer is not None and longer.turns == 8
        assert longer.text.startswith(f"{WRITTEN}\n") and "Order 7" in longer.text
        assert len(rig.backend.calls) == 1  # a summary without the last two turns is not written again
        rig.ask(turns(10))
        await until(lambda: len(rig.backend.calls) == 2)
    source = rig.backend.calls[1].messages[0].content
    assert f"Summary so far: {WRITTEN}" in source
    assert "Order 6" in source and "Order 5" not in source


async def test_what_is_asked_for_twice_is_written_once() -> None:
    rig = SummarizerRig()
    for _ in range(5):
        rig.ask(turns(4))
    assert len(rig.summarizer.waiting) == 1
    async with rig.running():
        await until(lambda: rig.ask(turns(4)) == Summary(WRITTEN, 4))
    assert len(rig.backend.calls) == 1


async def test_the_queue_is_bounded_and_forgets_the_longest_waiting() -> None:
    rig = SummarizerRig()
    for number in range(engine_summary.MAX_WAITING + 10):
        rig.ask([Message(Role.USER, f"Question {number} of many. It is about volume {number}.")])
    assert len(rig.summarizer.waiting) == engine_summary.MAX_WAITING
    async with rig.running():
        await until(lambda: len(rig.summarizer.waiting) == 0)
    assert not any("Question 0 of" in work.messages[0].content for work in rig.backend.calls)
    assert "Question 73" in rig.backend.calls[0].messages[0].content  # the newest is written first


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (Script(pieces=("half",), failure=BackendFailure(FailureKind.CUDA_OOM, "out of memory")), "cuda_oom"),
        (Script(pieces=("  \n",)), "empty"),
        (Script(pieces=("long " * 2_000,)), "too_long"),
    ],
)
async def test_a_failed_summary_is_reported_and_the_next_one_is_tried(script: Script, reason: str) -> None:
    rig = SummarizerRig(script, Script(pieces=(WRITTEN,)))
    async with rig.running():
        rig.ask(turns(4))
        await until(lambda: bool(rig.failures))
        assert rig.failures == [reason]
        await until(lambda: rig.ask(turns(4)) == Summary(WRITTEN, 4))


async def test_a_template_that_refuses_the_request_does_not_end_the_writer() -> None:
    rig = SummarizerRig(encoder=Refusing())
    async with rig.running():
        rig.ask(turns(4))
        await until(lambda: rig.failures == ["refused"])
    assert rig.backend.calls == []


async def test_a_busy_or_unready_engine_is_left_alone() -> None:
    rig = SummarizerRig(load=BackendLoad(waiting=1))
    rig.ask(turns(4))
    async with rig.running():
        await until(lambda: len(rig.slept) > 3)
        rig.backend.load = BackendLoad(waiting=0)
        rig.backend.state = BackendState.STARTING
        await asyncio.sleep(0.01)
        assert rig.backend.calls == []
        rig.backend.state = BackendState.READY
        await until(lambda: len(rig.backend.calls) == 1)


async def test_what_the_model_reads_leaves_room_for_the_summary() -> None:
    rig = SummarizerRig(length=1_000)
    rig.ask(turns(40, words=40))
    async with rig.running():
        await until(lambda: len(rig.backend.calls) == 1)
    [work] = rig.backend.calls
    assert work.sampling.max_tokens is not None
    assert len(work.token_ids) + work.sampling.max_tokens <= 1_000
    assert "Order 39" in work.messages[0].content  # the newest turns are read


async def test_a_written_summary_that_is_too_long_for_a_request_is_not_used() -> None:
    rig = SummarizerRig()
    async with rig.running():
        rig.ask(turns(4))
        await until(lambda: rig.ask(turns(4)) == Summary(WRITTEN, 4))
    short = rig.ask(turns(4), max_tokens=14)
    assert short is not None and short.text != WRITTEN
    assert rig.encoder.count(short.text) <= 14


async def test_cancelling_frees_the_sequence() -> None:
    rig = SummarizerRig(Script(delay_s=60.0))
    async with rig.running():
        rig.ask(turns(4))
        await until(lambda: rig.backend.active == 1)
    assert rig.backend.active == 0


async def test_asking_from_another_thread_wakes_the_writer() -> None:
    rig = SummarizerRig()
    async with rig.running():
        await asyncio.sleep(0.01)
        await asyncio.to_thread(rig.ask, turns(4))
        await until(lambda: len(rig.backend.calls) == 1)


async def test_planning_uses_extracted_sentences_until_the_summary_is_written(
    demo_tokenizer: ChatTokenizer,
) -> None:
    backend = ScriptedBackend(scripts=(Script(pieces=(WRITTEN,)),))
    summarizer = EngineSummarizer(
        backend,
        encoder=demo_tokenizer,
        max_model_len=lambda: 4096,
        until_written=ExtractiveSummarizer(),
        new_id=lambda prefix: prefix,
    )
    planner = BudgetPlanner(demo_tokenizer, max_model_len=700, summarizers={SummaryKind.ENGINE: summarizer})
    prompt = CanonicalPrompt(turns=(*turns(14), Message(Role.USER, "And now?")))
    request = BudgetRequest(
        prompt, max_tokens=50, budgets=SectionBudgets(recent_turns=300), summary=SummaryKind.ENGINE
    )
    async with asyncio.TaskGroup() as loops:
        task = loops.create_task(summarizer.run())
        first = await planner.plan_async(request)
        await until(lambda: len(backend.calls) == 1 and backend.active == 0)
        await asyncio.sleep(0)
        second = await planner.plan_async(request)
        task.cancel()
    assert WRITTEN not in first.messages[0].content
    assert second.messages[0].content == f"Earlier in this conversation:\n{WRITTEN}"
    assert second.counts.total + second.generation_reserve <= 700


@pytest.fixture(scope="module")
def demo_tokenizer() -> ChatTokenizer:
    return ChatTokenizer(DEMO)
