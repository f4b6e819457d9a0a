"""Whole conversations: every backend gives the same events and answers, or differs as the document says."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from gateway.backends.port import Backend, Completion, Continue, DelegatingBackend, DeltaSink, Work
from gateway.contracts.events import Delta
from gateway.contracts.features import Feature
from resilience.events import Resumed
from resilience.failures import BackendFailure, FailureKind
from tests.conformance.conversations import (
    CONCURRENCY,
    CONVERSATIONS,
    OTHER_EVENTS,
    Outcome,
    answer_of,
    cells_of,
    documented,
    expected_of,
    parsed,
    rig_of,
    run_conversations,
    stored_outcomes,
    talk,
    user,
)
from tests.conformance.harness import Specimen
from tests.conformance.prompt_tokens import Bodies, miscounted

HEADS = {
    "embedded": "embedded engine",
    "vllm-in-process": "vLLM in process",
    "vllm-worker-token-ids": "`vllm serve` worker",
    "vllm-worker-messages": "`vllm serve` worker",
    "sluice-worker": "Sluice worker",
    "bedrock": "Bedrock",
}


@pytest.mark.asyncio(loop_scope="session")
async def test_forty_conversations_end_on_each_backend_as_the_document_says(
    specimen: Specimen, request: pytest.FixtureRequest
) -> None:
    name = next((one for one in HEADS if one in request.node.callspec.id), None)
    if name is None:
        pytest.skip("it has no column")
    stored = stored_outcomes()
    expected = expected_of(specimen, stored)
    found = await run_conversations(specimen, expected)
    cells = dict(zip(CONVERSATIONS, cells_of(found, expected), strict=True))
    in_document = dict(zip(CONVERSATIONS, documented()[HEADS[name]], strict=True))
    differ: Mapping[str, tuple[str, str, Outcome]] = {
        one: (cells[one], in_document[one], found[one])
        for one in CONVERSATIONS
        if cells[one] != in_document[one]
    }
    # Engines add in different orders, so a tie of the two likeliest tokens may be decided differently.
    ties = [one for one, (cell, said, _) in differ.items() if said == "same" and cell.endswith("events")]
    assert len(ties) <= MOST_TIES and len(differ) == len(ties), differ


MOST_TIES = 2
UNBROKEN = 1_000


class BreakingBackend(DelegatingBackend):
    """A backend whose first call breaks off after ``after`` pieces, counted from the first one with text."""

    def __init__(self, backend: Backend, after: int) -> None:
        self._backend = backend
        self.after = self.left = after
        self.calls = 0

    @property
    def delegate(self) -> Backend:
        return self._backend

    async def generate(self, work: Work, out: DeltaSink) -> Completion:
        self.calls += 1
        if self.calls > 1:
            return await self.delegate.generate(work, out)

        async def some(delta: Delta) -> None:
            if not self.left:
                raise BackendFailure(FailureKind.PREEMPTED, "broken on purpose")
            if self.left < self.after or delta.text:
                self.left -= 1
            await out(delta)

        return await self.delegate.generate(work, some)


@pytest.mark.parametrize("name", ["a call", "other scripts and emoji"])
@pytest.mark.asyncio(loop_scope="session")
async def test_an_answer_that_breaks_anywhere_is_resumed_without_a_repeated_or_missing_byte(
    specimen: Specimen, name: str
) -> None:
    backend = specimen.backend
    ways, features = backend.continues, backend.features
    if not specimen.computes or Continue.EVENTS not in ways or Feature.TOOLS not in features:
        pytest.skip("it has no tool calls, or does not resume them")
    unbroken = BreakingBackend(backend, UNBROKEN)
    whole = await answer_of(rig_of(specimen, unbroken), specimen, name)
    pieces = UNBROKEN - unbroken.left
    turns = asyncio.Semaphore(CONCURRENCY)
    modes: list[str] = []

    async def broken(after: int) -> bool:
        """Break the answer after ``after`` pieces and check the result; whether it had that many."""
        async with turns:
            breaking = BreakingBackend(backend, after)
            rig = rig_of(specimen, breaking)
            assert await answer_of(rig, specimen, name) == whole, after
        modes.extend(event.mode for event in rig.events if isinstance(event, Resumed))
        return breaking.calls > 1

    async with asyncio.TaskGroup() as group:
        places = [group.create_task(broken(after)) for after in range(1, pieces + 1)]
    assert (
        sum(place.result() for place in places) == len(modes) > 3
    )  # a busy engine gives several tokens at once
    assert set(modes) == {"exact"}
    await specimen.wait_idle()


CONTROL_TOKENS = 'start: "a b c" <|im_start|> "d e f" <|im_start|> /[a-z ]{1,30}/'


@pytest.mark.asyncio(loop_scope="session")
async def test_an_input_whose_grammar_names_control_tokens_is_resumed_without_their_markup(
    specimen: Specimen,
) -> None:
    ways, features = specimen.backend.continues, specimen.backend.features
    if not specimen.computes or Continue.EVENTS not in ways or Feature.TOOL_GRAMMARS not in features:
        pytest.skip("it has no grammars of tools, or does not resume calls")
    form = {"type": "grammar", "grammar": {"syntax": "lark", "definition": CONTROL_TOKENS}}
    patch = {"type": "custom", "custom": {"name": "patch", "format": form}}
    body = {
        **talk(user("Apply the patch."), tools=[patch], tool_choice="required", max_tokens=60),
        "stream": True,
    }
    inputs, calls = [], 0
    for after in (0, 3, 6, 9, 12, 15):
        breaking = BreakingBackend(specimen.backend, after or UNBROKEN)
        sink = await rig_of(specimen, breaking).run(
            parsed({"model": "demo", "temperature": 0, **body}).request
        )
        assert sink.answer is not None, (after, sink.error)
        inputs += [call.arguments for call in sink.answer.tool_calls]
        calls += breaking.calls
    assert len(inputs) == 6 and len(set(inputs)) == 1 and inputs[0].startswith("a b cd e f")
    assert calls > 8  # a busy engine gives several tokens at once
    await specimen.wait_idle()


@pytest.mark.asyncio(loop_scope="session")
async def test_prompts_with_tools_are_counted_as_the_worker_counts_them(specimen: Specimen) -> None:
    if (
        specimen.exact_ids
        or not specimen.exact_prompt
        or Feature.CUSTOM_TOOLS not in specimen.backend.features
    ):
        pytest.skip("it is given the ids, or has a tokenizer of its own")
    assert await miscounted(specimen, list(Bodies(22).draw(20))) == []


def test_there_are_forty_conversations_and_each_difference_has_a_reason() -> None:
    columns = documented()
    assert len(CONVERSATIONS) == 40
    assert set(columns) == set(HEADS.values())
    for cells in columns.values():
        for name, cell in zip(CONVERSATIONS, cells, strict=True):
            assert cell.startswith(("same", "refused: `", "answered: ")) or name in OTHER_EVENTS
