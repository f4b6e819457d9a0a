"""What the supervision of the engine in process tells: frozen facts for metrics and logs."""

from __future__ import annotations

from dataclasses import dataclass

from resilience.supervisor import Loss


@dataclass(frozen=True, slots=True)
class EngineLost:
    """The engine takes no more work, and what was under way has failed; ``detail`` tells what was seen."""

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
