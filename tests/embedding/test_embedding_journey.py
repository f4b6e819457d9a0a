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
from gateway.backends.port import BackendState, EmbedPart, Fleet, Vectors
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
from gateway.routing.check import KnownNames
from gateway.routing.revision import make_revision
from observability.events import RequestRecord
from observability.tracing import Tracing
from resilience.failures import BackendFailure, FailureKind
from resilience.turns import Turns
from tests.journey.house import CALLER, Outbox


@dataclass
class Maker:
    """A backend whose vectors are its inputs' texts; ``fails`` are raised, one a call."""

    name: str
    model: str = "bge"
    kind: str = "openai"
    state: BackendState = BackendState.READY
    fails: list[BackendFailure] = field(default_factory=list)
    holds: asyncio.Event | None = None
    parts: list[EmbedPart] = field(default_factory=list)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    load: None = None

    async def embed(self, part: EmbedPart) -> Vectors:
        self.parts.append(part)
        self.asked.set()
        if self.holds is not None:
            await self.holds.wait()
        if self.fails:
            raise self.fails.pop(0)
        return Vectors(tuple(map(str, part.inputs)), len(part.inputs))


class House:
    """A journey for vectors over these backends."""

    def __init__(self, *makers: Maker) -> None:
        backends = cast("dict[str, Any]", {one.name: one for one in makers})
        fleet = Fleet(backends, {"text-embedding-3-small": "bge"})
        route = {"backends": [{"name": makers[0].name, "weight": 100}], "fallback": []}
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
            tracing=Tracing(),
            emit=self.records.append,
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

    def left_behind(self) -> bool:
        return bool(self.in_flight.in_flight or any(map(self.admission.in_flight, self.names)))


def gone(kind: FailureKind = FailureKind.BACKEND_UNAVAILABLE) -> BackendFailure:
    return BackendFailure(kind, "it is gone")


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
    house = House(Maker("a"))
    house.journey.accounts.price = lambda row: structs.replace(row, cost_nanousd=60 * row.input_tokens)
    caller = replace(CALLER, budget=Budget(1_000, None))
    await house.run("one", "two", caller=caller)
    assert await house.journey.limiter.spent(CALLER.key_id, caller.budget) == {"usd_per_day": 120}
    house.journey.fleet.backends["a"].fails.append(gone())  # type: ignore[attr-defined]
    with pytest.raises(BackendFailure):
        await house.run("three", caller=caller)
    assert await house.journey.limiter.spent(CALLER.key_id, caller.budget) == {"usd_per_day": 120}


async def test_vectors_come_in_order_of_the_inputs_whatever_part_ends_first() -> None:
    maker = Maker("pool")
    house = House(maker)
    inputs = [f"line {number}" for number in range(500)]
    answer = await house.run(*inputs)
    assert (list(answer.vectors), answer.input_tokens, answer.model) == (inputs, 500, "bge")
    assert len(maker.parts) == 8
    assert house.rows() == [("pool", "stop", 500, 500)]
    assert set(house.priorities) == {PRIORITY}
    [record] = house.records
    assert (record.status, record.input_tokens, record.backend_name) == (200, 500, "pool")
    assert not house.left_behind()


async def test_another_backend_with_the_model_answers_when_one_cannot() -> None:
    first, second = Maker("first", fails=[gone()]), Maker("second")
    house = House(first, second, Maker("third", model="other"))
    assert [*(await house.run("a")).vectors] == ["a"]
    assert house.rows() == [("second", "stop", 1, 1)]
    first.state = BackendState.STARTING
    await house.run("b")
    assert len(first.parts) == 1 and len(second.parts) == 2


async def test_a_faulty_request_is_sent_once_and_costs_nothing() -> None:
    first, second = Maker("first", fails=[gone(FailureKind.INVALID_INPUT)]), Maker("second")
    house = House(first, second)
    with pytest.raises(BackendFailure):
        await house.run("a")
    assert not second.parts
    assert house.rows() == [(None, "error", 0, 0)]
    assert house.records[0].status == 400
    assert not house.left_behind()


async def test_faults_of_requests_leave_the_backend_in_service_for_others() -> None:
    faults = 40
    maker = Maker("pool", fails=[gone(FailureKind.INVALID_INPUT) for _ in range(faults)])
    house = House(maker)
    for _ in range(faults):
        with pytest.raises(BackendFailure):
            await house.run("a")
    assert [*(await house.run("a")).vectors] == ["a"]


async def test_a_model_that_makes_no_vectors_is_an_unknown_one_here() -> None:
    house = House(Maker("pool", fails=[gone(FailureKind.MODEL_NOT_FOUND)]))
    with pytest.raises(UnknownModel, match="no worker makes vectors"):
        await house.run("a")
    assert house.records[0].status == 404


async def test_a_part_that_fails_everywhere_ends_the_others_and_bills_nothing() -> None:
    house = House(Maker("pool", fails=[gone()]))
    with pytest.raises(BackendFailure):
        await house.run(*map(str, range(500)))
    assert house.rows() == [(None, "error", 0, 0)]
    assert not house.left_behind()


async def test_a_caller_who_leaves_frees_everything() -> None:
    maker = Maker("pool", holds=asyncio.Event())
    house = House(maker)
    async with asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(house.run(*map(str, range(200))))
        await maker.asked.wait()
        asking.cancel()
    assert house.rows() == [(None, "cancelled", 0, 0)]
    assert house.records[0].status == 499
    assert not house.left_behind()


async def test_a_keys_tokens_are_reserved_by_estimate_and_settled_by_use() -> None:
    house = House(Maker("pool"))
    caller = replace(CALLER, limits=KeyLimits(tokens_per_minute=100))
    with pytest.raises(RateLimited):
        await house.run("word " * 400, caller=caller)
    for _ in range(5):  # 30 tokens by the estimate, one by the worker's count
        await house.run("word " * 24, caller=caller)
    assert len(house.outbox.rows) == 5


async def test_a_key_reaches_its_own_models_names_and_routes_alone() -> None:
    house = House(Maker("first"), Maker("second", model="other"))
    assert (await house.run("a", model="text-embedding-3-small")).model == "bge"
    assert (await house.run("a", model="second")).model == "other"
    own = replace(CALLER, aliases=(("mine", "bge"),))
    assert (await house.run("a", model="mine", caller=own)).model == "bge"
    for caller, model in (
        (CALLER, "mine"),
        (replace(CALLER, models=("other",)), "bge"),
        (replace(CALLER, routes=("only",)), "other"),
    ):
        with pytest.raises(UnknownModel):
            await house.run("a", model=model, caller=caller)
    assert (await house.run("a", caller=replace(CALLER, routes=("only",)))).model == "bge"


@pytest.mark.parametrize(
    ("kind", "further"),
    [
        (EmbeddingsRequest, {"inputs": ("a",)}),
        (ScoreRequest, {"pairs": (("a", "b"),), "endpoint": "score", "options": {}, "created": 0}),
        (AudioRequest, {"recording": None, "response_format": "json"}),
    ],
)
async def test_whether_a_key_may_ask_is_known_without_a_worker_being_asked(kind: Any, further: Any) -> None:
    common = {"request_id": "req_1", "generation_id": "gen_1", "arrived_at": 0.0, "model": "bge"}
    asked, maker = kind(caller=CALLER, **common, **further), Maker("pool")
    house = House(maker)
    able = {EmbeddingsRequest: "embed", ScoreRequest: "score", AudioRequest: "transcribe"}[kind]
    assert house.journey.may_ask(asked) is (able == "embed")
    setattr(maker, able, Maker.embed)
    assert house.journey.may_ask(asked)
    assert not house.journey.may_ask(structs.replace(asked, model="other"))
    assert not house.journey.may_ask(structs.replace(asked, caller=replace(CALLER, models=("other",))))
    assert maker.parts == [] and house.rows() == []


async def test_a_gateway_without_workers_says_what_is_missing() -> None:
    house = House(Maker("pool"))
    with pytest.raises(UnknownModel, match="configure workers that do"):
        await house.run("a", caller=replace(CALLER, models=("other",)))


async def test_a_gateway_that_drains_takes_no_more() -> None:
    house = House(Maker("pool"))
    house.in_flight.drain()
    with pytest.raises(Draining):
        await house.run("a")
    assert house.records[0].status == 503


async def test_fewer_vectors_than_inputs_are_no_answer() -> None:
    class Short(Maker):
        async def embed(self, part: EmbedPart) -> Vectors:
            return Vectors((), 1)

    house = House(Short("pool"))
    with pytest.raises(BackendFailure, match="0 results for 1 inputs"):
        await house.run("a")
