"""An event loop whose time passes only while it waits: times are exact, however busy the machine is."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """A loop that jumps to its next timer when nothing is ready. Only for code that sleeps: no sockets, no threads."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        if not self._ready:  # type: ignore[attr-defined]
            timers = [one.when() for one in self._scheduled if not one.cancelled()]  # type: ignore[attr-defined]
            self._now = max(self._now, min(timers, default=self._now))
        super()._run_once()  # type: ignore[misc]


def in_virtual_time(scenario: Coroutine[Any, Any, T]) -> T:
    """Run the scenario to its end in virtual time and return its result."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(scenario)
