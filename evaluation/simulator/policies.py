"""Admission policies in front of a simulated worker: the production gate, and those it is compared with."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from admission.events import SlotOutcome
from admission.gate import BackendGate
from admission.ticket import AdmissionTicket, Refusal
from admission.values import AdmissionLimits, BackendLoad, Demand
from evaluation.simulator.values import SimulatedRequest


@dataclass(frozen=True, slots=True)
class Moves:
    """The decisions of a policy at one moment."""

    hand_on: tuple[SimulatedRequest, ...] = ()
    refuse: tuple[tuple[SimulatedRequest, str], ...] = ()


NOTHING = Moves()


class Policy(Protocol):
    """The admission policy of one worker. Every method gets the time, in seconds."""

    def arrive(self, outcome: SimulatedRequest, load: BackendLoad, now: float) -> Moves:
        """Handle an arrival; ``load`` is the worker's last report."""

    def look(self, load: BackendLoad, now: float) -> Moves:
        """Decide again: the worker has ended a step, or the time of :meth:`next_change` has come."""

    def first_token(self, outcome: SimulatedRequest, now: float) -> None:
        """Note a request's first token."""

    def finished(self, outcome: SimulatedRequest, now: float) -> None:
        """Note the end of a request's answer."""

    def next_change(self) -> float | None:
        """Return when the clock alone changes something, or ``None``."""

    @property
    def watching(self) -> bool:
        """Return whether :meth:`look` must be called after every step, even when no request ended in it."""


class Open:
    """No admission: all requests go to the engine's own queue."""

    watching = False

    def arrive(self, outcome: SimulatedRequest, load: BackendLoad, now: float) -> Moves:
        """Hand the request on."""
        return Moves(hand_on=(outcome,))

    def look(self, load: BackendLoad, now: float) -> Moves:
        """Do nothing: no request waits here."""
        return NOTHING

    def first_token(self, outcome: SimulatedRequest, now: float) -> None:
        """Ignore the first token."""

    def finished(self, outcome: SimulatedRequest, now: float) -> None:
        """Ignore the end of the answer."""

    def next_change(self) -> float | None:
        """Return ``None``: the clock changes nothing."""
        return None


class EngineBounds(Open):
    """vLLM's own bounds, ``max_num_queued_reqs`` and ``max_num_queued_tokens``, as vLLM 0.32 counts them.

    Args:
        max_requests: requests that are waiting or running; ``None`` for any number.
        max_tokens: prompt tokens of requests without a first token; when they reach it, a request is refused.
            Its own tokens are not counted, but cached ones are. ``None`` for any number.
    """

    def __init__(self, *, max_requests: int | None = None, max_tokens: int | None = None) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._requests = 0
        self._tokens = 0

    def arrive(self, outcome: SimulatedRequest, load: BackendLoad, now: float) -> Moves:
        """Hand on while the engine is within its bounds."""
        if self._max_requests is not None and self._requests + 1 > self._max_requests:
            return Moves(refuse=((outcome, "max_num_queued_reqs"),))
        if self._max_tokens is not None and self._tokens >= self._max_tokens:
            return Moves(refuse=((outcome, "max_num_queued_tokens"),))
        self._requests += 1
        self._tokens += outcome.arrival.prompt
        return Moves(hand_on=(outcome,))

    def first_token(self, outcome: SimulatedRequest, now: float) -> None:
        """Stop counting the request's prompt tokens: its prefill is over."""
        self._tokens -= outcome.arrival.prompt

    def finished(self, outcome: SimulatedRequest, now: float) -> None:
        """Stop counting the request as in flight."""
        self._requests -= 1


STATIC_LIMITS = AdmissionLimits(max_queue=100, max_wait_s=2.0, max_input_tokens=3600, kv_pressure=0.93)


class StaticThresholds(Open):
    """Fixed limits on KV usage, prompt length, queue depth and estimated wait; no request waits here.

    The estimated wait is the number of waiting requests times the mean time of a request at the worker,
    divided by the number of running ones.
    """

    def __init__(self, limits: AdmissionLimits = STATIC_LIMITS) -> None:
        self._limits = limits
        self._mean_s = 0.0

    def arrive(self, outcome: SimulatedRequest, load: BackendLoad, now: float) -> Moves:
        """Hand the request on while every figure is below its threshold."""
        limits = self._limits
        factor = limits.priority_factor if outcome.arrival.priority > 0 else 1.0
        wait_s = load.waiting * self._mean_s / max(1, load.running)
        if load.kv_usage >= limits.kv_pressure:
            reason = "memory_pressure"
        elif limits.max_input_tokens is not None and outcome.arrival.prompt > limits.max_input_tokens:
            reason = "token_budget_exceeded"
        elif load.waiting >= limits.max_queue * factor:
            reason = "queue_full"
        elif limits.max_wait_s is not None and wait_s >= limits.max_wait_s * factor:
            reason = "wait_exceeded"
        else:
            return Moves(hand_on=(outcome,))
        return Moves(refuse=((outcome, reason),))

    def finished(self, outcome: SimulatedRequest, now: float) -> None:
        """Update the mean time of a request at the worker."""
        held_s = now - (now if outcome.handed_on_at is None else outcome.handed_on_at)
        self._mean_s += 0.1 * (held_s - self._mean_s) if self._mean_s else held_s


class GatePolicy:
    """The production gate on the simulator's clock.

    Args:
        limits: its thresholds.
        produced: returns the tokens of an answer so far.
        seed: of the jitter.
    """

    def __init__(
        self,
        limits: AdmissionLimits,
        *,
        produced: Callable[[SimulatedRequest], int],
        seed: int = 0,
    ) -> None:
        self.gate = BackendGate(limits, random=random.Random(seed))
        self._produced = produced
        self._tickets: dict[int, AdmissionTicket] = {}
        self._outcomes: dict[AdmissionTicket, SimulatedRequest] = {}

    def arrive(self, outcome: SimulatedRequest, load: BackendLoad, now: float) -> Moves:
        """Offer the request to the gate."""
        arrival, produced = outcome.arrival, self._produced
        self.gate.report(load, now)
        demand = Demand(
            "worker",
            arrival.tenant,
            arrival.priority,
            arrival.prompt,
            arrival.max_tokens,
            arrived_at=now,
            produced=lambda: produced(outcome),
        )
        offered = self.gate.offer(demand, now)
        if isinstance(offered, Refusal):
            return self._moves(now, ((outcome, offered.reason.value),))
        self._tickets[arrival.number] = offered
        self._outcomes[offered] = outcome
        if offered.shrunk:
            outcome.max_tokens = offered.max_tokens
        return self._moves(now)

    def look(self, load: BackendLoad, now: float) -> Moves:
        """Report the load to the gate, and pump its queue."""
        self.gate.report(load, now)
        return self._moves(now) if self.gate.queued else NOTHING

    def first_token(self, outcome: SimulatedRequest, now: float) -> None:
        """Report the first token to the gate."""
        self.gate.first_token(self._tickets[outcome.arrival.number], now, outcome.cached)

    def finished(self, outcome: SimulatedRequest, now: float) -> None:
        """Release the request's slot."""
        ticket = self._tickets.pop(outcome.arrival.number)
        del self._outcomes[ticket]
        self.gate.release(ticket, SlotOutcome.SUCCEEDED, now, output_tokens=outcome.produced)

    def next_change(self) -> float | None:
        """Return when the clock alone changes something at the gate, or ``None``."""
        return self.gate.queue.next_change() if self.gate.queued else None

    @property
    def watching(self) -> bool:
        """Return whether requests wait: then each step may free capacity."""
        return self.gate.queued > 0

    def _moves(self, now: float, refused: tuple[tuple[SimulatedRequest, str], ...] = ()) -> Moves:
        gone = [*self.gate.displaced(), *self.gate.expired(now)]
        handed_on = self.gate.pump(now)
        gone += self.gate.displaced()
        dropped = []
        for ticket in gone:
            outcome = self._outcomes.pop(ticket)
            del self._tickets[outcome.arrival.number]
            dropped.append((outcome, ticket.refusal.reason.value if ticket.refusal else "gone"))
        return Moves(tuple(self._outcomes[ticket] for ticket in handed_on), (*refused, *dropped))
