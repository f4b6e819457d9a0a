"""Events of every request, counted together: a pass over many costs far less than a call for each."""

from collections.abc import Callable, Sequence
from typing import TypeVar

E = TypeVar("E")


class Gathered(list[E]):
    """Events that ``count`` takes together, when :meth:`flush` is called."""

    def __init__(self, count: Callable[[Sequence[E]], None]) -> None:
        super().__init__()
        self._count_all = count

    def flush(self) -> None:
        events = self[:]
        self.clear()
        if events:
            self._count_all(events)
