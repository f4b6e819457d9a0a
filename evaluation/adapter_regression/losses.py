"""The likelihood of the reference answers: teacher forcing, by transformers and PEFT."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch.nn import functional
from transformers import AutoModelForCausalLM

# Largest loss of a reference, in nats per token; it also replaces NaN and infinity, so that a mean is finite.
MAX_LOSS = 100.0


@dataclass(frozen=True, slots=True)
class Reference:
    """One prompt and its reference answer, as tokens; the answer ends with the end token."""

    case: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def reference_losses(
    model: Path, adapters: Mapping[str, Path | None], references: Sequence[Reference]
) -> Mapping[str, Mapping[str, float]]:
    """Mean negative log-likelihood of each reference, in nats per token: by adapter, then by prompt.

    Args:
        model: the base model's folder.
        adapters: name to folder; ``None`` is the base model alone.
        references: run one at a time, so that padding cannot change a number.
    """
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    found: dict[str, dict[str, float]] = {}
    with torch.inference_mode():
        for name, folder in adapters.items():
            if folder is None:
                found[name] = {one.case: _loss(base, one) for one in references}
                continue
            tuned: Any = PeftModel.from_pretrained(base, str(folder), adapter_name="default").eval()
            found[name] = {one.case: _loss(tuned, one) for one in references}
            base = tuned.unload()
    return found


def _loss(model: Any, reference: Reference) -> float:
    ids = torch.tensor([reference.prompt + reference.answer])
    begin = len(reference.prompt)
    logits = model(input_ids=ids, use_cache=False).logits[0, begin - 1 : -1].float()
    loss = float(functional.cross_entropy(logits, ids[0, begin:]))
    return min(loss, MAX_LOSS) if math.isfinite(loss) else MAX_LOSS
