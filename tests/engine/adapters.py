"""Helpers of the LoRA tests: random adapters in PEFT's format, and the tokens that PEFT generates with them.

PyTorch and PEFT are imported inside the functions: many tests import this module and never write an adapter.
"""

from collections.abc import Sequence
from pathlib import Path

ALL_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path,
    model: Path,
    *,
    seed: int,
    rank: int = 8,
    targets: Sequence[str] = ALL_TARGETS,
    alpha: float = 16.0,
    **options: object,
) -> Path:
    """Writes a random adapter for the checkpoint ``model``; its B is not zero, so it has an effect."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=list(targets), init_lora_weights=False, **options
    )
    get_peft_model(base, config).save_pretrained(folder)
    return folder


def peft_greedy(
    model: Path, adapter: Path, prompts: Sequence[Sequence[int]], max_tokens: int
) -> list[list[int]]:
    """Returns the greedy tokens of transformers and PEFT for each prompt, in float32."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from tests.engine.support import generate_greedy

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return generate_greedy(PeftModel.from_pretrained(base, adapter), prompts, max_tokens)
