"""The backends there are, by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from admission.values import BackendLoad
from gateway.backends.port import Backend, BackendState


@dataclass(frozen=True, slots=True)
class Fleet:
    """All configured backends; the set is fixed while the gateway runs, their state is not."""

    backends: Mapping[str, Backend]

    @property
    def base_models(self) -> Collection[str]:
        """The ids of the base models served."""
        return {backend.model for backend in self.backends.values()}

    @property
    def any_ready(self) -> bool:
        """Whether at least one backend can take work."""
        return any(backend.state is BackendState.READY for backend in self.backends.values())

    def load(self, name: str) -> BackendLoad | None:
        """A backend's load as last reported."""
        return self.backends[name].load
