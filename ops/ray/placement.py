"""The cluster resources of one engine replica, as values for Serve."""

from typing import Any

from gateway.config.engine import EngineSection


def placement_of(engine: EngineSection, *, num_cpus: float, num_gpus: float | None) -> dict[str, Any]:
    """The deployment options for an engine with this configuration: the resources of the replica's process,
    and, if the ranks are Ray actors, a placement group with one bundle per GPU.

    * The embedded engine uses one GPU, none if ``engine.device`` is ``cpu``.
    * vLLM uses ``tensor_parallel_size`` times ``pipeline_parallel_size`` GPUs. Its processes share the
      replica's node and GPUs, unless ``engine.distributed_executor_backend`` is ``ray``: then each rank is a
      Ray actor in its own bundle. Tensor parallel ranks exchange data in every layer and must be on one node;
      pipeline stages exchange data once per step, so with several stages the group may spread over nodes.

    ``num_gpus`` overrides the number of GPUs that follows from the engine.
    """
    stages, ranks = engine.pipeline_parallel_size, engine.tensor_parallel_size
    own_gpus = float(stages * ranks)
    if engine.kind != "vllm":
        stages = ranks = 1
        own_gpus = 0.0 if engine.device == "cpu" else 1.0
    if engine.distributed_executor_backend != "ray" or stages * ranks == 1:
        return _actor(num_cpus, own_gpus if num_gpus is None else num_gpus)
    gpus = 1.0 if num_gpus is None else num_gpus
    # Serve puts the replica into the first bundle, which therefore has room for it and for the first rank.
    bundles = [{"CPU": num_cpus, "GPU": gpus}, *({"GPU": gpus} for _ in range(stages * ranks - 1))]
    return {
        **_actor(num_cpus, 0.0),
        "placement_group_bundles": bundles,
        "placement_group_strategy": "STRICT_PACK" if stages == 1 else "PACK",
    }


def _actor(num_cpus: float, num_gpus: float) -> dict[str, Any]:
    return {"ray_actor_options": {"num_cpus": num_cpus, "num_gpus": num_gpus}}
