"""Decides when a lost engine is restarted, and when it is given up; sans-I/O.

::

    starting → ready ⇄ suspect → restarting → ready …
                                 restarting → given_up     too many restarts within an hour
    stopped                      from any state, finally

An engine is lost when one of its processes has ended or is stopped by a signal, when it has work and makes no
step, or when its device fails. A first start that fails is no loss, unless the engine was killed: its cause
lies in the configuration.
"""

from collections import deque
from dataclasses import dataclass
from enum import StrEnum

from resilience.heartbeat import NO_PROMPTS, Heartbeat, PromptTokens

# Restarts are counted over an hour.
HOUR_S = 3600.0
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 30.0
# After a longer pause the time of a stop by a signal counts anew: the observer itself was stopped.
LONGEST_GAP_S = 2.0
# A pause between two observations counts at most this much: step reports may wait for the same event loop.
LONGEST_COUNTED_S = 0.5


class SupervisorState(StrEnum):
    """The state of the engine by its supervisor; a label of metrics."""

    STARTING = "starting"
    READY = "ready"
    SUSPECT = "suspect"
    RESTARTING = "restarting"
    GIVEN_UP = "given_up"
    STOPPED = "stopped"


class Loss(StrEnum):
    """Why an engine was lost; a label of metrics."""

    EXITED = "exited"
    OUT_OF_MEMORY = "out_of_memory"
    STOPPED = "stopped"
    NO_PROGRESS = "no_progress"
    DEVICE = "device"
    START_FAILED = "start_failed"


@dataclass(frozen=True, slots=True)
class Observation:
    """The engine at one moment; ``exited``: a process of it has ended; ``stopped``: a signal stopped one.

    ``pending`` are the most prompt tokens that the current step may compute; ``occupied``: the engine
    executes a call other than a generation, such as loading an adapter.
    """

    exited: bool = False
    stopped: bool = False
    unfinished: int = 0
    steps: int = 0
    pending: PromptTokens = NO_PROMPTS
    occupied: bool = False


@dataclass(frozen=True, slots=True)
class EngineLost:
    """The engine takes no work, and its requests have failed; ``backend`` runs on it."""

    reason: Loss
    detail: str
    backend: str = ""


@dataclass(frozen=True, slots=True)
class EngineRestarting:
    """The engine restarts in ``wait_s``, the ``attempt``-th time in an hour.

    As the supervisor's decision it has no ``exit_code`` (negative for a signal), ``detail`` and ``backend``.
    """

    reason: Loss
    attempt: int
    wait_s: float
    exit_code: int | None = None
    detail: str = ""
    backend: str = ""


@dataclass(frozen=True, slots=True)
class EngineRestarted:
    """The engine takes work again, after ``load_s`` of loading, and ``away_s`` after it was lost."""

    attempt: int
    load_s: float
    away_s: float
    backend: str = ""
    total_blocks: int = 0


@dataclass(frozen=True, slots=True)
class EngineGivenUp:
    """The engine is not started again: ``restarts`` within an hour have not helped. An operator must act."""

    reason: Loss
    restarts: int
    exit_code: int | None = None
    detail: str = ""
    backend: str = ""


Decision = EngineRestarting | EngineGivenUp
SupervisorEvent = EngineLost | EngineRestarted | Decision


class Supervisor:
    """Takes observations of one engine and decides about restarts.

    Args:
        max_restarts_per_hour: failed restarts included; 0: a lost engine is not restarted. The first restart
            comes at once, the next ones after waits of 1, 2, 4 … seconds.
        hang_s: longest time of an engine with work without a step, seconds; the engine's own step times lower
            it (:class:`~resilience.heartbeat.Heartbeat`).
        stopped_s: longest time that one of its processes may be stopped by a signal, seconds; a process under
            a debugger is in another state.
    """

    def __init__(self, *, max_restarts_per_hour: int, hang_s: float, stopped_s: float) -> None:
        self._max_restarts_per_hour = max_restarts_per_hour
        self._restarts: deque[float] = deque()  # their times
        self._hang_s = hang_s
        self._stopped_s = stopped_s
        # The state of the engine.
        self.state = SupervisorState.STARTING
        self._load_from: float | None = None
        self._load_s = 0.0
        self._ready_at = 0.0
        self._observed_at: float | None = None
        self._stopped_since: float | None = None
        self._steps = -1
        self._idle_s = 0.0
        # The engine's step times, which the caller reports to it.
        self.heartbeat = Heartbeat(hang_s)

    def restarts_last_hour(self, now: float) -> int:
        while self._restarts and self._restarts[0] <= now - HOUR_S:
            self._restarts.popleft()
        return len(self._restarts)

    def ready_in_s(self, now: float) -> float | None:
        """Seconds until a restart is complete, by the last start's duration; ``None`` without a restart.

        A restart that is late is expected to need as much more time as it is late already.
        """
        return abs(self._ready_at - now) if self.state is SupervisorState.RESTARTING else None

    def load_begun(self, now: float) -> None:
        self._load_from = now
        self._ready_at = now + self._load_s
        self._reset()

    def started(self, now: float) -> None:
        if self.state in (SupervisorState.STARTING, SupervisorState.RESTARTING):
            self.state = SupervisorState.READY
            if self._load_from is not None:
                self._load_s = now - self._load_from
            self._reset()

    def start_failed(self, now: float, *, killed: bool = False) -> Decision | None:
        """Record a failed start; ``None`` when it was no restart, unless the engine was ``killed`` in it."""
        first = killed and self.state is SupervisorState.STARTING
        again = first or self.state is SupervisorState.RESTARTING
        return self._again(now, Loss.START_FAILED) if again else None

    def lost(self, now: float, reason: Loss) -> Decision | None:
        """Record that the engine takes no work; ``None`` when that is known already or intended."""
        running = self.state in (SupervisorState.READY, SupervisorState.SUSPECT)
        return self._again(now, reason) if running else None

    def stop(self) -> None:
        """Record that the engine is being stopped on purpose: from now on nothing is a loss."""
        self.state = SupervisorState.STOPPED

    def observe(self, now: float, observed: Observation) -> Loss | None:
        """Take an observation; returns a loss, if any, on which the caller kills the remaining processes."""
        gap_s = 0.0 if self._observed_at is None else now - self._observed_at
        late = self._observed_at is None or gap_s > LONGEST_GAP_S
        self._observed_at = now
        if observed.exited:
            return Loss.EXITED
        if not observed.stopped or late:
            self._stopped_since = None
        if observed.stopped and self._stopped_since is None:
            self._stopped_since = now
        if not observed.unfinished or observed.steps != self._steps:
            self._steps, self._idle_s = observed.steps, 0.0
        else:
            self._idle_s += min(gap_s, LONGEST_COUNTED_S)
        limit_s = self._hang_s if observed.occupied else self.heartbeat.limit_s(observed.pending)
        if self.state in (SupervisorState.READY, SupervisorState.SUSPECT):
            suspect = observed.stopped or self._idle_s >= limit_s / 2
            self.state = SupervisorState.SUSPECT if suspect else SupervisorState.READY
        if self._stopped_since is not None and now - self._stopped_since >= self._stopped_s:
            return Loss.STOPPED
        return Loss.NO_PROGRESS if self._idle_s >= limit_s else None

    def _again(self, now: float, reason: Loss) -> Decision:
        made = self.restarts_last_hour(now)
        if made >= self._max_restarts_per_hour:
            self.state = SupervisorState.GIVEN_UP
            return EngineGivenUp(reason, made)
        self._restarts.append(now)
        wait_s = min(FIRST_WAIT_S * 2.0 ** (made - 1), LONGEST_WAIT_S) if made else 0.0
        self.state = SupervisorState.RESTARTING
        self._ready_at = now + wait_s + self._load_s
        return EngineRestarting(reason, made + 1, wait_s)

    def _reset(self) -> None:
        self._observed_at = self._stopped_since = None
        self._steps, self._idle_s = -1, 0.0
        self.heartbeat = Heartbeat(self._hang_s)
