"""A backend on a supervised engine: the same object across restarts."""

from __future__ import annotations

from typing import Protocol

from admission.values import BackendLoad
from gateway.backends.port import Backend, BackendState, Completion, Continue, DeltaSink, Work
from gateway.contracts.features import Feature
from resilience.failures import BackendFailure, FailureKind


class Lives(Protocol):
    """What the backend needs of the host that starts the engines."""

    @property
    def state(self) -> BackendState:
        """Where the engine stands."""

    @property
    def ready_in_s(self) -> float | None:
        """Seconds until a restart is through."""

    def inner(self, name: str) -> Backend:
        """The backend of that name on the engine that runs now."""

    def check_ready(self, name: str) -> None:
        """Refuse work that would wait for a restart."""

    def notice_death(self) -> None:
        """Look whether the engine is dead."""

    async def wait_ready(self, timeout_s: float) -> bool:
        """Wait until the engine takes work."""


class SupervisedBackend:
    """Delegates to the running engine; also a :class:`gateway.backends.port.Restarting`.

    Args:
        name: its name in the configuration.
        lives: who starts the engines.
    """

    def __init__(self, name: str, lives: Lives) -> None:
        self.name = name
        self._lives = lives

    @property
    def kind(self) -> str:
        """The engine's kind."""
        return self._lives.inner(self.name).kind

    @property
    def model(self) -> str:
        """The base model's id."""
        return self._lives.inner(self.name).model

    @property
    def features(self) -> frozenset[Feature]:
        """What the engine can honour."""
        return self._lives.inner(self.name).features

    @property
    def continues(self) -> frozenset[Continue]:
        """How the engine can resume a broken answer, its own or that of the one before."""
        return self._lives.inner(self.name).continues

    @property
    def state(self) -> BackendState:
        """Where it stands; an engine that is to be started again is starting."""
        return self._lives.state

    @property
    def load(self) -> BackendLoad | None:
        """The engine's load as last reported; ``None`` while there is none to take work."""
        if self._lives.state is not BackendState.READY:
            return None
        return self._lives.inner(self.name).load

    @property
    def ready_in_s(self) -> float | None:
        """Seconds until a restart is through, as far as is known; ``None`` when none is under way."""
        return self._lives.ready_in_s

    async def wait_ready(self, timeout_s: float) -> bool:
        """Wait until it takes work, at most so long; whether it does. Returns at once when it never will."""
        return await self._lives.wait_ready(timeout_s)

    async def generate(self, work: Work, out: DeltaSink) -> Completion:
        """Generate on the engine that runs now; its death fails the call."""
        self._lives.check_ready(self.name)
        try:
            return await self._lives.inner(self.name).generate(work, out)
        except BackendFailure as failure:
            if failure.kind is FailureKind.ENGINE_DEAD:
                self._lives.notice_death()
            raise
