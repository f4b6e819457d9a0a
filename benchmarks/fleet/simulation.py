"""The event loop of the fleet: arrivals at gateways, scrapes, ends of workers' steps, and gates' timers."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from admission.values import AdmissionLimits
from benchmarks.fleet.front import Front
from evaluation.simulator.values import Arrival, Profile, SimulatedRequest
from evaluation.simulator.worker import SimulatedWorker, StepEnd
from gateway.backends.workers.load import WorkerFigures

# Kinds of events, in the order in which simultaneous ones are handled.
_STEP, _SCRAPE, _TIMER, _SAMPLE = range(4)
SAMPLE_S = 1.0


@dataclass(frozen=True, slots=True)
class Plan:
    """The settings of one fleet.

    Args:
        workers: how many.
        gateways: number of gateway processes; each request goes to one of them at random.
        interval_s: seconds between two scrapes of a worker by one gateway.
        affinity: when off, load alone decides.
        whole_up_to: size of a pool up to which every worker is examined for each request.
        limits: those of each gateway's gate.
        seed: of all random choices.
    """

    workers: int
    gateways: int
    interval_s: float
    affinity: bool
    whole_up_to: int
    limits: AdmissionLimits
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of every request; the gateways; requests on each worker, once a second."""

    outcomes: Sequence[SimulatedRequest]
    fronts: Sequence[Front]
    samples: Sequence[tuple[int, ...]]


class Simulation:
    """One run of a fleet."""

    def __init__(self, plan: Plan, profile: Profile, arrivals: Sequence[Arrival]) -> None:
        self._plan = plan
        self._draw = random.Random(plan.seed)
        self._workers = [SimulatedWorker(profile) for _ in range(plan.workers)]
        self._ends: list[StepEnd | None] = [None] * plan.workers
        self._inside = [0] * plan.workers
        self._outcomes = [SimulatedRequest(arrival) for arrival in arrivals]
        # For each request: its gateway, and its worker once it is placed.
        self._front_of = [self._draw.randrange(plan.gateways) for _ in arrivals]
        self._worker_of = [-1] * len(arrivals)
        self._fronts = [
            Front(
                plan.workers,
                plan.limits,
                interval_s=plan.interval_s,
                max_running=profile.max_num_seqs,
                affinity=plan.affinity,
                whole_up_to=plan.whole_up_to,
                produced=self._produced,
                seed=self._draw.randrange(1 << 30),
            )
            for _ in range(plan.gateways)
        ]
        self._timers = [math.inf] * plan.gateways
        self._events: list[tuple[float, int, int, int]] = []
        self._samples: list[tuple[int, ...]] = []
        self._busy = 0  # workers in a step

    def run(self, progress: Callable[[int], None] = lambda _: None) -> Result:
        """Run until every request has its outcome."""
        plan, outcomes, events = self._plan, self._outcomes, self._events
        last = outcomes[-1].arrival.at if outcomes else 0.0
        for front in range(plan.gateways):
            for worker in range(plan.workers):
                at = self._draw.random() * plan.interval_s
                events.append((at, _SCRAPE, front, worker))
        events.append((SAMPLE_S, _SAMPLE, 0, 0))
        heapq.heapify(events)
        following = 0
        while following < len(outcomes) or self._busy or any(front.gate.queued for front in self._fronts):
            arrives_at = outcomes[following].arrival.at if following < len(outcomes) else math.inf
            if events[0][0] > arrives_at:
                self._arrive(outcomes[following], arrives_at)
                following += 1
                progress(following)
                continue
            now, kind, number, worker = heapq.heappop(events)
            if kind == _STEP:
                self._end_step(number, now)
            elif kind == _SCRAPE:
                seen = self._fronts[number].seen[worker]
                seen.load.scraped(WorkerFigures(self._workers[worker].load), now)
                heapq.heappush(events, (now + plan.interval_s, _SCRAPE, number, worker))
            elif kind == _TIMER:
                if self._timers[number] == now:
                    self._timers[number] = math.inf
                    self._act(number, self._fronts[number].look(now), now)
            else:
                if now <= last:
                    self._samples.append(tuple(self._inside))
                heapq.heappush(events, (now + SAMPLE_S, _SAMPLE, 0, 0))
        return Result(outcomes, self._fronts, self._samples)

    def _produced(self, outcome: SimulatedRequest) -> int:
        return self._workers[self._worker_of[outcome.arrival.number]].produced(outcome)

    def _arrive(self, outcome: SimulatedRequest, now: float) -> None:
        number = self._front_of[outcome.arrival.number]
        self._act(number, self._fronts[number].arrive(outcome, now), now)

    def _end_step(self, number: int, now: float) -> None:
        end, self._ends[number] = self._ends[number], None
        if end is None:
            raise AssertionError("a step ended that had not begun")
        self._busy -= 1
        self._workers[number].settle()
        self._inside[number] -= len(end.finished)
        for outcome in end.first:
            front = self._front_of[outcome.arrival.number]
            self._act(front, self._fronts[front].first_token(outcome, now), now)
        for outcome in end.finished:
            front = self._front_of[outcome.arrival.number]
            self._act(front, self._fronts[front].finished(outcome, now), now)
        self._begin(number, now)

    def _act(self, front: int, handed_on: Sequence[tuple[SimulatedRequest, int]], now: float) -> None:
        for outcome, worker in handed_on:
            self._worker_of[outcome.arrival.number] = worker
            self._inside[worker] += 1
            self._workers[worker].submit(outcome)
            self._begin(worker, now)
        change = self._fronts[front].next_change()
        if change is not None and change < self._timers[front]:
            self._timers[front] = max(change, now)
            heapq.heappush(self._events, (self._timers[front], _TIMER, front, 0))

    def _begin(self, number: int, now: float) -> None:
        worker = self._workers[number]
        if self._ends[number] is None and worker.busy:
            # A worker runs one step at a time: requests that arrive during a step join the next one.
            self._ends[number] = end = worker.advance(now, now)
            self._busy += 1
            heapq.heappush(self._events, (end.at, _STEP, number, 0))
