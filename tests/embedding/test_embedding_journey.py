"""The journey of a request for vectors: parts, backends, limits, the bill, and that nothing is left."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from accounting.account import Accounts
from accounting.keys import Budget, KeyLimits
from accounting.quotas import Quotas
from admission.controller import AdmissionController
from admission.values import AdmissionLimits
from gateway.backends.port import BackendState, Fleet
from gateway.contracts.audio import AudioRequest
from gateway.contracts.embeddings import EmbeddingInput, EmbeddingsAnswer, EmbeddingsRequest
from gateway.contracts.rerank import ScoreRequest
from gateway.embedding.journey import (
    MAX_WAIT_S,
    PART_INPUTS,
    PART_TOKENS,
    PRIORITY,
    EmbeddingJourney,
    input_tokens,
    split,
)
from gateway.errors import Draining, RateLimited, UnknownModel
from gateway.keys.rate_limits import KeyLimiter
from gateway.requests.in_flight import InFlightRequests
from gateway.requests.request_record import Reporter
from gateway.routing.check import KnownNames
from gateway.routing.revision import make_revision
from observability.events import RequestRecord
from observability.tracing import Tracing
from resilience.failures import BackendFailure, FailureKind
from resilience.turns import Turns
from tests.journey.rig import CALLER, Outbox


@dataclass
class FakeEmbedder:
    """A backend whose vectors are its inputs' texts; ``fails`` are raised, one a call."""

    name: str
    model: str = "bge"
    kind: str = "openai"
    state: BackendState = BackendState.READY
    fails: list[BackendFailure] = field(default_factory=list)
    holds: asyncio.Event | None = None
    parts: list[EmbeddingsRequest] = field(default_factory=list)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    load: None = None

    async def embed(self, part: EmbeddingsRequest) -> EmbeddingsAnswer:
        self.parts.append(part)
        self.asked.set()
        if self.holds is not None:
            await self.holds.wait()
        if self.fails:
            raise self.fails.pop(0)
        return EmbeddingsAnswer(part.model, list(map(str, part.inputs)), len(part.inputs))


class EmbeddingRig:
    """A journey for vectors over these backends."""

    def __init__(self, *embedders: FakeEmbedder) -> None:
        backends = cast("dict[str, Any]", {one.name: one for one in embedders})
        fleet = Fleet(backends, {"text-embedding-3-small": "bge"})
        route = {"backends": [{"name": embedders[0].name, "weight": 100}], "fallback": []}
        revision = make_revision(1, {"routes": {"only": route}}, KnownNames(backends, (), ()))
        self.priorities: list[int] = []
        self.admission = AdmissionController(
            AdmissionLimits(),
            load=lambda name: None,
            clock=lambda: 0.0,
            emit=lambda event: self.priorities.append(getattr(event, "priority", PRIORITY)),
            random=random.Random(1),
        )
        self.in_flight, self.outbox, self.records = InFlightRequests(), Outbox(), list[RequestRecord]()
        self.journey = EmbeddingJourney(
            in_flight=self.in_flight,
            revision=lambda: revision,
            fleet=fleet,
            admission=self.admission,
            limits=AdmissionLimits(max_wait_s=MAX_WAIT_S),
            accounts=Accounts(self.outbox),
            limiter=KeyLimiter(Quotas(clock=lambda: 0.0)),
            reporter=Reporter(Tracing(), self.records.append, lambda error, request_id: None, lambda: 1.0),
            clock=lambda: 1.0,
            unix_time=lambda: 1_700_000_000.0,
            turns=Turns(),
        )
        self.names = list(backends)

    async def run(self, *inputs: EmbeddingInput, **changes: Any) -> EmbeddingsAnswer:
        request = EmbeddingsRequest(
            request_id="req_1",
            generation_id="gen_1",
            caller=CALLER,
            arrived_at=0.0,
            created=0,
            model="bge",
            inputs=inputs,
        )
        answer = await self.journey.run(structs.replace(request, **changes))
        await asyncio.sleep(0)  # the record is emitted after the answer
        return answer

    def rows(self) -> list[tuple[str | None, str, int, int]]:
        return [
            (row.backend_name, row.finish_reason, row.input_tokens, row.billable_input_tokens)
            for row in self.outbox.rows
        ]

    def in_use(self) -> bool:
        return bool(self.in_flight.in_flight or any(gate.in_flight for gate in self.admission.gates.values()))


def gone(kind: FailureKind = FailureKind.BACKEND_UNAVAILABLE) -> BackendFailure:
    return BackendFailure(kind, "it is gone")


async def test_a_worker_gets_the_callers_trace_with_the_gateways_span_as_parent() -> None:
    rig = EmbeddingRig(embedder := FakeEmbedder("gpus"))
    await rig.run("a", trace_parent=f"00-{'a' * 32}-{'b' * 16}-01", trace_state="vendor=x")
    parent, state, _ = embedder.parts[0].trace_headers.decode().split("\r\n")
    assert parent.startswith(f"traceparent: 00-{'a' * 32}-") and "b" * 16 not in parent
    assert state == "tracestate: vendor=x"


@given(
    st.lists(
        st.one_of(st.text(min_size=1, max_size=60), st.tuples(st.integers(0, 9))), min_size=1, max_size=300
    )
)
def test_parts_hold_every_input_in_order_within_their_bounds(inputs: list[EmbeddingInput]) -> None:
    parts = list(split(inputs, input_tokens))
    assert [one for part in parts for one in part.inputs] == inputs
    assert all(inputs[part.first] is part.inputs[0] for part in parts)
    assert all(0 < len(part.inputs) <= PART_INPUTS for part in parts)
    assert all(part.tokens <= PART_TOKENS or len(part.inputs) == 1 for part in parts)


def test_an_input_longer_than_a_part_is_one_by_itself() -> None:
    long = tuple(range(PART_TOKENS + 1))
    assert [len(part.inputs) for part in split(["a", long, "b"], input_tokens)] == [1, 1, 1]


async def test_what_a_request_costs_is_spent_of_the_keys_budget() -> None:
    rig = EmbeddingRig(FakeEmbedder("a"))
    rig.journey.accounts.price = lambda row: structs.replace(row, cost_nanousd=60 * row.input_tokens)
    caller = replace(CALLER, budget=Budget(1_000, None))
    await rig.run("one", "two", caller=caller)
    assert await rig.journey.limiter.spent(CALLER.key_id, caller.budget) == {"usd_per_day": 120}
    rig.journey.fleet.backends["a"].fails.append(gone())  # type: ignore[attr-defined]
    with pytest.raises(BackendFailure):
        await rig.run("three", caller=caller)
    assert await rig.journey.limiter.spent(CALLER.key_id, caller.budget) == {"usd_per_day": 120}


async def test_vectors_come_in_order_of_the_inputs_whatever_part_ends_first() -> None:
    maker = FakeEmbedder("pool")
    rig = EmbeddingRig(maker)
    inputs = [f"line {number}" for number in range(500)]
    answer = await rig.run(*inputs)
    assert (list(answer.results), answer.input_tokens, answer.model) == (inputs, 500, "bge")
    assert len(maker.parts) == 8
    assert rig.rows() == [("pool", "stop", 500, 500)]
    assert set(rig.priorities) == {PRIORITY}
    [record] = rig.records
    assert (record.status, record.input_tokens, record.backend_name) == (200, 500, "pool")
    assert not rig.in_use()


async def test_another_backend_with_the_model_answers_when_one_cannot() -> None:
    first, second = FakeEmbedder("first", fails=[gone()]), FakeEmbedder("second")
    rig = EmbeddingRig(first, second, FakeEmbedder("third", model="other"))
    assert [*(await rig.run("a")).results] == ["a"]
    assert rig.rows() == [("second", "stop", 1, 1)]
    first.state = BackendState.STARTING
    await rig.run("b")
    assert len(first.parts) == 1 and len(second.parts) == 2


async def test_a_faulty_request_is_sent_once_and_costs_nothing() -> None:
    first, second = FakeEmbedder("first", fails=[gone(FailureKind.INVALID_INPUT)]), FakeEmbedder("second")
    rig = EmbeddingRig(first, second)
    with pytest.raises(BackendFailure):
        await rig.run("a")
    assert not second.parts
    assert rig.rows() == [(None, "error", 0, 0)]
    assert rig.records[0].status == 400
    assert not rig.in_use()


async def test_faults_of_requests_leave_the_backend_in_service_for_others() -> None:
    faults = 40
    maker = FakeEmbedder("pool", fails=[gone(FailureKind.INVALID_INPUT) for _ in range(faults)])
    rig = EmbeddingRig(maker)
    for _ in range(faults):
        with pytest.raises(BackendFailure):
            await rig.run("a")
    assert [*(await rig.run("a")).results] == ["a"]


async def test_requests_during_an_engines_restart_leave_it_in_service_for_those_after_it() -> None:
    maker = FakeEmbedder("local", state=BackendState.STARTING, fails=[gone() for _ in range(40)])
    rig = EmbeddingRig(maker)
    while maker.fails:
        with pytest.raises(BackendFailure, match="it is gone"):
            await rig.run("a")
    maker.state = BackendState.READY
    assert [*(await rig.run("a")).results] == ["a"]


async def test_a_model_that_makes_no_vectors_is_an_unknown_one_here() -> None:
    rig = EmbeddingRig(FakeEmbedder("pool", fails=[gone(FailureKind.MODEL_NOT_FOUND)]))
    with pytest.raises(UnknownModel, match="no worker makes vectors"):
        await rig.run("a")
    assert rig.records[0].status == 404


async def test_a_part_that_fails_everywhere_ends_the_others_and_bills_nothing() -> None:
    rig = EmbeddingRig(FakeEmbedder("pool", fails=[gone()]))
    with pytest.raises(BackendFailure):
        await rig.run(*map(str, range(500)))
    assert rig.rows() == [(None, "error", 0, 0)]
    assert rig.outbox.rows[0].error_code == rig.records[0].error_code == "backend_unavailable"
    assert not rig.in_use()


async def test_a_caller_who_leaves_frees_everything() -> None:
    maker = FakeEmbedder("pool", holds=asyncio.Event())
    rig = EmbeddingRig(maker)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(rig.run(*map(str, range(200))))
        await maker.asked.wait()
        running.cancel()
    assert rig.rows() == [(None, "cancelled", 0, 0)]
    assert rig.outbox.rows[0].error_code == rig.records[0].error_code == "cancelled"
    assert rig.records[0].status == 499
    assert not rig.in_use()


async def test_a_keys_tokens_are_reserved_by_estimate_and_settled_by_use() -> None:
    rig = EmbeddingRig(FakeEmbedder("pool"))
    caller = replace(CALLER, limits=KeyLimits(tokens_per_minute=100))
    with pytest.raises(RateLimited):
        await rig.run("word " * 400, caller=caller)
    for _ in range(5):  # 30 tokens by the estimate, one by the worker's count
        await rig.run("word " * 24, caller=caller)
    assert len(rig.outbox.rows) == 5


async def test_a_key_reaches_its_own_models_names_and_routes_alone() -> None:
    rig = EmbeddingRig(FakeEmbedder("first"), FakeEmbedder("second", model="other"))
    assert (await rig.run("a", model="text-embedding-3-small")).model == "bge"
    assert (await rig.run("a", model="second")).model == "other"
    own = replace(CALLER, aliases=(("mine", "bge"),))
    assert (await rig.run("a", model="mine", caller=own)).model == "bge"
    for caller, model in (
        (CALLER, "mine"),
        (replace(CALLER, models=("other",)), "bge"),
        (replace(CALLER, routes=("only",)), "other"),
    ):
        with pytest.raises(UnknownModel):
            await rig.run("a", model=model, caller=caller)
    assert (await rig.run("a", caller=replace(CALLER, routes=("only",)))).model == "bge"


@pytest.mark.parametrize(
    ("kind", "further"),
    [
        (EmbeddingsRequest, {"inputs": ("a",)}),
        (ScoreRequest, {"pairs": (("a", "b"),), "endpoint": "score", "options": {}}),
        (AudioRequest, {"recording": None, "response_format": "json"}),
    ],
)
async def test_whether_a_key_may_ask_is_known_without_a_worker_being_asked(kind: Any, further: Any) -> None:
    common = {
        "request_id": "req_1",
        "generation_id": "gen_1",
        "arrived_at": 0.0,
        "created": 0,
        "model": "bge",
    }
    asked, maker = kind(caller=CALLER, **common, **further), FakeEmbedder("pool")
    rig = EmbeddingRig(maker)
    able = {EmbeddingsRequest: "embed", ScoreRequest: "score", AudioRequest: "transcribe"}[kind]
    assert rig.journey.may_ask(asked) is (able == "embed")
    setattr(maker, able, FakeEmbedder.embed)
    assert rig.journey.may_ask(asked)
    assert not rig.journey.may_ask(structs.replace(asked, model="other"))
    assert not rig.journey.may_ask(structs.replace(asked, caller=replace(CALLER, models=("other",))))
    assert maker.parts == [] and rig.rows() == []


async def test_a_gateway_without_workers_says_what_is_missing() -> None:
    rig = EmbeddingRig(FakeEmbedder("pool"))
    with pytest.raises(UnknownModel, match="configure workers that do"):
        await rig.run("a", caller=replace(CALLER, models=("other",)))


async def test_a_gateway_that_drains_takes_no_more() -> None:
    rig = EmbeddingRig(FakeEmbedder("pool"))
    rig.in_flight.drain()
    with pytest.raises(Draining):
        await rig.run("a")
    assert rig.records[0].status == 503


async def test_fewer_vectors_than_inputs_are_no_answer_and_another_backend_is_asked() -> None:
    class Short(FakeEmbedder):
        async def embed(self, part: EmbeddingsRequest) -> EmbeddingsAnswer:
            return EmbeddingsAnswer(part.model, [], 1)

    rig = EmbeddingRig(Short("pool"))
    with pytest.raises(BackendFailure, match="0 results for 1 inputs"):
        await rig.run("a")
    both = EmbeddingRig(Short("pool"), FakeEmbedder("other"))
    assert (await both.run("a")).results == ["a"] and both.rows() == [("other", "stop", 1, 1)]
