"""Events of every request, counted together: a pass over many costs far less than a call for each."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

# Most events of one kind that wait to be counted. Records of requests take some hundred KB then.
MAX_UNCOUNTED = 256

E = TypeVar("E")


class Gathered(Generic[E]):
    """Takes events and passes them to ``count`` later, at the latest in the next scrape."""

    def __init__(self, count: Callable[[Sequence[E]], None]) -> None:
        self._count = count
        self._events: list[E] = []

    def take(self, event: E) -> None:
        self._events.append(event)
        if len(self._events) >= MAX_UNCOUNTED:
            self.count()

    def count(self) -> None:
        """Count the events taken so far."""
        events, self._events = self._events, []
        if events:
            self._count(events)
