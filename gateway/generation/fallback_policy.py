"""Where a request goes after its backend failed it: decisions only, no I/O."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from gateway.routing.revision import DEGRADED, RESPONSE_CACHE
from gateway.routing.route_resume import ResumeRules
from resilience.failures import POLICIES, FailureKind

# Calls that may go on with one answer. Each gave something, or the next would not have been made; an answer
# in more pieces than these meets a fault that does not end.
MAX_SEAMS = 4
# An engine that has come back so often without giving anything comes behind the other legs.
MAX_IN_VAIN = 2

# The engine has to come back before it is asked again, by whatever name.
_AWAY = frozenset({FailureKind.ENGINE_DEAD, FailureKind.CUDA_DRIVER_ERROR})
# The backend said that it wants to be left alone, or that it has nothing for this request.
_NOT_READY = FailureKind.BACKEND_UNAVAILABLE
_LEFT_ALONE = frozenset(
    {
        FailureKind.THROTTLED,
        _NOT_READY,
        FailureKind.ACCESS_DENIED,
        FailureKind.MODEL_NOT_FOUND,
    }
)


@dataclass(frozen=True, slots=True)
class TryBackend:
    """Ask this backend."""

    backend: str


@dataclass(frozen=True, slots=True)
class WaitForRestart:
    """Wait for the primary's engine, at most so long."""

    timeout_s: float


@dataclass(frozen=True, slots=True)
class ServeStored:
    """Give what is kept under this leg: ``response_cache`` or ``degraded``."""

    leg: str


Step = TryBackend | WaitForRestart | ServeStored


@dataclass(frozen=True, slots=True)
class Situation:
    """How things stand when a step is asked for.

    Args:
        able: whether a backend takes work now and can answer, or go on with what there is.
        back_in_s: seconds until the primary's engine is expected back; ``None`` when nobody can tell.
        restarts: whether the primary's engine may come back, and could then go on with what there is.
        committed: whether the caller has a part of the answer.
        in_time: whether the caller said how long he can wait, and the engine is expected back before that.
    """

    able: Callable[[str], bool]
    back_in_s: float | None
    restarts: bool
    committed: bool
    in_time: bool = False


class FallbackPolicy:
    """Says which step comes next, until one of them answers or none is left.

    Args:
        primary: the backend that failed the request, or had no room for it.
        legs: the route's fallback chain; empty when the caller wants no other answer.
        rules: the route's.
        on_engine: backends that share the engine in process.
        in_hand: whether the primary had begun with the request.
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
        self._primary = primary
        self._legs = tuple(leg for leg in legs if leg != primary)
        self._rules = rules
        self._on_engine = on_engine
        self._in_hand = in_hand
        self._passed: set[str] = set()  # not again, unless something changes
        self._shut: set[str] = set()  # never again
        self._anew: set[str] = set()  # asked once more for all of the answer
        self._away = False  # the primary's engine
        self._hurried = False
        self._in_vain = 0  # times that the primary came back and failed at once
        self._patience_s = rules.max_wait_s
        self._tries = 0

    # What happened

    def failed(
        self,
        backend: str,
        kind: FailureKind,
        *,
        moved: bool,
        again: Callable[[], bool] = lambda: False,
        away: bool = False,
    ) -> None:
        """A backend failed.

        Args:
            moved: it moved the answer on before, and could go on with it itself.
            again: whether it may be asked for all of the answer once more, since nobody has seen what it
                gave. Looked at last, for it pays; and not where the guard has retried already.
            away: its state tells that it takes no work now.
        """
        if moved and kind not in _LEFT_ALONE:
            self._passed.discard(backend)
            self._hurried = False
            self._in_vain = 0
        elif self._once_more(backend, kind) and again():
            self._anew.add(backend)
            self._passed.discard(backend)
        else:
            self._passed.add(backend)
        if kind is FailureKind.CUDA_OOM:
            self._shut |= self._beside(backend)
        if kind in _AWAY and backend in self._on_engine:
            self._passed |= self._beside(backend)
        if backend in self._beside(self._primary) and (away or kind in _AWAY or kind is _NOT_READY):
            self._away = True

    def refused(self, backend: str, *, memory: bool) -> None:
        """Admission kept the request from a backend; ``memory``: because its device is full."""
        self._passed.add(backend)
        if memory:
            self._shut |= self._beside(backend)

    def gave_nothing(self, leg: str) -> None:
        """The response cache has no answer."""
        self._passed.add(leg)

    def waited(self, left_s: float, *, back: bool) -> None:
        """The primary was waited for, and is there again or not; ``left_s`` of the wait were not needed."""
        if back:
            self._patience_s += left_s
            self._in_vain += 1
            self._away = self._hurried = False
            self._passed -= self._beside(self._primary)

    # What comes next

    def next(self, view: Situation) -> Step | None:
        """The next step, ``None`` when nothing is left to try. In this order:

        1. The primary at once, when it can go on with what it had begun.
        2. The primary soon, when its engine is expected back within ``wait_s``.
        3. The legs of the chain, as they stand there.
        4. The primary late, for a request that it had in hand or whose caller has the time; and one that came
           back in vain before.
        5. The degraded text.

        The kept texts of 3 and 5 are no continuation: a caller who has a part of an answer is not given them.
        """
        resumes = self._rules.enabled
        most = MAX_SEAMS if view.committed else MAX_SEAMS + len(self._legs)
        if self._tries < most:
            # The last call is for another leg, if one is able: the primary has had the others.
            eager = self._in_vain <= MAX_IN_VAIN and self._tries < most - 1
            there = resumes and self._may(self._primary) and view.able(self._primary)
            if there and eager:
                return self._try(self._primary)
            waits = resumes and self._away and view.restarts and self._primary not in self._shut
            soon = view.back_in_s is not None and view.back_in_s <= self._rules.wait_s
            if waits and soon and eager and not self._hurried and self._patience_s > 0:
                self._hurried = True
                return self._wait(min(self._rules.wait_s, self._patience_s))
            for leg in self._legs:
                if leg == DEGRADED:
                    continue
                if leg == RESPONSE_CACHE:
                    if not view.committed and leg not in self._passed:
                        return ServeStored(leg)
                elif (resumes or not view.committed) and self._may(leg) and view.able(leg):
                    return self._try(leg)
            if there:
                return self._try(self._primary)
            if waits and (self._in_hand or view.in_time) and self._patience_s > 0:
                return self._wait(self._patience_s)
            if waits and soon and not eager and self._patience_s > 0:
                return self._wait(min(self._rules.wait_s, self._patience_s))
        if DEGRADED in self._legs and not view.committed:
            return ServeStored(DEGRADED)
        return None

    def _wait(self, timeout_s: float) -> WaitForRestart:
        self._patience_s -= timeout_s
        return WaitForRestart(timeout_s)

    def _try(self, backend: str) -> TryBackend:
        self._tries += 1
        return TryBackend(backend)

    def _once_more(self, backend: str, kind: FailureKind) -> bool:
        return backend not in self._anew and kind not in _LEFT_ALONE and not POLICIES[kind].retries_same

    def _may(self, backend: str) -> bool:
        return backend not in self._passed and backend not in self._shut

    def _beside(self, backend: str) -> set[str]:
        return set(self._on_engine) if backend in self._on_engine else {backend}
