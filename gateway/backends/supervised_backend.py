"""A backend on a supervised engine: the same object across restarts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from admission.values import BackendLoad
from gateway.backends.port import Backend, BackendState, Completion, DelegatingBackend, DeltaSink, Work
from resilience.failures import BackendFailure, FailureKind

if TYPE_CHECKING:
    from gateway.backends.supervised import SupervisedHost


class SupervisedBackend(DelegatingBackend):
    """Delegates to the running engine's backend; also a :class:`gateway.backends.port.Restarting`."""

    def __init__(self, name: str, host: SupervisedHost) -> None:
        self._name = name
        self._host = host

    @property
    def delegate(self) -> Backend:
        """The backend of that name on the engine that runs now."""
        return self._host.inner(self._name)

    @property
    def name(self) -> str:
        """Its name in the configuration."""
        return self._name

    @property
    def state(self) -> BackendState:
        """The engine's state; ``STARTING`` while it is to be restarted."""
        return self._host.state

    @property
    def load(self) -> BackendLoad | None:
        """The engine's load as last reported; ``None`` while it takes no work."""
        return self.delegate.load if self._host.state is BackendState.READY else None

    @property
    def ready_in_s(self) -> float | None:
        """Estimate of seconds until a restart is complete; ``None`` without one."""
        return self._host.ready_in_s

    async def wait_ready(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` until it takes work; whether it does. At once if it never will."""
        return await self._host.wait_ready(timeout_s)

    async def generate(self, work: Work, out: DeltaSink) -> Completion:
        """Generate on the engine that runs now; its death fails the call."""
        self._host.check_ready(self._name)
        try:
            return await self.delegate.generate(work, out)
        except BackendFailure as failure:
            if failure.kind is FailureKind.ENGINE_DEAD:
                self._host.notice_death()
            raise
