"""Listeners to streams, and whether the store is reached: the same for every store."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import structlog


class Listeners:
    """Callbacks by stream; registered at the start, so their number is bounded by the code."""

    def __init__(self) -> None:
        self._by_stream: dict[str, list[Callable[[int], None]]] = {}

    def listen(self, stream: str, listener: Callable[[int], None]) -> None:
        """Call ``listener`` from now on."""
        self._by_stream.setdefault(stream, []).append(listener)

    def notify(self, stream: str, number: int) -> None:
        """Call the listeners of ``stream``."""
        for listener in self._by_stream.get(stream, ()):
            listener(number)

    def notify_all(self, heads: Mapping[str, int]) -> None:
        """Call every listener; 0 stands for a stream that does not exist."""
        for stream in self._by_stream:
            self.notify(stream, heads.get(stream, 0))


class Reach:
    """Whether the last operation reached the store; logs each change once."""

    def __init__(self, shown: str) -> None:
        self._shown = shown
        self._log = structlog.get_logger("state")
        self._away = False
        self.healthy = False

    def ok(self) -> None:
        """The store answered."""
        if self._away:
            self._log.info("state store is back", store=self._shown)
        self._away, self.healthy = False, True

    def failed(self, operation: str, reason: str) -> None:
        """The store did not answer."""
        if not self._away:
            self._log.warning(
                "state store is away; serving goes on with the last good state, changes are refused",
                store=self._shown,
                operation=operation,
                reason=reason,
            )
        self._away, self.healthy = True, False
