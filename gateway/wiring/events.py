"""The link from backends to admission, which is built after them."""

from collections.abc import Iterable

from admission.controller import AdmissionController


class AdmissionLink:
    """What backends need of admission, which is built after them because it reads their load."""

    def __init__(self) -> None:
        self._admission: AdmissionController | None = None

    def attach(self, admission: AdmissionController) -> None:
        """Connect admission."""
        self._admission = admission

    def engine_stepped(self, gate: str) -> None:
        """The engine in process of this gate has run a step, so it may admit more."""
        if self._admission is not None and gate:
            self._admission.wake(gate)

    def forget(self, backends: Iterable[str]) -> None:
        """These backends are gone."""
        if self._admission is not None:
            for backend in backends:
                self._admission.forget(backend)

    def queued(self, backend: str) -> int:
        """The requests that wait for a backend here."""
        return 0 if self._admission is None else sum(self._admission.gate(backend).queue.counts().values())
