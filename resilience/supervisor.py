"""When a lost engine is started again, and when not any more: decisions alone, no process and no clock.

::

    starting → ready ⇄ suspect → restarting → ready …
                                 restarting → given_up     too many restarts within an hour
    stopped                      from anywhere, for good

An engine is lost when one of its processes has ended, stands still by a signal, when it has work and makes no
step, or when its device fails under it. A first start that fails is no loss: its cause lies in the
configuration.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum

# Restarts are counted over an hour.
HOUR_S = 3600.0
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 30.0
# After a longer pause between two looks it was the watcher that stood still, and what it sees is old.
LONGEST_GAP_S = 2.0


class SupervisorState(StrEnum):
    """Where the engine stands in its supervisor's eyes; a label of metrics."""

    STARTING = "starting"
    READY = "ready"
    SUSPECT = "suspect"
    RESTARTING = "restarting"
    GIVEN_UP = "given_up"
    STOPPED = "stopped"


class Loss(StrEnum):
    """Why an engine was lost; a label of metrics."""

    EXITED = "exited"
    STOPPED = "stopped"
    NO_PROGRESS = "no_progress"
    DEVICE = "device"
    START_FAILED = "start_failed"


@dataclass(frozen=True, slots=True)
class Sighting:
    """What a look at the engine found.

    Args:
        gone: one of its processes has ended.
        stopped: one of them stands still by a signal.
        unfinished: sequences that it was given and has not ended.
        steps: steps that it has told of since its start.
    """

    gone: bool = False
    stopped: bool = False
    unfinished: int = 0
    steps: int = 0


@dataclass(frozen=True, slots=True)
class Restart:
    """Start it again in ``wait_s``; ``attempt`` counts the restarts of the last hour, this one included."""

    reason: Loss
    attempt: int
    wait_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Leave it: ``restarts`` within the last hour have not helped."""

    reason: Loss
    restarts: int


@dataclass(frozen=True, slots=True)
class EngineLost:
    """The engine takes no more work, and what was under way has failed; ``detail`` says what was observed."""

    reason: Loss
    detail: str


@dataclass(frozen=True, slots=True)
class EngineRestarting:
    """It is started again in ``wait_s``, the ``attempt``-th time within an hour.

    ``exit_code`` is of the process that ended, negative for a signal; ``None`` when it is not known.
    """

    reason: Loss
    attempt: int
    wait_s: float
    exit_code: int | None
    detail: str


@dataclass(frozen=True, slots=True)
class EngineRestarted:
    """It takes work again: ``load_s`` to load, ``away_s`` since it was lost."""

    attempt: int
    load_s: float
    away_s: float


@dataclass(frozen=True, slots=True)
class EngineGivenUp:
    """It is not started again: ``restarts`` within an hour have not helped. An operator must look at it."""

    reason: Loss
    restarts: int
    exit_code: int | None
    detail: str


SupervisorEvent = EngineLost | EngineRestarting | EngineRestarted | EngineGivenUp


class RestartPolicy:
    """At most so many restarts in any hour, each after a longer wait: 0, 1, 2, 4 … seconds.

    Args:
        max_per_hour: restarts, the failed ones counted.
    """

    def __init__(self, max_per_hour: int) -> None:
        self._max_per_hour = max_per_hour
        self._restarts: deque[float] = deque(maxlen=max_per_hour)

    def ask(self, now: float) -> float | None:
        """Count one more restart and tell the wait before it, seconds; ``None`` when there is none left."""
        made = self.in_last_hour(now)
        if made >= self._max_per_hour:
            return None
        self._restarts.append(now)
        return min(FIRST_WAIT_S * 2.0 ** (made - 1), LONGEST_WAIT_S) if made else 0.0

    def in_last_hour(self, now: float) -> int:
        """Restarts of the last hour."""
        while self._restarts and self._restarts[0] <= now - HOUR_S:
            self._restarts.popleft()
        return len(self._restarts)


class Supervisor:
    """Takes what happens to one engine and tells what to do about it.

    Args:
        max_restarts_per_hour: 0: a lost engine stays lost.
        hang_s: longest that an engine with work may go without a step, seconds.
        stopped_s: longest that one of its processes may stand still by a signal. What a debugger holds shows
            another state and is left alone.
    """

    def __init__(self, *, max_restarts_per_hour: int, hang_s: float, stopped_s: float) -> None:
        self._policy = RestartPolicy(max_restarts_per_hour)
        self._hang_s = hang_s
        self._stopped_s = stopped_s
        self._standing = SupervisorState.STARTING
        self._load_from: float | None = None
        self._load_s = 0.0
        self._ready_at = 0.0
        self._looked_at: float | None = None
        self._stopped_since: float | None = None
        self._steps = -1
        self._progress_at = 0.0

    @property
    def standing(self) -> SupervisorState:
        """Where the engine stands."""
        return self._standing

    def restarts_last_hour(self, now: float) -> int:
        """Restarts of the last hour, the failed ones counted."""
        return self._policy.in_last_hour(now)

    def ready_in_s(self, now: float) -> float | None:
        """Seconds until a restart is through, by the time that the last start took; ``None`` without one.

        One that takes longer is expected to take once more what it is late.
        """
        if self._standing is not SupervisorState.RESTARTING:
            return None
        return abs(self._ready_at - now)

    def begun(self, now: float) -> None:
        """A start begins to load."""
        self._load_from = now
        self._ready_at = now + self._load_s
        self._forget()

    def started(self, now: float) -> None:
        """It takes work."""
        if self._standing in (SupervisorState.STARTING, SupervisorState.RESTARTING):
            self._standing = SupervisorState.READY
            if self._load_from is not None:
                self._load_s = now - self._load_from
            self._forget()

    def start_failed(self, now: float) -> Restart | GiveUp | None:
        """A restart has failed; ``None`` when it was no restart, or nobody wants it any more."""
        return self._again(now, Loss.START_FAILED) if self._standing is SupervisorState.RESTARTING else None

    def lost(self, now: float, reason: Loss) -> Restart | GiveUp | None:
        """An engine that took work does so no more; ``None`` when that is known already or is meant."""
        return (
            self._again(now, reason)
            if self._standing in (SupervisorState.READY, SupervisorState.SUSPECT)
            else None
        )

    def stop(self) -> None:
        """It is to be ended: whatever happens now is no loss."""
        self._standing = SupervisorState.STOPPED

    def looked(self, now: float, seen: Sighting) -> Loss | None:
        """Judge a look at it; names the loss when there is one, and the caller then kills what is left."""
        late = self._looked_at is None or now - self._looked_at > LONGEST_GAP_S
        self._looked_at = now
        if seen.gone:
            return Loss.EXITED
        if not seen.stopped or late:
            self._stopped_since = None
        if seen.stopped and self._stopped_since is None:
            self._stopped_since = now
        if late or not seen.unfinished or seen.steps != self._steps:
            self._steps, self._progress_at = seen.steps, now
        still_s = now - self._progress_at
        if self._standing in (SupervisorState.READY, SupervisorState.SUSPECT):
            suspect = seen.stopped or still_s >= self._hang_s / 2
            self._standing = SupervisorState.SUSPECT if suspect else SupervisorState.READY
        if self._stopped_since is not None and now - self._stopped_since >= self._stopped_s:
            return Loss.STOPPED
        return Loss.NO_PROGRESS if still_s >= self._hang_s else None

    def _again(self, now: float, reason: Loss) -> Restart | GiveUp:
        wait_s = self._policy.ask(now)
        made = self._policy.in_last_hour(now)
        if wait_s is None:
            self._standing = SupervisorState.GIVEN_UP
            return GiveUp(reason, made)
        self._standing = SupervisorState.RESTARTING
        self._ready_at = now + wait_s + self._load_s
        return Restart(reason, made, wait_s)

    def _forget(self) -> None:
        """What was seen of the one before says nothing of this one."""
        self._looked_at = self._stopped_since = None
        self._steps = -1
