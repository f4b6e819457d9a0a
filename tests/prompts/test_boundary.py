"""The token ids before the prefix boundary, for tokenizers and chat templates of all kinds.

Generating a prompt takes longer than planning it, so each prompt is planned with every tokenizer.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from budgeting.counting import ChatTokenizer
from budgeting.plan import BudgetPlanner
from budgeting.values import BudgetRequest, EvidenceChunk, Message, Plan, Role
from gateway.config.volatile import VolatilePolicy
from gateway.contracts.values import Caller, CallerRole, Contract, GenerateRequest
from gateway.prompts.canonical import Canonicalizer
from gateway.prompts.versions import PromptVersion
from tests.budgeting import folders

# Without `counting`: its template writes the number of messages before the first message.
KINDS = ["chatml", "headers", "unmarked", "alternating", "metaspace"]
VERSION = PromptVersion(id="v", system="You sell manga.", policy="Be kind.\n", grounding_rule="Follow rules.")

words = st.sampled_from(
    ["Be brief.", "Café", "ガ", "何か\u3000お勧め", "in stock", "a  b", "1994", "é", "Ångström"]
)
lines = st.lists(words, min_size=1, max_size=5).map(" ".join)
texts = st.lists(lines, min_size=1, max_size=4).map("\n".join)
contexts = st.dictionaries(st.text(max_size=6), st.text(max_size=12) | st.integers(), max_size=4)


@pytest.fixture(scope="module")
def planners(tmp_path_factory: pytest.TempPathFactory) -> dict[str, BudgetPlanner]:
    written = folders.write_all(tmp_path_factory.mktemp("models"))
    return {kind: BudgetPlanner(ChatTokenizer(written[kind]), max_model_len=8_192) for kind in KINDS}


def plan_of(
    planner: BudgetPlanner,
    system: Sequence[str],
    *,
    context: dict[str, object] | None = None,
    chunks: Sequence[EvidenceChunk] = (),
) -> Plan:
    turns = (Message(Role.USER, "hi"), Message(Role.ASSISTANT, "hello"), Message(Role.USER, "which one?"))
    asked = GenerateRequest(
        "req_1",
        "gen_1",
        Caller("acme", CallerRole.CALLER, "key_1"),
        0.0,
        0,
        contract=Contract.NATIVE,
        messages=(*(Message(Role.SYSTEM, text) for text in system), *turns),
        chunks=tuple(chunks),
        context=context or {},
    )
    found = Canonicalizer(native=VolatilePolicy.MOVE).canonical(asked, VERSION)
    return planner.plan(BudgetRequest(found.prompt))


def prefix(plan: Plan) -> tuple[int, ...]:
    assert plan.prefix_tokens > 0
    return plan.token_ids[: plan.prefix_tokens]


@settings(deadline=None)
@given(system=st.lists(texts, max_size=3))
def test_equal_meaning_gives_equal_prefix_ids(planners: dict[str, BudgetPlanner], system: list[str]) -> None:
    def written(form: str, end: str) -> list[str]:
        return [f"\n {end.join(unicodedata.normalize(form, text).split(chr(10)))}{end} " for text in system]

    # White space before the first line has no meaning; further in it may be intended.
    one, two = written("NFC", "\n"), written("NFD", " \t\r\n")
    for kind, planner in planners.items():
        assert prefix(plan_of(planner, one)) == prefix(plan_of(planner, two)), kind


@settings(deadline=None)
@given(system=st.lists(texts, max_size=2), one=contexts, two=contexts)
def test_a_changed_context_changes_no_id_before_the_boundary(
    planners: dict[str, BudgetPlanner], system: list[str], one: dict[str, object], two: dict[str, object]
) -> None:
    for kind, planner in planners.items():
        a, b = (plan_of(planner, system, context=context) for context in (one, two))
        assert prefix(a) == prefix(b), kind


@settings(deadline=None)
@given(system=texts, context=contexts)
def test_the_order_of_a_contexts_fields_changes_no_id_at_all(
    planners: dict[str, BudgetPlanner], system: str, context: dict[str, object]
) -> None:
    turned = dict(reversed(context.items()))
    for kind, planner in planners.items():
        a, b = (plan_of(planner, [system], context=fields) for fields in (context, turned))
        assert a == b, kind


@settings(deadline=None)
@given(system=texts, texts_of=st.lists(lines, max_size=3), other=st.lists(lines, max_size=3))
def test_evidence_changes_no_id_before_the_boundary(
    planners: dict[str, BudgetPlanner], system: str, texts_of: list[str], other: list[str]
) -> None:
    one, two = (
        [EvidenceChunk(f"m{n}", "catalog", text) for n, text in enumerate(chunks)]
        for chunks in (texts_of, other)
    )
    for kind, planner in planners.items():
        a, b = (plan_of(planner, [system], chunks=chunks) for chunks in (one, two))
        assert prefix(a) == prefix(b), kind


moments = st.datetimes(datetime(1990, 1, 1), datetime(2090, 1, 1), timezones=st.just(UTC))


@settings(deadline=None)
@given(system=st.lists(lines, min_size=1, max_size=4), place=st.integers(0, 4), one=moments, two=moments)
def test_a_timestamp_anywhere_in_a_system_text_changes_no_id_before_the_boundary(
    planners: dict[str, BudgetPlanner], system: list[str], place: int, one: datetime, two: datetime
) -> None:
    def stamped(at: datetime) -> str:
        return "\n".join([*system[:place], f"Current time: {at.isoformat()}", *system[place:]])

    for kind, planner in planners.items():
        a, b = (plan_of(planner, [stamped(at)]) for at in (one, two))
        assert prefix(a) == prefix(b), kind
        assert any(one.isoformat() in message.content for message in a.messages), kind
