"""Whatever is offered, produced, cancelled and reported, in any order: nothing starves, nothing leaks."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from admission.events import SlotOutcome
from admission.forecast import KvPoolTokens
from admission.gate import BackendGate
from admission.ticket import IDLE_ENGINE, AdmissionTicket, Hold, Refusal, TicketState
from admission.values import BackendLoad, Demand
from tests.admission.gate_rig import DEMAND, plain

LIMITS = plain(max_queue=12, max_queue_tokens=6_000, max_prefill_tokens=1_000, aging_s=0.7)
POOL_BLOCKS, BLOCK_SIZE = 150, 16
POOL = KvPoolTokens(POOL_BLOCKS, BLOCK_SIZE)
MAX_RUNNING = 6


class Traffic(RuleBasedStateMachine):
    """A gate in front of an engine; the rules set its speed and how often it reports its load."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = BackendGate(LIMITS, random=random.Random(3))
        self.now = 0.0
        self.offered = 0
        self.waiting: dict[int, AdmissionTicket] = {}
        self.running: dict[int, AdmissionTicket] = {}
        self.gone: list[AdmissionTicket] = []
        self.produced: dict[int, int] = {}
        self.foreign = 0
        self.others_share = 0.0
        self.tell()

    # Rules

    @rule(
        prompt=st.integers(1, 900),
        answer=st.integers(1, 300),
        priority=st.integers(-1, 1),
        tenant=st.sampled_from("abc"),
        n=st.sampled_from([1, 1, 1, 2, 4]),
        deadline_s=st.none() | st.floats(0.01, 3.0),
        cached=st.none() | st.integers(0, 900),
    )
    def offer(
        self,
        prompt: int,
        answer: int,
        priority: int,
        tenant: str,
        n: int,
        deadline_s: float | None,
        cached: int | None,
    ) -> None:
        self.offered += 1
        number = self.offered
        demand: Demand = replace(
            DEMAND,
            tenant=tenant,
            priority=priority,
            input_tokens=prompt,
            max_output_tokens=answer * n,
            sequences=n,
            arrived_at=self.now,
            deadline=None if deadline_s is None else self.now + deadline_s,
            cached_tokens=None if cached is None else min(cached, prompt),
            size_bytes=prompt * 64,
            kind=number,
            produced=lambda: self.produced.get(number, 0),
        )
        found = self.gate.offer(demand, self.now)
        if isinstance(found, Refusal):
            assert found.retry_after_s > 0.0 and found.estimated_wait_s >= 0.0 and not found.queued
        else:
            self.waiting[found.number] = found
        self.settle()

    @rule(seconds=st.floats(0.001, 1.5))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.settle()

    @precondition(lambda self: self.running)
    @rule(steps=st.integers(1, 40))
    def the_engine_steps(self, steps: int) -> None:
        for ticket in list(self.running.values()):
            number = ticket.demand.kind
            assert isinstance(number, int)
            if ticket.first_token_at is None:
                self.gate.first_token(ticket, self.now, ticket.demand.cached_tokens)
            made = self.produced.get(number, 0) + steps * ticket.demand.sequences
            self.produced[number] = min(ticket.max_tokens, made)
            if self.produced[number] >= ticket.max_tokens:
                self.end(ticket, SlotOutcome.SUCCEEDED)
        self.now += 0.01 * steps
        self.tell()

    @precondition(lambda self: self.running)
    @rule(pick=st.randoms(use_true_random=False), outcome=st.sampled_from(list(SlotOutcome)))
    def one_ends(self, pick: random.Random, outcome: SlotOutcome) -> None:
        self.end(pick.choice(list(self.running.values())), outcome)
        self.settle()

    @precondition(lambda self: self.waiting)
    @rule(pick=st.randoms(use_true_random=False))
    def one_that_waits_leaves(self, pick: random.Random) -> None:
        ticket = self.waiting.pop(pick.choice(list(self.waiting)))
        self.gate.release(ticket, SlotOutcome.IGNORED, self.now, output_tokens=0)
        self.gone.append(ticket)
        self.settle()

    @precondition(lambda self: self.gone)
    @rule(pick=st.randoms(use_true_random=False), outcome=st.sampled_from(list(SlotOutcome)))
    def one_is_released_again(self, pick: random.Random, outcome: SlotOutcome) -> None:
        before = self.books()
        ticket = pick.choice(self.gone)
        self.gate.release(ticket, outcome, self.now, output_tokens=7)
        self.gate.first_token(ticket, self.now, 0)
        assert self.books() == before

    @rule(foreign=st.integers(0, 8), share=st.floats(0.0, 1.0))
    def others_come_and_go(self, foreign: int, share: float) -> None:
        self.foreign, self.others_share = foreign, share if foreign else 0.0
        self.tell()

    @rule()
    def the_engine_says_nothing(self) -> None:
        self.gate.report(None, self.now)
        self.settle()

    # Invariants

    @invariant()
    def the_books_balance(self) -> None:
        gate = self.gate
        assert gate.queued == len(gate.tickets) == len(self.waiting)
        assert gate.in_flight == len(gate.forecast) == len(self.running)
        assert gate.work.sequences == sum(ticket.demand.sequences for ticket in self.running.values())
        assert gate.queue.tokens == sum(ticket.uncached for ticket in self.waiting.values())
        assert gate.queue.size_bytes == sum(ticket.demand.size_bytes for ticket in self.waiting.values())
        begun = [ticket for ticket in self.running.values() if ticket.first_token_at is None]
        assert gate.work.prefill.total == sum(ticket.uncached for ticket in begun)
        assert sum(gate.queue.counts().values()) == len(self.waiting)
        if not self.running:
            assert (gate.forecast.now_tokens, gate.work.prefill.total) == (0, 0)

    @invariant()
    def nobody_waits_beyond_the_wait_budget(self) -> None:
        for ticket in self.waiting.values():
            factor = LIMITS.priority_factor if ticket.demand.priority > 0 else 1.0
            assert self.now < ticket.arrived_at + LIMITS.max_wait_s * factor

    @invariant()
    def somebody_waits_only_for_a_reason(self) -> None:
        if self.waiting:
            assert self.running or self.foreign, "an idle engine and somebody waiting"
            assert self.gate.queue.next_change() is not None
            match self.gate.hold:
                case Hold.SLOTS:
                    ours = sum(ticket.demand.sequences for ticket in self.running.values())
                    reported = self.gate.work.signals.load.running if self.gate.work.signals.load else 0
                    assert max(ours + self.foreign, reported) >= MAX_RUNNING
                case Hold.PREFILL:
                    # A prompt of low priority leaves room for others after it.
                    low = [one.uncached for one in self.waiting.values() if one.demand.priority < 0]
                    ahead = self.gate.work.prefill.total + max(low, default=0)
                    assert ahead >= LIMITS.max_prefill_tokens
                case Hold.MEMORY:
                    assert self.gate.work.memory.usage(self.now)[1] > 0.0
                case None:
                    raise AssertionError("somebody waits for nothing")

    def teardown(self) -> None:
        """Check from any state: once no request arrives, all are served or refused, and nothing is left."""
        self.foreign, self.others_share = 0, 0.0
        for _ in range(1 + len(self.waiting)):
            for ticket in list(self.running.values()):
                self.end(ticket, SlotOutcome.SUCCEEDED)
            self.tell()
        assert not self.waiting and self.gate.queued == 0
        for ticket in list(self.running.values()):
            self.end(ticket, SlotOutcome.SUCCEEDED)
        self.the_books_balance()
        assert self.gate.queue.next_change() is None

    # Helpers

    def tell(self) -> None:
        """Report the load that the engine really has."""
        held = sum(
            ticket.uncached + self.produced.get(ticket.demand.kind, 0)  # type: ignore[call-overload]
            for ticket in self.running.values()
        )
        ours = sum(ticket.demand.sequences for ticket in self.running.values())
        load = BackendLoad(
            running=ours + self.foreign,
            kv_usage=min(1.0, held / POOL.tokens + self.others_share),
            total_blocks=POOL_BLOCKS,
            block_size=BLOCK_SIZE,
            max_running=MAX_RUNNING,
        )
        self.gate.report(load, self.now)
        self.settle()

    def settle(self) -> None:
        """Do what the controller does after each event, and check the tickets."""
        self.sent_away(self.gate.displaced())
        self.sent_away(self.gate.expired(self.now))
        idle = not self.running and not self.foreign
        handed_on = self.gate.pump(self.now)
        for ticket in handed_on:
            assert self.waiting.pop(ticket.number) is ticket and ticket.state is TicketState.HANDED_ON
            self.running[ticket.number] = ticket
        self.sent_away(self.gate.displaced())
        if idle and len(handed_on) == 1:
            [only] = handed_on
            passes = self.gate.forecast.usage(POOL) > LIMITS.pressure_of(only.demand.priority)[1]
            assert passes == (only.beyond == IDLE_ENGINE), "beyond the forecast, and no reason"
        elif handed_on:
            self.never_over_the_limits(handed_on[-1])
            assert handed_on[-1].beyond is None

    def never_over_the_limits(self, last: AdmissionTicket) -> None:
        """Check that the last ticket was within the limits when it was handed on to a busy engine."""
        ours = sum(ticket.demand.sequences for ticket in self.running.values())
        assert ours - last.demand.sequences < MAX_RUNNING
        load = self.gate.work.signals.load
        assert load is not None
        pressure, watermark = LIMITS.pressure_of(last.demand.priority)
        assert load.kv_usage < pressure
        assert self.gate.forecast.usage(POOL, used=load.kv_usage) <= watermark + 1e-9

    def sent_away(self, tickets: list[AdmissionTicket]) -> None:
        for ticket in tickets:
            assert ticket.state is TicketState.GONE and ticket.refusal is not None
            assert ticket.refusal.queued and ticket.refusal.retry_after_s > 0.0
            assert self.waiting.pop(ticket.number) is ticket
            self.gone.append(ticket)

    def end(self, ticket: AdmissionTicket, outcome: SlotOutcome) -> None:
        number = ticket.demand.kind
        assert isinstance(number, int)
        self.gate.release(ticket, outcome, self.now, output_tokens=self.produced.get(number, 0))
        del self.running[ticket.number]
        self.gone.append(ticket)

    def books(self) -> tuple[object, ...]:
        gate = self.gate
        return (
            gate.queued, gate.in_flight, len(gate.forecast), gate.forecast.now_tokens, gate.work.prefill.total,
            gate.queue.tokens, gate.circuit.error_rate(self.now), gate.limit.value, gate.rates.hold_s.samples,
        )  # fmt: skip


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(
    max_examples=25, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
