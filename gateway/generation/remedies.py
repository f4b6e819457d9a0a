"""Remedies for later requests after a failure: less load on a backend, a restart of the engine."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from resilience.events import AttemptFailed, LoadScaled, ResilienceEvent
from resilience.failures import POLICIES, FailureKind, HealthEffect
from resilience.oom import LoadFactor
from resilience.supervisor import EngineLost, EngineRestarted, Loss, SupervisorEvent

# The least delay of a timer: it may fire a little early, and is then set again for the remaining time.
LEAST_WAIT_S = 0.05


Cancel = Callable[[], None]


def call_later(delay_s: float, call: Callable[[], None]) -> Cancel:
    """Set a timer of the event loop; return the function that cancels it."""
    return asyncio.get_running_loop().call_later(delay_s, call).cancel


@dataclass(slots=True, eq=False, kw_only=True)
class Remediation:
    """Acts on the events of the retry loop, and passes them on.

    * Out of memory: admission gives the backend less load, and gradually more again.
    * A device failure: the engine is restarted. The supervisor itself notices a dead engine.

    Args:
        gate_of: returns the name of a backend's admission gate, which all backends on an engine share.
        scale: takes the gate's name and its share of the usual load.
        restart: takes a backend on an in-process engine and the reason, and requests a restart; a second
            request before the restart does nothing.
        later: sets a timer.
    """

    gate_of: Callable[[str], str]
    scale: Callable[[str, float], None]
    restart: Callable[[str, str], None]
    clock: Callable[[], float]
    emit: Callable[[ResilienceEvent], None]
    later: Callable[[float, Callable[[], None]], Cancel] = call_later
    # By gate; gates are configured, so their number is bounded.
    _factors: dict[str, LoadFactor] = field(default_factory=dict, init=False)
    _timers: dict[str, Cancel] = field(default_factory=dict, init=False)
    _engines_ran_out: set[str] = field(default_factory=set, init=False)

    def on_event(self, event: ResilienceEvent) -> None:
        """Pass an event on, and act on a failed attempt."""
        self.emit(event)
        if not isinstance(event, AttemptFailed):
            return
        health = POLICIES[event.kind].health
        if health is HealthEffect.SHRINK_LOAD:
            self.ran_out(event.backend)
        elif health is HealthEffect.RESTART_ENGINE and event.kind is not FailureKind.ENGINE_DEAD:
            self.restart(event.backend, event.kind.value)

    def ran_out(self, backend: str) -> None:
        gate = self.gate_of(backend)
        factor = self._factors.setdefault(gate, LoadFactor())
        now = self.clock()
        self._give(gate, factor.at(now), factor.ran_out(now))

    def on_engine(self, event: SupervisorEvent) -> None:
        """Act on an engine's event: an engine that ran out of memory gets less load after its restart."""
        if isinstance(event, EngineLost):
            self._engines_ran_out.discard(event.backend)
            if event.reason is Loss.OUT_OF_MEMORY and event.backend:
                self._engines_ran_out.add(event.backend)
        elif isinstance(event, EngineRestarted) and event.backend in self._engines_ran_out:
            self.ran_out(event.backend)

    def _give(self, gate: str, before: float, after: float) -> None:
        if after != before:
            self.scale(gate, after)
            self.emit(LoadScaled(gate, after, shrunk=after < before))
        if (cancel := self._timers.pop(gate, None)) is not None:
            cancel()
        now = self.clock()
        at = self._factors[gate].next_change(now)
        if at is not None:
            self._timers[gate] = self.later(
                max(LEAST_WAIT_S, at - now),
                lambda: self._give(gate, after, self._factors[gate].at(self.clock())),
            )
