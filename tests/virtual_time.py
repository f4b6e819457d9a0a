"""An event loop whose time passes only while it waits: times are exact, however busy the machine is."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """A loop that jumps to its next timer when nothing is ready. Only for code that sleeps: no sockets.

    What is meant for a thread runs at once, so that it takes no time.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def block(self, seconds: float) -> None:
        """Let time pass in a callback, as ``time.sleep`` does."""
        self._now += seconds

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def _run_once(self) -> None:
        if not self._ready:  # type: ignore[attr-defined]
            timers = [one.when() for one in self._scheduled if not one.cancelled()]  # type: ignore[attr-defined]
            self._now = max(self._now, min(timers, default=self._now))
        super()._run_once()  # type: ignore[misc]


def in_virtual_time(scenario: Coroutine[Any, Any, T]) -> T:
    """Run the scenario to its end in virtual time and return its result."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(scenario)


def virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Make a test of an async one: it runs in virtual time."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        in_virtual_time(test(*args, **kwargs))

    return run


def loop_time() -> float:
    """A clock for what a test builds: the running loop's time, virtual or real."""
    return asyncio.get_running_loop().time()
