"""Liveness for platforms that know one path: not healthy before the gateway was ready once.

SageMaker asks ``/ping`` alone, and sends traffic as soon as it answers 200. With ``server.ping: once_ready``
it gets 503 while the model loads, so that an update does not move callers to an instance that has no
engine yet. From then on it is plain liveness again: a container must not be killed because its engine
restarts, or it would never finish loading.
"""

from collections.abc import Mapping

from gateway.errors import BackendUnavailable
from gateway.ports import HealthService


class OnceReady:
    """A :class:`HealthService` whose ``ping`` refuses until ``ready`` was true for the first time."""

    def __init__(self, health: HealthService) -> None:
        self._health = health
        self._was_ready = False

    def ping(self) -> Mapping[str, object]:
        """Liveness, once it has been ready.

        Raises:
            BackendUnavailable: it has not been ready yet.
        """
        if not self._was_ready:
            self._was_ready, _ = self._health.ready()
        if not self._was_ready:
            raise BackendUnavailable("not ready yet: server.ping is once_ready, see /ready")
        return self._health.ping()

    def ready(self) -> tuple[bool, Mapping[str, object]]:
        """As it is."""
        return self._health.ready()

    async def deep(self) -> tuple[bool, Mapping[str, object]]:
        """As it is."""
        return await self._health.deep()
