"""The cluster resources of one engine replica, as values for Serve."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from gateway.config.engine import EngineSection

_NONE: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Placement:
    """The resources of an engine replica's own process, and a placement group with a bundle for each GPU."""

    actor: Mapping[str, float] = field(default_factory=lambda: _NONE)
    bundles: tuple[Mapping[str, float], ...] = ()
    strategy: str | None = None

    def options(self) -> dict[str, Any]:
        """As Serve's deployments take it."""
        options: dict[str, Any] = {"ray_actor_options": dict(self.actor)}
        if self.bundles:
            options["placement_group_bundles"] = [dict(bundle) for bundle in self.bundles]
            options["placement_group_strategy"] = self.strategy
        return options


def placement_of(engine: EngineSection, *, num_cpus: float, num_gpus: float | None) -> Placement:
    """The resources for an engine of this configuration.

    * The embedded engine takes one GPU, none when ``engine.device`` is ``cpu``.
    * vLLM takes ``tensor_parallel_size`` times ``pipeline_parallel_size``. Its own processes share the
      replica's node and GPUs, unless ``engine.distributed_executor_backend`` is ``ray``: then each rank is a
      Ray actor in a bundle of its own. Tensor parallel ranks exchange data in every layer and must be on one
      node; pipeline stages do so once a step and may be on several, so only then the group may spread.

    ``num_gpus`` overrides what follows from the engine.
    """
    if engine.kind != "vllm":
        default = 0.0 if engine.device == "cpu" else 1.0
        return Placement(_actor(num_cpus, default if num_gpus is None else num_gpus))
    stages, ranks = engine.pipeline_parallel_size, engine.tensor_parallel_size
    if engine.distributed_executor_backend != "ray" or stages * ranks == 1:
        return Placement(_actor(num_cpus, float(stages * ranks) if num_gpus is None else num_gpus))
    gpus = 1.0 if num_gpus is None else num_gpus
    # Serve puts the replica into the first bundle, which so has room for it and for the first rank.
    bundles = [{"CPU": num_cpus, "GPU": gpus}, *({"GPU": gpus} for _ in range(stages * ranks - 1))]
    return Placement(
        _actor(num_cpus, 0.0),
        tuple(MappingProxyType(bundle) for bundle in bundles),
        "STRICT_PACK" if stages == 1 else "PACK",
    )


def _actor(num_cpus: float, num_gpus: float) -> Mapping[str, float]:
    return MappingProxyType({"num_cpus": num_cpus, "num_gpus": num_gpus})
