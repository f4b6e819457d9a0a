"""One simulated gateway process: the production pool and gate, with its own view of the workers."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from admission.events import SlotOutcome
from admission.gate import BackendGate
from admission.ticket import AdmissionTicket, Refusal
from admission.values import AdmissionLimits, Demand
from evaluation.simulator.values import SimulatedRequest
from gateway.backends.workers.health import WorkerHealth
from gateway.backends.workers.load import WorkerLoad
from gateway.backends.workers.pool import WorkerPool
from gateway.backends.workers.worker_choice import WorkerChoice, WorkerPreference, WorkerView
from gateway.config.backends import OpenAIBackend

SECTION = OpenAIBackend(kind="openai", base_urls=["http://workers:8000/v1"])


class Known:
    """A worker as one gateway knows it; in service from the start."""

    def __init__(self, number: int, *, interval_s: float, max_running: int) -> None:
        self.number = number
        self.url = f"http://worker-{number}:8000/v1"
        self.load = WorkerLoad(interval_s=interval_s, max_running=max_running)
        self.health = WorkerHealth(SECTION)
        self.health.probe_succeeded(0.0)

    def view(self, now: float) -> WorkerView:
        """Return the worker as the pool's choice sees it."""
        requests, kv_usage = self.load.requests_and_kv_usage(now)
        return WorkerView(self.url, requests, kv_usage, self.health.weight(now))


@dataclass(slots=True)
class _Given:
    """A request that was handed on: its tickets of the gate and of the worker's load, and the worker."""

    ticket: AdmissionTicket
    seen: Known
    load_ticket: int


class Front:
    """A gateway in front of all workers.

    Args:
        workers: how many.
        limits: the gate's.
        interval_s: seconds between two scrapes of a worker.
        max_running: sequences that a worker runs at once.
        affinity: when off, load alone decides.
        whole_up_to: the pool size above which only a shortlist is examined.
        produced: returns the tokens of an answer that have passed through this gateway so far.
        seed: of all random choices.
    """

    def __init__(
        self,
        workers: int,
        limits: AdmissionLimits,
        *,
        interval_s: float,
        max_running: int,
        affinity: bool,
        whole_up_to: int,
        produced: Callable[[SimulatedRequest], int],
        seed: int,
    ) -> None:
        self.seen = [Known(n, interval_s=interval_s, max_running=max_running) for n in range(workers)]
        choice = WorkerChoice([seen.url for seen in self.seen], affinity=affinity)
        draw = random.Random(seed)
        self.pool = WorkerPool(
            self.seen, choice, max_running=max_running, random=draw, whole_up_to=whole_up_to
        )
        self.gate = BackendGate(limits, random=draw)
        self._produced = produced
        self._outcomes: dict[AdmissionTicket, SimulatedRequest] = {}
        self._tickets: dict[int, AdmissionTicket] = {}
        self._given: dict[int, _Given] = {}
        # CPU seconds of the decisions at each arrival; requests that it lets out of the queue count for it.
        self.costs_s: list[float] = []
        self.queued_most = 0
        self.shortened = 0

    def arrive(self, outcome: SimulatedRequest, now: float) -> list[tuple[SimulatedRequest, int]]:
        """Offer a request to the gate; return the requests that are handed on now, each with its worker."""
        began = time.thread_time()
        self._listen(now)
        arrival, produced = outcome.arrival, self._produced
        demand = Demand(
            "pool",
            arrival.tenant,
            arrival.priority,
            arrival.prompt,
            arrival.max_tokens,
            arrived_at=now,
            produced=lambda: produced(outcome),
        )
        offered = self.gate.offer(demand, now)
        if isinstance(offered, Refusal):
            _refuse(outcome, offered.reason.value, now)
        else:
            self._tickets[arrival.number], self._outcomes[offered] = offered, outcome
            if offered.shrunk:
                outcome.max_tokens = offered.max_tokens
                self.shortened += 1
        moves = self._settle(now)
        self.costs_s.append(time.thread_time() - began)
        self.queued_most = max(self.queued_most, self.gate.queued)
        return moves

    def first_token(self, outcome: SimulatedRequest, now: float) -> list[tuple[SimulatedRequest, int]]:
        """Report a first token; return the requests that are handed on now, each with its worker."""
        self.gate.first_token(self._tickets[outcome.arrival.number], now, outcome.cached)
        return self.look(now)

    def finished(self, outcome: SimulatedRequest, now: float) -> list[tuple[SimulatedRequest, int]]:
        """Report the end of an answer; return the requests that are handed on now, each with its worker."""
        number = outcome.arrival.number
        given, ticket = self._given.pop(number), self._tickets.pop(number)
        del self._outcomes[ticket]
        self.pool.ended(given.seen, given.load_ticket)
        self.gate.release(ticket, SlotOutcome.SUCCEEDED, now, output_tokens=outcome.produced)
        return self.look(now)

    def look(self, now: float) -> list[tuple[SimulatedRequest, int]]:
        """Pump the queue after a change; return the requests that are handed on now, each with its worker."""
        if not self.gate.queued:
            return []
        self._listen(now)
        return self._settle(now)

    def next_change(self) -> float | None:
        """Return when the clock alone changes something, or ``None`` while no request is queued."""
        return self.gate.queue.next_change() if self.gate.queued else None

    def _listen(self, now: float) -> None:
        load = self.pool.load(now)
        if load is not None and load != self.gate.work.signals.load:
            self.gate.report(load, now)

    def _settle(self, now: float) -> list[tuple[SimulatedRequest, int]]:
        gone = [*self.gate.displaced(), *self.gate.expired(now)]
        handed_on = self.gate.pump(now)
        for ticket in (*gone, *self.gate.displaced()):
            outcome = self._outcomes.pop(ticket)
            del self._tickets[outcome.arrival.number]
            _refuse(outcome, ticket.refusal.reason.value if ticket.refusal else "gone", now)
        return [(self._outcomes[ticket], self._place(ticket, now)) for ticket in handed_on]

    def _place(self, ticket: AdmissionTicket, now: float) -> int:
        outcome = self._outcomes[ticket]
        arrival = outcome.arrival
        # Without prefixes in the trace, every prompt is unique.
        preference = WorkerPreference(arrival.units or (-arrival.number - 1,))
        seen = self.pool.pick(preference, (), now)
        if seen is None:
            raise AssertionError("no worker is in service, and none is ever taken out")
        self._given[arrival.number] = _Given(ticket, seen, self.pool.sent(seen, arrival.prompt, preference))
        outcome.handed_on_at = now
        return seen.number


def _refuse(outcome: SimulatedRequest, reason: str, now: float) -> None:
    outcome.refused_at, outcome.reason = now, reason


def costs_of(fronts: Sequence[Front]) -> list[float]:
    """Return the CPU seconds of all requests' decisions, sorted."""
    return sorted(cost for front in fronts for cost in front.costs_s)
