"""`sluice doctor --plan`: computes from the configuration what fits on a GPU; needs no GPU."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from gateway.backends.vllm.arguments import LORA_RANKS, lora_places
from gateway.config.engine import installed_model
from gateway.config.settings import Settings, load_settings
from gateway.weights.location import locate
from gateway.weights.source import prepare
from ops.cli.console import print_json, print_lines, print_rows, screen
from ops.cli.startup import one_line_errors
from ops.planning.arithmetic import EnginePlan, PlanRequest, plan_engine
from ops.planning.options import PlanOptions
from ops.planning.shape import GIB, GPUS, Gpu, ModelShape, PlanError, find_model


def plan(config: Path | None, options: PlanOptions, *, as_json: bool) -> None:
    """Compute and print the plans; exit code 1 if no plan can be made."""
    with one_line_errors(PlanError):
        plans = make_plans(load_settings(config), options)
    if as_json:
        print_json(
            [{**asdict(one), "tokens": one.tokens, "workspace_bytes": one.workspace_bytes} for one in plans]
        )
    else:
        _print_table(plans)


def make_plans(settings: Settings, options: PlanOptions) -> list[EnginePlan]:
    """A plan for each GPU. Raises PlanError, FetchError."""
    engine, model = settings.engine, _model(settings, options.model)
    fp8_cache = str(engine.extra_args.get("kv_cache_dtype", "")).startswith("fp8")
    return [
        plan_engine(
            PlanRequest(
                model=model,
                gpu=gpu,
                utilization=engine.gpu_memory_utilization,
                tensor_parallel=engine.tensor_parallel_size,
                pipeline_parallel=engine.pipeline_parallel_size,
                max_model_len=engine.max_model_len,
                block_size=engine.block_size,
                prompt_tokens=options.prompt_tokens,
                answer_tokens=options.answer_tokens,
                shared_prefix_tokens=options.shared_prefix_tokens,
                max_num_seqs=engine.max_num_seqs,
                max_num_batched_tokens=engine.max_num_batched_tokens,
                max_loras=lora_places(engine, adapters_registered=settings.adapters.file is not None),
                max_lora_rank=next(rank for rank in LORA_RANKS if rank >= engine.max_lora_rank),
                kv_item_bytes=1 if fp8_cache else None,
                cuda_graphs=not engine.enforce_eager,
            )
        )
        for gpu in _gpus(options)
    ]


def _model(settings: Settings, given: str | None) -> ModelShape:
    engine = settings.engine
    if given is None and not isinstance(locate(engine.model), Path):
        # ``prepare`` fetches only the small files, config.json included.
        given = prepare(engine, settings.weights)[0].model
    folder = installed_model(given or engine.model)
    return find_model(folder, dtype=engine.dtype, quantization=engine.quantization)


def _gpus(options: PlanOptions) -> list[Gpu]:
    if options.gpu_memory_gib is not None:
        name = ", ".join(options.gpu or ()) or f"{options.gpu_memory_gib:g} GiB"
        return [Gpu(name, int(options.gpu_memory_gib * GIB))]
    chosen = []
    for given in options.gpu or ():
        found = [gpu for name, gpu in GPUS.items() if name.lower().startswith(given.lower())]
        if not found:
            raise PlanError(
                f"GPU {given!r} is not known; allowed: {', '.join(GPUS)}; or give --gpu-memory-gib"
            )
        chosen += found
    return chosen or list(GPUS.values())


def rows(plans: Sequence[EnginePlan]) -> list[tuple[str, ...]]:
    """The table: one row per quantity, one column per kind of GPU; figures are for one GPU."""
    asked = plans[0].request
    gpus = asked.tensor_parallel * asked.pipeline_parallel
    weights = f"weights (1 of {gpus} GPUs)" if gpus > 1 else "weights"
    shared = f", {asked.shared_prefix_tokens:,} of them shared" if asked.shared_prefix_tokens else ""
    lines = {
        "memory": [_gib(p.request.gpu.memory_bytes) for p in plans],
        f"the engine's share ({asked.utilization:g})": [_gib(p.budget_bytes) for p in plans],
        weights: [_gib(p.weights_bytes) for p in plans],
        f"{asked.max_loras} LoRA slots of rank {asked.max_lora_rank}": [_gib(p.lora_bytes) for p in plans],
        "workspace (estimate)": [_gib(p.workspace_bytes) for p in plans],
        "KV cache": [_gib(p.kv_bytes) for p in plans],
        "KV cache per token": [f"{p.token_bytes / 1024:g} KiB" for p in plans],
        f"blocks of {asked.block_size} tokens": [f"{p.blocks:,}" for p in plans],
        "tokens": [f"{p.tokens:,}" for p in plans],
        f"sequences of {asked.context_tokens:,} tokens{shared}": [f"{p.sequences:,}" for p in plans],
        f"sequences of {asked.max_model_len:,} tokens (the longest)": [
            f"{p.full_sequences:,}" for p in plans
        ],
        "recommended max_num_seqs": [f"{p.recommended_max_num_seqs:,}" for p in plans],
        "recommended max_num_batched_tokens": [f"{p.recommended_max_num_batched_tokens:,}" for p in plans],
    }
    return [(name, *cells) for name, cells in lines.items()]


def _print_table(plans: Sequence[EnginePlan]) -> None:
    gpus = [p.request.gpu.name for p in plans]
    print_rows((plans[0].request.model.name, *gpus), rows(plans), right=gpus)
    for one in plans:
        for warning in one.warnings:
            screen().print(f"[yellow]{one.request.gpu.name}:[/] {warning}", highlight=False)
    print_lines(
        "The workspace is an estimate. vLLM measures it when it starts and logs the memory that is left."
    )


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.2f} GiB"
