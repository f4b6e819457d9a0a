"""The options of `sluice doctor --plan` in addition to the configuration."""

from dataclasses import dataclass
from typing import Annotated

from typer import Option


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Model, GPUs, and a typical request."""

    model: Annotated[
        str | None,
        Option(help="For --plan: llama-3-8b-awq, llama-3.1-8b or a model's folder; default: engine.model."),
    ] = None
    gpu: Annotated[
        list[str] | None, Option(help="For --plan, repeatable: A10G, A100, H100…; default: all known.")
    ] = None
    gpu_memory_gib: Annotated[
        float | None, Option(min=0.1, help="For --plan: memory of a GPU that is not in the list.")
    ] = None
    prompt_tokens: Annotated[int, Option(min=1, help="For --plan: tokens of a typical prompt.")] = 960
    answer_tokens: Annotated[int, Option(min=1, help="For --plan: tokens of a typical answer.")] = 140
    shared_prefix_tokens: Annotated[
        int, Option(min=0, help="For --plan: tokens at the start of all prompts, cached once.")
    ] = 0
