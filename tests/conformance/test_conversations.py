"""Whole conversations: on every backend the same events and answers, or what the document says."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.conformance.conversations import (
    CONVERSATIONS,
    OTHER_EVENTS,
    Outcome,
    cells_of,
    documented,
    expected_of,
    hold,
    stored_outcomes,
)
from tests.conformance.harness import Specimen

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
    found = await hold(specimen, expected)
    cells = dict(zip(CONVERSATIONS, cells_of(found, expected), strict=True))
    told = dict(zip(CONVERSATIONS, documented()[HEADS[name]], strict=True))
    differ: Mapping[str, tuple[str, str, Outcome]] = {
        one: (cells[one], told[one], found[one]) for one in CONVERSATIONS if cells[one] != told[one]
    }
    assert not differ


def test_there_are_forty_and_each_difference_has_a_reason() -> None:
    columns = documented()
    assert len(CONVERSATIONS) == 40
    assert set(columns) == set(HEADS.values())
    for cells in columns.values():
        for name, cell in zip(CONVERSATIONS, cells, strict=True):
            assert cell.startswith(("same", "refused: `", "answered: ")) or name in OTHER_EVENTS
