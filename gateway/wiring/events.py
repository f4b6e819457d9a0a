"""The event bus, and the link from backends to admission: built before the parts that they connect."""

from collections.abc import Callable, Iterable
from typing import Any

from admission.controller import AdmissionController


class EventBus:
    """Passes each event to the listeners of its type, which attach later."""

    def __init__(self) -> None:
        self._by_type: dict[type, list[Callable[[Any], None]]] = {}

    def attach(self, listener: Callable[[Any], None], *types: type) -> None:
        """Pass events of these types to ``listener``."""
        for one in types:
            self._by_type.setdefault(one, []).append(listener)

    def emit(self, event: object) -> None:
        """Pass an event on, in the order in which the listeners were attached."""
        for listener in self._by_type.get(type(event), ()):
            listener(event)


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
