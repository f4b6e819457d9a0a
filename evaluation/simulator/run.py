"""Runs a trace against a simulated worker behind a policy."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from evaluation.simulator.policies import Moves, Policy
from evaluation.simulator.values import Arrival, Profile, SimulatedRequest
from evaluation.simulator.worker import SimulatedWorker, StepEnd

PolicyMaker = Callable[[SimulatedWorker], Policy]
_STEP_END, _TIMER = 0, 1  # kinds of events: ends of steps are handled before timers


@dataclass(slots=True)
class _Station:
    """A worker, its policy, the end of its current step, and the time of its policy's timer."""

    worker: SimulatedWorker
    policy: Policy
    end: StepEnd | None = None
    timer: float = math.inf


def simulate(
    arrivals: Sequence[Arrival], profile: Profile, make_policy: PolicyMaker
) -> list[SimulatedRequest]:
    """Return the outcome of every request, in order of arrival.

    Args:
        arrivals: by time.
        make_policy: makes the admission policy of the worker.

    Raises:
        ValueError: a request does not fit into the pool even when it is alone.
    """
    worker = SimulatedWorker(profile)
    station = _Station(worker, make_policy(worker))
    outcomes = [SimulatedRequest(arrival) for arrival in arrivals]
    for outcome in outcomes:
        _must_fit(outcome, profile)
    events: list[tuple[float, int]] = []  # time, kind
    following, now = 0, 0.0
    while following < len(outcomes) or events:
        arrives_at = outcomes[following].arrival.at if following < len(outcomes) else math.inf
        if events and events[0][0] <= arrives_at:
            now, kind = heapq.heappop(events)
            if kind == _STEP_END:
                _end_step(station, now)
            elif station.timer != now:
                continue  # the timer was set again since
            else:
                station.timer = math.inf
            moves = station.policy.look(worker.load, now)
        else:
            now, outcome = arrives_at, outcomes[following]
            following += 1
            moves = station.policy.arrive(outcome, worker.load, now)
        _act(worker, moves, now)
        coming = outcomes[following].arrival.at if following < len(outcomes) else math.inf
        _schedule(station, now, coming, events)
    return outcomes


def _schedule(station: _Station, now: float, coming: float, events: list[tuple[float, int]]) -> None:
    """Set the policy's timer, and begin the next step when the worker is free."""
    change = station.policy.next_change()
    if change is not None and change < station.timer:
        station.timer = max(change, now)
        heapq.heappush(events, (station.timer, _TIMER))
    if station.end is None and station.worker.busy:
        horizon = now if station.policy.watching else min(coming, station.timer)
        station.end = station.worker.advance(now, horizon)
        heapq.heappush(events, (station.end.at, _STEP_END))


def _end_step(station: _Station, now: float) -> None:
    end, station.end = station.end, None
    if end is None:
        raise AssertionError("a step ended that had not begun")
    station.worker.settle()
    for outcome in end.first:
        station.policy.first_token(outcome, now)
    for outcome in end.finished:
        station.policy.finished(outcome, now)


def _act(worker: SimulatedWorker, moves: Moves, now: float) -> None:
    for outcome, reason in moves.refuse:
        outcome.refused_at, outcome.reason = now, reason
    for outcome in moves.hand_on:
        outcome.handed_on_at = now
        worker.submit(outcome)


def _must_fit(outcome: SimulatedRequest, profile: Profile) -> None:
    most = outcome.arrival.prompt + outcome.arrival.output + profile.block_size
    if most > profile.total_blocks * profile.block_size:
        raise ValueError(
            f"request {outcome.arrival.number} needs {most} tokens; the pool of {profile.name} holds "
            f"{profile.total_blocks * profile.block_size}"
        )
