"""Decides the next step of a request after its backend failed; sans-I/O.

Each leg (a backend, or a source of stored text) and the primary's engine have a state. ``LEG_TRANSITIONS``
and ``ENGINE_TRANSITIONS`` say how events change it; ``STEPS`` says which steps are tried in which situation.
``docs/resilience.md`` shows the three tables.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType

from resilience.failures import POLICIES, FailureKind
from resilience.resume import ResumeRules

# Legs that serve stored text; every other leg is the name of a backend.
RESPONSE_CACHE = "response_cache"
DEGRADED = "degraded"

# Most calls that resume one answer. Each must produce a part of it before the next is made, so an answer in
# more parts than this is caused by a permanent fault.
MAX_RESUMES = 4
# After more restarts than this without any part of an answer, the legs are asked before the primary.
MAX_FUTILE_RESTARTS = 2

# The engine must restart before any backend on it is asked again.
_ENGINE_LOST = frozenset({FailureKind.ENGINE_DEAD, FailureKind.CUDA_DRIVER_ERROR})
_NOT_READY = FailureKind.BACKEND_UNAVAILABLE
# The backend asks for a pause, or cannot answer this request at all: it is not asked again at once.
_NOT_AGAIN = frozenset(
    {FailureKind.THROTTLED, _NOT_READY, FailureKind.ACCESS_DENIED, FailureKind.MODEL_NOT_FOUND}
)


@dataclass(frozen=True, slots=True)
class TryBackend:
    """Send the request to this backend."""

    backend: str


@dataclass(frozen=True, slots=True)
class WaitForRestart:
    """Wait for the restart of the primary's engine, at most ``timeout_s``."""

    timeout_s: float


@dataclass(frozen=True, slots=True)
class ServeStored:
    """Serve the text that is stored under this leg: ``response_cache`` or ``degraded``."""

    leg: str


Step = TryBackend | WaitForRestart | ServeStored


class Leg(Enum):
    """The state of one leg. A leg may be asked for a whole answer a second time, but only once."""

    OPEN = auto()  # may be asked
    REPEATED = auto()  # may be asked; the second request for a whole answer has been made
    FAILED = auto()  # may be asked again only after a restart of its engine
    SPENT = auto()  # like FAILED; the second request for a whole answer has been made
    CLOSED = auto()  # is never asked again


class LegEvent(Enum):
    """The events that change the state of a leg."""

    MOVED = auto()  # the leg failed, but gave a part of the answer that it can resume
    REPEAT = auto()  # the leg failed, and is asked for a whole answer once more
    FAILED = auto()  # the leg failed, refused, or has no stored answer
    ENGINE_LOST = auto()  # its engine must restart
    OUT_OF_MEMORY = auto()  # the memory of its device is short
    RESTARTED = auto()  # its engine has restarted


# fmt: off
LEG_TRANSITIONS: Mapping[Leg, Mapping[LegEvent, Leg]] = MappingProxyType({
    state: MappingProxyType(dict(zip(LegEvent, row, strict=True)))
    for state, row in {
        #               moved         repeat        failed      engine lost out of memory restarted
        Leg.OPEN:     (Leg.OPEN,     Leg.REPEATED, Leg.FAILED, Leg.FAILED, Leg.CLOSED, Leg.OPEN),
        Leg.REPEATED: (Leg.REPEATED, Leg.SPENT,    Leg.SPENT,  Leg.SPENT,  Leg.CLOSED, Leg.REPEATED),
        Leg.FAILED:   (Leg.OPEN,     Leg.REPEATED, Leg.FAILED, Leg.FAILED, Leg.CLOSED, Leg.OPEN),
        Leg.SPENT:    (Leg.REPEATED, Leg.SPENT,    Leg.SPENT,  Leg.SPENT,  Leg.CLOSED, Leg.REPEATED),
        Leg.CLOSED:   (Leg.CLOSED,) * 6,
    }.items()
})
# fmt: on
_MAY_ASK = frozenset({Leg.OPEN, Leg.REPEATED})
_MAY_REPEAT = frozenset({Leg.OPEN, Leg.FAILED})


class EngineHealth(Enum):
    """The state of the primary's engine, as known from the failures of this request."""

    UP = auto()
    LOST = auto()
    WAITED = auto()  # lost, and the short wait for it has ended


class EngineEvent(Enum):
    """The events that change the state of the primary's engine."""

    LOST = auto()
    SHORT_WAIT = auto()
    PROGRESS = auto()  # a backend gave a part of the answer
    RESTARTED = auto()


# fmt: off
ENGINE_TRANSITIONS: Mapping[EngineHealth, Mapping[EngineEvent, EngineHealth]] = MappingProxyType({
    state: MappingProxyType(dict(zip(EngineEvent, row, strict=True)))
    for state, row in {
        #                     lost                 short wait           progress           restarted
        EngineHealth.UP:     (EngineHealth.LOST,   EngineHealth.UP,     EngineHealth.UP,   EngineHealth.UP),
        EngineHealth.LOST:   (EngineHealth.LOST,   EngineHealth.WAITED, EngineHealth.LOST, EngineHealth.UP),
        EngineHealth.WAITED: (EngineHealth.WAITED, EngineHealth.WAITED, EngineHealth.LOST, EngineHealth.UP),
    }.items()
})
# fmt: on


class Primary(Enum):
    """The expected availability of the primary backend."""

    READY = auto()  # the primary can answer, or resume the answer
    SOON = auto()  # its engine is expected back within a short wait, and none was made yet
    LATE = auto()  # its engine is expected back later or at an unknown time, or the short wait has ended
    GONE = auto()  # its engine is not expected back in time, or the primary may not be asked again


class StepKind(Enum):
    """A kind of step; any kind may be impossible in the situation."""

    PRIMARY = auto()
    SHORT_WAIT = auto()  # at most the route's ``wait_s``, and half of the remaining time
    FALLBACK_TARGETS = auto()  # the first leg of the chain that can answer
    LONG_WAIT = auto()  # if the primary had begun the request, or its deadline leaves enough time


# The steps to try in this order, by the state of the primary, and by whether it is asked before the legs. The
# degraded text follows every row.
STEPS: Mapping[tuple[Primary, bool], tuple[StepKind, ...]] = {
    (Primary.READY, True): (StepKind.PRIMARY,),
    (Primary.READY, False): (StepKind.FALLBACK_TARGETS, StepKind.PRIMARY),
    (Primary.SOON, True): (StepKind.SHORT_WAIT,),
    (Primary.SOON, False): (StepKind.FALLBACK_TARGETS, StepKind.LONG_WAIT, StepKind.SHORT_WAIT),
    (Primary.LATE, True): (StepKind.FALLBACK_TARGETS, StepKind.LONG_WAIT),
    (Primary.LATE, False): (StepKind.FALLBACK_TARGETS, StepKind.LONG_WAIT),
    (Primary.GONE, True): (StepKind.FALLBACK_TARGETS,),
    (Primary.GONE, False): (StepKind.FALLBACK_TARGETS,),
}


@dataclass(frozen=True, slots=True)
class Situation:
    """The facts at the moment in which the next step is chosen.

    Args:
        able: whether a backend takes work, may be called once more, and can answer or resume the answer.
        back_in_s: seconds until the primary's engine is expected back; ``None``: unknown.
        restarts: the primary's engine may come back, and could then answer or resume the answer.
        committed: the caller has already received a part of the answer.
        in_time: the engine is expected back before the request's own deadline.
        left_s: seconds until the request must end.
    """

    able: Callable[[str], bool]
    back_in_s: float | None
    restarts: bool
    committed: bool
    in_time: bool = False
    left_s: float = math.inf


class FallbackPolicy:
    """Chooses the next step, until a step answers or none is left.

    Args:
        primary: the backend that failed, or that admission refused.
        legs: the route's fallback chain; empty when the caller wants no other answer.
        on_engine: the backends that run on the engine in process.
        in_hand: the primary had begun the request.
    """

    def __init__(
        self,
        primary: str,
        legs: Sequence[str],
        rules: ResumeRules,
        *,
        on_engine: Collection[str] = (),
        in_hand: bool,
    ) -> None:
        # The leg that was asked last; its backend may have another name by now.
        self.primary = self.asked = primary
        self._chain = tuple(leg for leg in legs if leg != primary)
        self._rules = rules
        self._on_engine = on_engine
        self._in_hand = in_hand
        self._legs = dict.fromkeys((primary, *self._chain, *on_engine), Leg.OPEN)
        self._engine = EngineHealth.UP
        self._calls = 0
        self._futile_restarts = 0
        self._wait_left_s = rules.max_wait_s

    # What happened

    def failed(
        self,
        backend: str,
        kind: FailureKind,
        *,
        moved: bool,
        may_retry: Callable[[], bool] = lambda: False,
        away: bool = False,
    ) -> None:
        """Record the failure of a backend.

        Args:
            moved: it gave a part of the answer before, and could resume it.
            may_retry: takes one more request for a whole answer from the retry budget, if possible; called
                only if the retry loop does not repeat this kind of failure.
            away: the backend's own state says that it takes no work.
        """
        repeats = kind not in _NOT_AGAIN and not POLICIES[kind].retries_same
        if moved and kind not in _NOT_AGAIN:
            self._on_leg(LegEvent.MOVED, [backend])
            self._on_primary_engine(EngineEvent.PROGRESS)
            self._futile_restarts = 0
        elif repeats and self._legs[backend] in _MAY_REPEAT and may_retry():
            self._on_leg(LegEvent.REPEAT, [backend])
        else:
            self._on_leg(LegEvent.FAILED, [backend])
        if kind is FailureKind.CUDA_OOM:
            self._on_leg(LegEvent.OUT_OF_MEMORY, self._on_same_engine(backend))
        if kind in _ENGINE_LOST and backend in self._on_engine:
            self._on_leg(LegEvent.ENGINE_LOST, self._on_same_engine(backend))
        if backend in self._on_same_engine(self.primary) and (away or kind in _ENGINE_LOST):
            self._on_primary_engine(EngineEvent.LOST)

    def refused(self, leg: str, *, memory: bool = False) -> None:
        """Record that a leg refused, or has no stored answer; ``memory``: the device's memory is short."""
        self._on_leg(LegEvent.FAILED, [leg])
        if memory:
            self._on_leg(LegEvent.OUT_OF_MEMORY, self._on_same_engine(leg))

    def waited(self, left_s: float, *, back: bool) -> None:
        """Record the end of a wait for the primary; ``left_s`` of it were not needed, ``back``: it is up."""
        if back:
            self._wait_left_s += left_s
            self._futile_restarts += 1
            self._on_primary_engine(EngineEvent.RESTARTED)
            self._on_leg(LegEvent.RESTARTED, self._on_same_engine(self.primary))

    # What comes next

    def next(self, view: Situation) -> Step | None:
        """The next step, by ``STEPS``; ``None`` when nothing is left to try.

        A caller who has a part of the answer gets no stored text: it would not continue that part.
        """
        calls_left = MAX_RESUMES + (0 if view.committed else len(self._chain)) - self._calls
        if calls_left > 0:
            # The last call goes to another leg, if one is able: the primary has had the earlier calls.
            primary_first = self._futile_restarts <= MAX_FUTILE_RESTARTS and calls_left > 1
            for choice in STEPS[self._expect(view), primary_first]:
                if (step := self._step(choice, view)) is not None:
                    return step
        if DEGRADED in self._chain and not view.committed:
            return ServeStored(DEGRADED)
        return None

    def _expect(self, view: Situation) -> Primary:
        leg = self._legs[self.primary]
        if not self._rules.enabled or leg is Leg.CLOSED:
            return Primary.GONE
        if leg in _MAY_ASK and view.able(self.primary):
            return Primary.READY
        if self._engine is EngineHealth.UP or not view.restarts or self._wait_left_s <= 0:
            return Primary.GONE
        soon = view.back_in_s is not None and view.back_in_s <= self._short_wait_s(view)
        return Primary.SOON if soon and self._engine is EngineHealth.LOST else Primary.LATE

    def _step(self, choice: StepKind, view: Situation) -> Step | None:
        if choice is StepKind.PRIMARY:
            return self._try(self.primary)
        if choice is StepKind.FALLBACK_TARGETS:
            return self._next_leg(view)
        if choice is StepKind.SHORT_WAIT:
            self._on_primary_engine(EngineEvent.SHORT_WAIT)
            return self._wait(min(self._short_wait_s(view), self._wait_left_s))
        return self._wait(self._wait_left_s) if self._in_hand or view.in_time else None

    def _short_wait_s(self, view: Situation) -> float:
        """The longest short wait: half of the remaining time is kept for the legs."""
        return min(self._rules.wait_s, view.left_s / 2)

    def _next_leg(self, view: Situation) -> Step | None:
        for leg in self._chain:
            if leg == DEGRADED or self._legs[leg] not in _MAY_ASK:
                continue
            if leg == RESPONSE_CACHE:
                if not view.committed:
                    return ServeStored(leg)
            elif (self._rules.enabled or not view.committed) and view.able(leg):
                return self._try(leg)
        return None

    def _wait(self, timeout_s: float) -> WaitForRestart:
        self._wait_left_s -= timeout_s
        return WaitForRestart(timeout_s)

    def _try(self, backend: str) -> TryBackend:
        self._calls += 1
        self.asked = backend
        return TryBackend(backend)

    def _on_leg(self, event: LegEvent, legs: Iterable[str]) -> None:
        for leg in legs:
            self._legs[leg] = LEG_TRANSITIONS[self._legs[leg]][event]

    def _on_primary_engine(self, event: EngineEvent) -> None:
        self._engine = ENGINE_TRANSITIONS[self._engine][event]

    def _on_same_engine(self, backend: str) -> Collection[str]:
        return self._on_engine if backend in self._on_engine else (backend,)
