"""The backends by name; a pool of workers is one backend for each of its models."""

import os
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial

from adapters.values import Adapter
from admission.controller import AdmissionController
from budgeting.learned_counter import LearnedCounter
from gateway.backends.port import Backend
from gateway.backends.workers.pool_model import ModelReading
from gateway.backends.workers.serving_pool import ServingPool
from gateway.backends.workers.tokenizer_check import TokenizerCheck
from gateway.config.backends import OpenAIBackend
from gateway.wiring.adapters import AdapterParts
from gateway.wiring.foundation import Foundation
from gateway.wiring.model import ModelParts
from gateway.wiring.served_models import ServedModels
from gateway.wiring.workers import make_workers


@dataclass(slots=True)
class FleetParts:
    """The backends by name, updated when the models of a pool change.

    ``sources`` has the configured names as keys; ``models_of`` names the backends of each pool that serves
    several models. ``wrap`` may inject faults. ``list_adapters`` takes the workers' own adapters whose names
    are not ``aliases`` of models, nor models or backends.
    """

    served: ServedModels
    wrap: Callable[[Backend], Backend]
    admission: AdmissionController
    list_adapters: Callable[[Sequence[Adapter]], None]
    aliases: Collection[str]
    backends: dict[str, Backend]
    sources: dict[str, Backend | ServingPool] = field(default_factory=dict)
    models_of: dict[str, Sequence[str]] = field(default_factory=dict)

    @property
    def pools(self) -> Mapping[str, ServingPool]:
        return {name: one for name, one in self.sources.items() if isinstance(one, ServingPool)}

    def refresh(self) -> None:
        self.backends.clear()
        self.models_of.clear()
        for name, source in self.sources.items():
            serving = source.serving if isinstance(source, ServingPool) else (source,)
            self.backends |= {one.name: self.wrap(one) for one in serving}
            if len(serving) > 1:
                self.models_of[name] = tuple([one.name for one in serving])
        self.admission.keep(self.backends)
        taken = {*self.aliases, *self.backends, *(one.model for one in self.backends.values())}
        found: dict[tuple[str, str], set[str]] = {}
        for pool in self.pools.values():
            for one in pool.serving:
                for name in pool.loras_of(one) - taken:
                    found.setdefault((name, one.model), set()).add(one.name)
        named: dict[str, Adapter] = {}  # of a name that adapters of two models have, the first model's
        for (name, model), at in sorted(found.items()):
            named.setdefault(name, Adapter(name, 0, model, "", at=frozenset(at)))
        self.list_adapters(tuple(named.values()))

    def changed(self, pool: ServingPool, gone: Set[str]) -> None:
        """Update the backends after a pool's models or adapters changed; ``gone``: those no longer served."""
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
    hosted = fleet.served.hosted(section)
    tokenizer = model.models.of(section.model or "").tokenizer
    # The tokenizer of a model that a hosted service has too is not known until a worker lists it.
    checked = section.prompt == "auto" and not isinstance(tokenizer, LearnedCounter)
    return make_workers(
        name,
        section,
        read=partial(fleet.served.read, name),
        reading=hosted
        or ModelReading(tokenizer.token_bytes, TokenizerCheck.of(tokenizer) if checked else None),
        clock=base.clock,
        turns=base.turns,
        environ=os.environ,
        bring=adapters.source.bring,
        incapable=base.settings.incapable,
        changed=fleet.changed,
    )
