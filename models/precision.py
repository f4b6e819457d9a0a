"""The data type of training: bfloat16 where the processor has instructions for it, else float32.

Without AVX-512, PyTorch computes products in bfloat16 one number at a time: a step took 20 times as long.
Weights, gradients and the optimisers' state are float32 in both cases, so checkpoints fit either.
"""

from __future__ import annotations

from typing import Any, cast

import torch

HAS_BFLOAT16 = torch._C._has_mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
# The learning rates assume updates as large as AdamW's, as "match_rms_adamw" of torch.optim.Muon makes them.
_RMS_OF_ADAMW = 0.2


def forward_type() -> torch.autocast:
    """The context of a forward pass."""
    return torch.autocast("cpu", torch.bfloat16, enabled=HAS_BFLOAT16)


def muon(matrices: list[torch.nn.Parameter], rate: float, weight_decay: float) -> torch.optim.Optimizer:
    """PyTorch's Muon, or the same in float32."""
    kind = torch.optim.Muon if HAS_BFLOAT16 else Float32Muon
    return kind(matrices, lr=rate, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")


class Float32Muon(torch.optim.Muon):
    """Muon with its Newton-Schulz iteration in float32; all else is as in torch.optim.Muon."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the weights once; parameters without a gradient stay unchanged."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, group)

    def _update(self, weight: torch.Tensor, group: dict[str, Any]) -> None:
        gradient = cast(torch.Tensor, weight.grad)
        state = self.state[weight]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        mean = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        update = orthogonal(gradient.lerp(mean, group["momentum"]), group)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(update, alpha=-group["lr"] * _RMS_OF_ADAMW * max(weight.shape) ** 0.5)


def orthogonal(matrix: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """Return nearly the nearest orthogonal matrix, with the steps and coefficients of ``group``."""
    a, b, c = group["ns_coefficients"]
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=group["eps"])
    for _ in range(int(group["ns_steps"])):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
