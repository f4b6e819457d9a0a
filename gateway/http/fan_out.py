"""Runs each prompt of a body as its own request, and joins their choices to one answer."""

import asyncio
import operator
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import reduce
from typing import ClassVar, Final, TypeVar

from msgspec import Struct
from msgspec.structs import astuple, replace

from budgeting.values import Plan
from gateway.contracts.answer import Answer, BudgetReport, Timings
from gateway.contracts.events import Delta
from gateway.contracts.values import GenerateRequest, Usage
from gateway.errors import PublicError
from gateway.generation.sink import Sink
from resilience.task_groups import all_or_error

AT_ONCE: Final = 16  # most prompts of one body in flight at one time: about as many as an engine batches

CountsT = TypeVar("CountsT", Usage, BudgetReport)


class _PromptFailed(Exception):  # ends the group; the part has the error
    """One prompt has no answer, so the other prompts are cancelled."""


class _PartSink(Struct, eq=False):
    """The sink of one prompt; forwards all but the end. Its choices come after those of earlier prompts."""

    sink: Sink
    lock: asyncio.Lock
    first_choice: int
    answer: Answer | None = None
    failure: PublicError | None = None
    discarded: ClassVar[bool] = False

    def planned(self, plan: Plan, model: str) -> None:
        self.sink.planned(plan, model)

    async def delta(self, delta: Delta) -> None:
        if self.first_choice:
            delta = replace(delta, index=self.first_choice + delta.index)
        async with self.lock:
            await self.sink.delta(delta)

    async def finish(self, answer: Answer) -> None:
        self.answer = answer

    async def fail(self, error: PublicError) -> None:
        self.failure = error


async def run_prompts(
    run: Callable[[GenerateRequest, Sink], Awaitable[None]],
    requests: Sequence[GenerateRequest],
    sink: Sink,
    clock: Callable[[], float],
) -> None:
    """Run each request; the sink gets one answer with all choices, or a failure.

    ``arrived_at`` of a request is set when it starts, so that its timings exclude the wait for earlier
    prompts. The caller's deadline does not change.
    """
    lock = asyncio.Lock()  # a transport takes one message at a time
    parts = [_PartSink(sink, lock, index * one.sampling.n) for index, one in enumerate(requests)]
    waiting = iter(zip(requests, parts, strict=True))

    async def work() -> None:
        for request, part in waiting:
            await run(replace(request, arrived_at=clock()), part)
            if part.failure is not None:
                raise _PromptFailed

    with suppress(_PromptFailed):
        async with all_or_error() as group:
            for _ in range(min(AT_ONCE, len(requests))):
                group.create_task(work())
    failure = next((part.failure for part in parts if part.failure is not None), None)
    answers = [part.answer for part in parts if part.answer is not None]
    if failure is not None:
        await sink.fail(failure)
    elif len(answers) == len(parts):
        await sink.finish(_joined(answers))


def _joined(answers: Sequence[Answer]) -> Answer:
    """One answer with all choices, in order. It names a fallback if one of the answers came from one."""
    shown = next((one for one in answers if one.fallback is not None), answers[0])
    first, *others = [choice for one in answers for choice in one.choices]
    first_tokens = [one.timings.ttft_ms for one in answers if one.timings.ttft_ms is not None]
    return replace(
        shown,
        request_id=answers[0].request_id,
        generation_id=answers[0].generation_id,
        output_text=first.text,
        finish_reason=first.finish_reason,
        stop_sequence=answers[0].stop_sequence,
        logprobs=first.logprobs,
        others=tuple(others),
        usage=_sum([one.usage for one in answers]),
        budget=_sum([one.budget for one in answers]),
        timings=Timings(
            queue_wait_ms=max(one.timings.queue_wait_ms for one in answers),
            ttft_ms=min(first_tokens, default=None),
            total_ms=max(one.timings.total_ms for one in answers),
        ),
        warnings=tuple(dict.fromkeys(text for one in answers for text in one.warnings)),
    )


def _sum(counts: Sequence[CountsT]) -> CountsT:
    """The sum of each field: numbers are added, lists joined."""
    fields = zip(*map(astuple, counts), strict=True)
    return type(counts[0])(*[reduce(operator.add, values) for values in fields])
