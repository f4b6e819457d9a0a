"""The backends by name, and the pools of workers whose models they are."""

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from functools import partial

from admission.controller import AdmissionController
from gateway.backends.port import Backend
from gateway.backends.workers.serving_pool import ServingPool
from gateway.backends.workers.tokenizer_check import TokenizerCheck
from gateway.config.backends import OpenAIBackend
from gateway.wiring.adapters import AdapterParts
from gateway.wiring.foundation import Foundation
from gateway.wiring.model import ModelParts
from gateway.wiring.served_models import ServedModels
from gateway.wiring.workers import make_workers


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


class FleetParts:
    """The backends by name, which follow the models of the pools.

    ``sources`` are by the names of the configuration; ``models_of`` names the backends of each pool that
    serves several models. ``wrap`` may inject faults.
    """

    def __init__(
        self, served: ServedModels, wrap: Callable[[Backend], Backend], admission: AdmissionLink
    ) -> None:
        self.sources: dict[str, Backend | ServingPool] = {}
        self.backends: dict[str, Backend] = {}
        self.models_of: dict[str, Sequence[str]] = {}
        self.served = served
        self._wrap = wrap
        self._admission = admission

    @property
    def pools(self) -> Mapping[str, ServingPool]:
        """The pools of workers."""
        return {name: one for name, one in self.sources.items() if isinstance(one, ServingPool)}

    def backends_but(self, names: Collection[str]) -> Mapping[str, Backend]:
        """The backends of the configuration without some, never wrapped."""
        others = ((name, one) for name, one in self.sources.items() if name not in names)
        return {name: one for name, one in others if not isinstance(one, ServingPool)}

    def refresh(self) -> None:
        """Take the backends of all sources."""
        before = set(self.backends)
        self.backends.clear()
        self.models_of.clear()
        for name, source in self.sources.items():
            serving = source.serving if isinstance(source, ServingPool) else (source,)
            self.backends |= {one.name: self._wrap(one) for one in serving}
            if len(serving) > 1:
                self.models_of[name] = tuple([one.name for one in serving])
        self._admission.forget(before - self.backends.keys())

    def changed(self, pool: ServingPool, gone: Set[str]) -> None:
        """A pool has other models than before."""
        self.refresh()
        self.served.forget(pool.name, gone)


def make_pool(
    name: str,
    section: OpenAIBackend,
    base: Foundation,
    model: ModelParts,
    adapters: AdapterParts,
    fleet: FleetParts,
) -> ServingPool:
    """Build a pool of workers. Raises ConfigError."""
    tokenizer = model.models.of(section.model or "").tokenizer
    return make_workers(
        name,
        section,
        token_bytes=tokenizer.token_bytes,
        read=partial(fleet.served.read, name),
        reading=fleet.served.hosted(section),
        clock=base.clock,
        turns=base.turns,
        environ=os.environ,
        bring=adapters.source.bring,
        check=TokenizerCheck.of(tokenizer) if section.prompt == "auto" else None,
        incapable=base.settings.incapable,
        changed=fleet.changed,
    )
