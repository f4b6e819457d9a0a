"""A matrix product with weights prepared once.

On x86 PyTorch's default float32 product takes twice as long as oneDNN's with prepacked weights (Zen 5, 32
rows of 256 by 1,536 columns: 273 µs against 126 µs), and a tenth to a third longer for a single row. So only
the packed weights are kept; other devices, and builds without oneDNN, use the plain product.
"""

import torch
import torch.nn.functional as F

_PACKING_HINT_ROWS = 32


class Linear:
    """``x @ weight.T + bias`` for a weight of [out, in]; the bias may be None."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.bias = bias
        self._packed = weight.device.type == "cpu" and torch._C._has_mkldnn
        self._weight = weight
        if self._packed:
            # The operators that torch.compile emits for a linear layer on the CPU; torch is pinned.
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKING_HINT_ROWS)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in] → [rows, out]."""
        if not self._packed:
            return F.linear(x, self._weight, self.bias)
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, "none", [], "")
        return product
