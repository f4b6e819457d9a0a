"""What failures mean for later requests: less load after out of memory, another engine after a device error."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from admission.controller import AdmissionController
from admission.values import AdmissionLimits
from gateway.generation.remedies import Remediation
from resilience.events import AttemptFailed, LoadScaled, ResilienceEvent, Retried
from resilience.failures import FailureKind
from resilience.oom import LEAST
from resilience.supervisor import EngineLost, EngineRestarted, Loss

GATES = {"local": "local", "tuned": "local", "pool": "pool"}


@dataclass
class Timer:
    """A timer that fires when the clock of the bench reaches ``at``."""

    at: float
    call: Callable[[], None]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class Bench:
    """A Remediation with a clock that is set by hand, and everything that it asked for."""

    now: float = 1000.0
    scaled: list[tuple[str, float]] = field(default_factory=list)
    restarted: list[tuple[str, str]] = field(default_factory=list)
    told: list[ResilienceEvent] = field(default_factory=list)
    timers: list[Timer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.recovery = Remediation(
            gate_of=lambda backend: GATES[backend],
            scale=lambda gate, factor: self.scaled.append((gate, factor)),
            restart=lambda backend, reason: self.restarted.append((backend, reason)),
            clock=lambda: self.now,
            later=self._later,
            emit=self.told.append,
        )

    def _later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        self.timers.append(Timer(self.now + delay_s, call))
        return self.timers[-1]

    def fail(self, kind: FailureKind, backend: str = "local") -> None:
        self.recovery.on_event(AttemptFailed(backend, kind, 1, False, "X"))

    @property
    def waiting(self) -> list[Timer]:
        return [timer for timer in self.timers if not timer.cancelled]

    def pass_s(self, seconds: float) -> None:
        until = self.now + seconds
        while due := [timer for timer in self.waiting if timer.at <= until]:
            first = min(due, key=lambda timer: timer.at)
            self.now = max(self.now, first.at)
            self.timers.remove(first)
            first.call()
        self.now = until


def test_every_event_is_passed_on() -> None:
    bench = Bench()
    events: list[ResilienceEvent] = [
        Retried("local", FailureKind.TIMEOUT, 1, 1.0),
        AttemptFailed("local", FailureKind.TIMEOUT, 2, False, "X"),
    ]
    for event in events:
        bench.recovery.on_event(event)
    assert bench.told == events
    assert (bench.scaled, bench.restarted, bench.timers) == ([], [], [])


def test_memory_that_ran_out_lowers_the_load_and_calm_brings_it_back() -> None:
    bench = Bench()
    for _ in range(8):
        bench.fail(FailureKind.CUDA_OOM)  # a batch fails together
    assert bench.scaled == [("local", 0.7)]
    bench.pass_s(10.5)
    assert [factor for _, factor in bench.scaled[1:]] == pytest.approx([0.75])
    bench.pass_s(60.0)
    assert bench.scaled[-1] == ("local", 1.0)
    assert bench.waiting == []
    factors = [event.factor for event in bench.told if isinstance(event, LoadScaled)]
    assert factors == [factor for _, factor in bench.scaled]
    shrunk = [event.shrunk for event in bench.told if isinstance(event, LoadScaled)]
    assert shrunk == [True] + [False] * 6


def test_backends_on_one_engine_are_lowered_together_and_others_left_alone() -> None:
    bench = Bench()
    bench.fail(FailureKind.CUDA_OOM, "tuned")
    bench.now += 5.0
    bench.fail(FailureKind.CUDA_OOM, "local")
    bench.fail(FailureKind.CUDA_OOM, "pool")
    assert bench.scaled == [("local", 0.7), ("local", pytest.approx(0.49)), ("pool", 0.7)]
    assert len(bench.waiting) == 2


@given(gaps=st.lists(st.floats(0, 40), max_size=30))
def test_the_load_stays_within_bounds_one_timer_runs_and_all_comes_back(gaps: list[float]) -> None:
    bench = Bench()
    for gap in gaps:
        bench.pass_s(gap)
        bench.fail(FailureKind.CUDA_OOM)
        assert len(bench.waiting) == 1
    assert all(LEAST <= factor <= 1.0 for _, factor in bench.scaled)
    bench.pass_s(160.0)
    assert bench.waiting == []
    assert not bench.scaled or bench.scaled[-1][1] == 1.0


def test_a_device_error_restarts_the_engine_and_a_dead_one_is_left_to_its_supervisor() -> None:
    bench = Bench()
    bench.fail(FailureKind.CUDA_DRIVER_ERROR, "tuned")
    bench.fail(FailureKind.ENGINE_DEAD)
    bench.fail(FailureKind.STREAM_BROKEN)
    assert bench.restarted == [("tuned", "cuda_driver_error")]


def test_admission_takes_the_lowered_load() -> None:
    admission = AdmissionController(
        AdmissionLimits(),
        load=lambda backend: None,
        clock=lambda: bench.now,
        emit=lambda event: None,
        random=random.Random(1),
        engine_of={"local": "local", "tuned": "local"},
    )
    bench = Bench()
    bench.recovery = Remediation(
        gate_of=admission.gate_name,
        scale=admission.scale,
        restart=lambda backend, reason: None,
        clock=lambda: bench.now,
        later=bench._later,
        emit=bench.told.append,
    )
    before = admission.gate("local").work.capacity(bench.now)
    bench.fail(FailureKind.CUDA_OOM, "tuned")
    lowered = admission.gate("local").work.capacity(bench.now)
    assert lowered == int(before * 0.7)
    bench.pass_s(61.0)
    assert admission.gate("local").work.capacity(bench.now) == before


def test_an_engine_that_died_for_want_of_memory_restarts_with_less_load() -> None:
    bench = Bench()
    bench.recovery.on_engine(EngineLost(Loss.OUT_OF_MEMORY, "", "local"))
    assert bench.scaled == [], "a dead engine has no load"
    bench.recovery.on_engine(EngineRestarted(1, 2.0, 3.0, "local"))
    assert bench.scaled == [(GATES["local"], pytest.approx(0.7))]
    bench.pass_s(61.0)
    assert bench.scaled[-1] == (GATES["local"], 1.0)


def test_an_engine_that_died_otherwise_restarts_with_all_its_load() -> None:
    bench = Bench()
    for reason in (Loss.OUT_OF_MEMORY, Loss.EXITED):
        bench.recovery.on_engine(EngineLost(reason, "", "local"))
    bench.recovery.on_engine(EngineRestarted(1, 2.0, 3.0, "local"))
    assert bench.scaled == []
