"""What two requests must share before one is given the other's answer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.selection import Lease
from adapters.values import Adapter
from budgeting.values import EvidenceChunk, Message, Plan, Role, SectionCounts
from gateway.contracts.answer import Answer, BudgetReport, Choice, Fallback, Timings
from gateway.contracts.values import (
    Caller,
    CallerRole,
    Contract,
    FinishReason,
    FormatType,
    GenerateRequest,
    ResponseFormat,
    Sampling,
    Usage,
)
from gateway.generation.answer_cache import key_of, question_of, worth_keeping
from gateway.generation.job import Job
from gateway.routing.check import KnownNames
from gateway.routing.revision import make_revision
from gateway.routing.target import Target
from tests.scripted import ScriptedBackend

ADAPTERS = (Adapter("calm", 1, "base", "/calm"), Adapter("lively", 2, "base", "/lively"))
REVISION = make_revision(
    1,
    {
        "routes": {
            name: {
                "backends": [{"name": "local"}],
                "fallback": ["response_cache"],
                "response_cache": {"similar": {"model": "bge", "threshold": 0.9}},
            }
            for name in ("one", "two")
        }
    },
    KnownNames(["local"], ["p1", "p2"], []),
)


@dataclass(frozen=True)
class Case:
    """Everything that may differ between two requests except the latest user turn."""

    tenant: str = "acme"
    route: str = "one"
    model: str | None = None
    served: str | None = None
    models: tuple[str, ...] | None = None
    adapter: int | None = None
    version: str | None = "p1"
    locale: str | None = None
    intent: str | None = None
    context: tuple[tuple[str, object], ...] = ()
    earlier: tuple[tuple[Role, str], ...] = ()
    chunks: tuple[tuple[str, str], ...] = ()
    temperature: float | None = None
    shape: str = ""
    contract: Contract = Contract.NATIVE
    deployment: str = "demo"


def lease_of(case: Case) -> Lease:
    if case.adapter is None:
        return Lease(None, "none")
    return Lease(ADAPTERS[case.adapter], "explicit")


def job(case: Case, text: str = "Who created Berserk?", token_ids: tuple[int, ...] = (1, 2, 3)) -> Job:
    messages = (*(Message(role, words) for role, words in case.earlier), Message(Role.USER, text))
    request = GenerateRequest(
        request_id="r",
        generation_id="g",
        contract=case.contract,
        caller=Caller(case.tenant, CallerRole.CALLER, "key", models=case.models),
        arrived_at=0.0,
        created=0,
        messages=messages,
        model=case.model,
        locale=case.locale,
        intent=case.intent,
        context=MappingProxyType(dict(case.context)),
        chunks=tuple(EvidenceChunk(str(n), kind, words) for n, (kind, words) in enumerate(case.chunks)),
        sampling=Sampling(temperature=case.temperature),
        response_format=ResponseFormat(FormatType.REGEX, case.shape) if case.shape else ResponseFormat(),
    )
    target = Target(REVISION.routes[case.route], case.version, model=case.served)
    plan = Plan((), token_ids, SectionCounts(), 10, 0)
    return Job(request, target, plan, lease_of(case), ScriptedBackend("local"))


WORDS = st.sampled_from(["", "a", "b", "Petra", "1"])
CASES = st.builds(
    Case,
    tenant=st.sampled_from(["acme", "globex"]),
    route=st.sampled_from(["one", "two"]),
    model=st.sampled_from([None, "base", "calm"]),
    served=st.sampled_from([None, "base", "big"]),
    models=st.sampled_from([None, (), ("base",), ("base", "big")]),
    adapter=st.sampled_from([None, 0, 1]),
    version=st.sampled_from([None, "p1", "p2"]),
    locale=st.sampled_from([None, "en", "ja"]),
    intent=st.sampled_from([None, "help"]),
    context=st.lists(
        st.tuples(st.sampled_from(["customer", "now"]), WORDS), max_size=2, unique_by=lambda f: f[0]
    ).map(lambda fields: tuple(sorted(fields))),
    earlier=st.lists(st.tuples(st.sampled_from(list(Role)), WORDS), max_size=3).map(tuple),
    chunks=st.lists(st.tuples(WORDS, WORDS), max_size=2, unique=True).map(
        lambda chunks: tuple(sorted(chunks))
    ),
    temperature=st.sampled_from([None, 0.0, 1.0]),
    shape=st.sampled_from(["", "a+", "b+"]),
    contract=st.sampled_from(list(Contract)),
    deployment=st.sampled_from(["demo", "other"]),
)


@given(CASES, CASES)
def test_two_requests_share_a_group_only_when_they_differ_in_the_latest_turn_alone(
    one: Case, other: Case
) -> None:
    first = question_of(job(one), one.deployment)
    second = question_of(job(other, "Who made Berserk?", (4, 5)), other.deployment)
    assert first is not None and second is not None
    assert (first.shelf == second.shelf) == (one == other)
    assert (first.text, first.tenant, first.model) == ("Who created Berserk?", one.tenant, "bge")


@pytest.mark.parametrize("other", [Case(models=("base", "big")), Case(model="mine", served="big")])
def test_no_answer_is_shared_by_keys_of_a_tenant_that_may_use_or_that_name_other_models(other: Case) -> None:
    one = replace(other, models=None, served="base")
    first, second = question_of(job(one), "demo"), question_of(job(other), "demo")
    assert first is not None and second is not None and first.shelf != second.shelf
    assert key_of(job(one), "demo") != key_of(job(other), "demo")
    same = replace(other, models=other.models and tuple(reversed(other.models)))
    assert key_of(job(same), "demo") == key_of(job(other), "demo")


def test_questions_with_other_numbers_are_never_in_one_group() -> None:
    shelves = {
        found.shelf
        for text in ("Where is order 12?", "Where is order 13?", "Where is my order 12?")
        if (found := question_of(job(Case(), text), "demo")) is not None
    }
    assert len(shelves) == 2


@pytest.mark.parametrize("text", ["", "  \n", "why " * 600])
def test_an_empty_or_long_text_is_never_matched_by_similarity(text: str) -> None:
    assert question_of(job(Case(), text), "demo") is None


@given(CASES, CASES)
def test_two_requests_share_a_key_only_when_prompt_and_surroundings_are_equal(one: Case, other: Case) -> None:
    """Context, evidence and turns are part of the prompt's ids, so they are not compared here."""
    first, second = key_of(job(one), one.deployment), key_of(job(other), other.deployment)
    bare = [replace(case, context=(), earlier=(), chunks=()) for case in (one, other)]
    assert (first == second) == (bare[0] == bare[1])
    assert first != key_of(job(one, token_ids=(1, 2, 4)), one.deployment)


def test_a_conversation_has_one_key_however_its_tokens_are_estimated() -> None:
    """The stand-ins for the ids of a model without a tokenizer change with each report of a worker."""

    def key(text: str, ids: tuple[int, ...]) -> str:
        one = job(Case(), text, ids)
        plan = msgspec.structs.replace(one.plan, messages=one.request.messages)
        return key_of(msgspec.structs.replace(one, plan=plan), "demo")

    assert key("Who created Berserk?", (1, 2, 3)) == key("Who created Berserk?", (1, 2, 3, 4))
    assert key("Who created Berserk?", (1, 2, 3)) != key("Who made Berserk?", (1, 2, 3))


@pytest.mark.parametrize(
    "change",
    [
        {"tenant": "globex"},
        {"adapter": 0},
        {"version": "p2"},
    ],
)
def test_nothing_leaks_between_tenants_adapters_and_versions(
    change: dict[str, object],
) -> None:
    case = Case()
    other = replace(case, **change)  # type: ignore[arg-type]
    assert key_of(job(case), "demo") != key_of(job(other), "demo")


def test_only_whole_plain_answers_of_the_meant_backend_are_kept() -> None:
    answer = Answer(
        "r", "g", "scripted", "local", "v", "base", "0" * 32, "Kentaro Miura.", FinishReason.STOP, Usage(),
        Timings(0, 0, 0), BudgetReport(0, 0, 0, 0, 0, (), 0), 0,
    )  # fmt: skip
    assert worth_keeping(answer)
    assert worth_keeping(msgspec.structs.replace(answer, finish_reason=FinishReason.LENGTH))
    for reason in set(FinishReason) - {FinishReason.STOP, FinishReason.LENGTH}:
        assert not worth_keeping(msgspec.structs.replace(answer, finish_reason=reason))
    assert not worth_keeping(msgspec.structs.replace(answer, fallback=Fallback("bedrock", "engine_dead")))
    assert not worth_keeping(msgspec.structs.replace(answer, output_text=""))
    assert not worth_keeping(msgspec.structs.replace(answer, others=(Choice("b", FinishReason.STOP),)))
    assert not worth_keeping(msgspec.structs.replace(answer, logprobs=()))
