"""What every state store has: listeners to streams, and whether the store is reached."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import structlog

from gateway.state.errors import StateUnavailable


class WatchedStore(ABC):
    """Calls listeners by stream; logs once when the store is unreachable, and once when it is back.

    Args:
        shown: the store's url without its password.
        unix_time: seconds since 1970.
        poll_s: longest time between two calls of a listener.
    """

    def __init__(self, shown: str, unix_time: Callable[[], float], poll_s: float) -> None:
        self._shown = shown
        self._unix_time = unix_time
        self._poll_s = poll_s
        # Listeners are registered at the start, so their number is bounded by the code.
        self._listeners: dict[str, list[Callable[[int], None]]] = {}
        self._log = structlog.get_logger("state")
        self._away = False
        self.healthy = False

    async def open(self) -> None:
        """Prepare, if the store can be reached now."""
        with contextlib.suppress(StateUnavailable):
            await self.heads()

    @abstractmethod
    async def heads(self) -> Mapping[str, int]:
        """The last number of each stream."""

    def listen(self, stream: str, listener: Callable[[int], None]) -> None:
        """Call ``listener`` while ``run`` runs."""
        self._listeners.setdefault(stream, []).append(listener)

    def _notify(self, stream: str, number: int) -> None:
        for listener in self._listeners.get(stream, ()):
            listener(number)

    def _notify_all(self, heads: Mapping[str, int]) -> None:
        """0 stands for a stream that does not exist."""
        for stream in self._listeners:
            self._notify(stream, heads.get(stream, 0))

    def _reached(self) -> None:
        if self._away:
            self._log.info("state store is back", store=self._shown)
        self._away, self.healthy = False, True

    def _failed(self, operation: str, reason: str) -> None:
        if not self._away:
            self._log.warning(
                "state store is away; serving goes on with the last good state, changes are refused",
                store=self._shown,
                operation=operation,
                reason=reason,
            )
        self._away, self.healthy = True, False
