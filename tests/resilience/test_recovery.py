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
    """A timer that fires when the clock of the rig reaches ``at``."""

    at: float
    call: Callable[[], None]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class RecoveryRig:
    """A Remediation with a clock that is set by hand, and everything that it asked for."""

    now: float = 1000.0
    scaled: list[tuple[str, float]] = field(default_factory=list)
    restarted: list[tuple[str, str]] = field(default_factory=list)
    emitted: list[ResilienceEvent] = field(default_factory=list)
    timers: list[Timer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.recovery = Remediation(
            gate_of=lambda backend: GATES[backend],
            scale=lambda gate, factor: self.scaled.append((gate, factor)),
            restart=lambda backend, reason: self.restarted.append((backend, reason)),
            clock=lambda: self.now,
            later=self._later,
            emit=self.emitted.append,
        )

    def _later(self, delay_s: float, call: Callable[[], None]) -> Callable[[], None]:
        self.timers.append(Timer(self.now + delay_s, call))
        return self.timers[-1].cancel

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
    rig = RecoveryRig()
    events: list[ResilienceEvent] = [
        Retried("local", FailureKind.TIMEOUT),
        AttemptFailed("local", FailureKind.TIMEOUT, 2, False, "X"),
    ]
    for event in events:
        rig.recovery.on_event(event)
    assert rig.emitted == events
    assert (rig.scaled, rig.restarted, rig.timers) == ([], [], [])


def test_memory_that_ran_out_lowers_the_load_and_calm_brings_it_back() -> None:
    rig = RecoveryRig()
    for _ in range(8):
        rig.fail(FailureKind.CUDA_OOM)  # a batch fails together
    assert rig.scaled == [("local", 0.7)]
    rig.pass_s(10.5)
    assert [factor for _, factor in rig.scaled[1:]] == pytest.approx([0.75])
    rig.pass_s(60.0)
    assert rig.scaled[-1] == ("local", 1.0)
    assert rig.waiting == []
    factors = [event.factor for event in rig.emitted if isinstance(event, LoadScaled)]
    assert factors == [factor for _, factor in rig.scaled]
    shrunk = [event.shrunk for event in rig.emitted if isinstance(event, LoadScaled)]
    assert shrunk == [True] + [False] * 6


def test_backends_on_one_engine_are_lowered_together_and_others_left_alone() -> None:
    rig = RecoveryRig()
    rig.fail(FailureKind.CUDA_OOM, "tuned")
    rig.now += 5.0
    rig.fail(FailureKind.CUDA_OOM, "local")
    rig.fail(FailureKind.CUDA_OOM, "pool")
    assert rig.scaled == [("local", 0.7), ("local", pytest.approx(0.49)), ("pool", 0.7)]
    assert len(rig.waiting) == 2


@given(gaps=st.lists(st.floats(0, 40), max_size=30))
def test_the_load_stays_within_bounds_one_timer_runs_and_all_comes_back(gaps: list[float]) -> None:
    rig = RecoveryRig()
    for gap in gaps:
        rig.pass_s(gap)
        rig.fail(FailureKind.CUDA_OOM)
        assert len(rig.waiting) == 1
    assert all(LEAST <= factor <= 1.0 for _, factor in rig.scaled)
    rig.pass_s(160.0)
    assert rig.waiting == []
    assert not rig.scaled or rig.scaled[-1][1] == 1.0


def test_a_device_error_restarts_the_engine_and_a_dead_one_is_left_to_its_supervisor() -> None:
    rig = RecoveryRig()
    rig.fail(FailureKind.CUDA_DRIVER_ERROR, "tuned")
    rig.fail(FailureKind.ENGINE_DEAD)
    rig.fail(FailureKind.STREAM_BROKEN)
    assert rig.restarted == [("tuned", "cuda_driver_error")]


def test_admission_takes_the_lowered_load() -> None:
    admission = AdmissionController(
        AdmissionLimits(),
        load=lambda backend: None,
        clock=lambda: rig.now,
        emit=lambda event: None,
        random=random.Random(1),
        engine_of={"local": "local", "tuned": "local"},
    )
    rig = RecoveryRig()
    rig.recovery = Remediation(
        gate_of=admission.gate_name,
        scale=admission.scale,
        restart=lambda backend, reason: None,
        clock=lambda: rig.now,
        later=rig._later,
        emit=rig.emitted.append,
    )
    before = admission.gate("local").work.capacity(rig.now)
    rig.fail(FailureKind.CUDA_OOM, "tuned")
    lowered = admission.gate("local").work.capacity(rig.now)
    assert lowered == int(before * 0.7)
    rig.pass_s(61.0)
    assert admission.gate("local").work.capacity(rig.now) == before


def test_an_engine_that_died_for_want_of_memory_restarts_with_less_load() -> None:
    rig = RecoveryRig()
    rig.recovery.on_engine(EngineLost(Loss.OUT_OF_MEMORY, "", "local"))
    assert rig.scaled == [], "a dead engine has no load"
    rig.recovery.on_engine(EngineRestarted(1, 2.0, 3.0, "local"))
    assert rig.scaled == [(GATES["local"], pytest.approx(0.7))]
    rig.pass_s(61.0)
    assert rig.scaled[-1] == (GATES["local"], 1.0)


def test_an_engine_that_died_otherwise_restarts_with_all_its_load() -> None:
    rig = RecoveryRig()
    for reason in (Loss.OUT_OF_MEMORY, Loss.EXITED):
        rig.recovery.on_engine(EngineLost(reason, "", "local"))
    rig.recovery.on_engine(EngineRestarted(1, 2.0, 3.0, "local"))
    assert rig.scaled == []
