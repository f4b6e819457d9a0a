"""The computation of a layer between its matrix products and attention, with PyTorch's operators, for every
device and dtype. ``kernels`` does the same in fewer passes on the CPU.
"""

import torch
import torch.nn.functional as F

_PACKING_HINT_ROWS = 32


def _can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN supports this dtype on this CPU: half precision needs AVX-512 or newer instructions."""
    if not torch._C._has_mkldnn:
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is not torch.float16 or bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


class Linear:
    """``x @ weight.T + bias`` for a weight of [out, in]; the bias may be None."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.bias = bias
        self._packed = weight.device.type == "cpu" and _can_pack(weight.dtype)
        self._weight = weight
        if self._packed:
            # The operators that torch.compile emits for a linear layer on the CPU; torch is pinned.
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKING_HINT_ROWS)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer: [rows, in] → [rows, out]."""
        if not self._packed:
            return F.linear(x, self._weight, self.bias)
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, "none", [], "")
        return product


class Operators:
    """Norm, rotary embedding and activation for a model of this shape."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int, eps: float) -> None:
        self.head_dim, self.eps = head_dim, eps
        self.query_size, self.key_size = heads * head_dim, kv_heads * head_dim

    def take_threads(self, *, all_of_them: bool) -> None:
        """Select one thread or all for the following calls; no effect here, where PyTorch's setting holds."""

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm of each row of ``x``."""
        return F.rms_norm(x, x.shape[-1:], weight, self.eps)

    def add_and_norm(self, x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Add ``added`` to ``x`` in place and return the RMSNorm of the sum."""
        return self.norm(x.add_(added), weight)

    def norm_heads(self, qkv: torch.Tensor, weight: torch.Tensor) -> None:
        """Apply RMSNorm to each query and key head in place; ``weight`` is [heads + kv_heads, head_dim]."""
        heads = qkv[:, : self.query_size + self.key_size].view(-1, *weight.shape)
        heads.copy_(F.rms_norm(heads, weight.shape[-1:], None, self.eps).mul_(weight))

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slots: torch.Tensor,
        cache: torch.Tensor,
    ) -> None:
        """Rotate queries and keys by their positions, in place, and write keys and values into the cache.

        ``qkv`` is [tokens, query_size + 2 key_size]; ``cos`` and ``sin`` are [tokens, head_dim], the first
        half of the sines negated; ``cache`` is [blocks, 2, block_size, key_size].
        """
        heads = qkv[:, : self.query_size + self.key_size].view(qkv.shape[0], -1, self.head_dim)
        swapped = heads.roll(self.head_dim // 2, -1)
        heads.mul_(cos.unsqueeze(1)).addcmul_(swapped, sin.unsqueeze(1))
        block_size = cache.shape[2]
        rows = slots + slots // block_size * block_size  # rows of keys; values follow a block later
        flat = cache.view(-1, self.key_size)
        keys, values = qkv[:, self.query_size :].chunk(2, dim=-1)
        flat.index_copy_(0, rows, keys)
        flat.index_copy_(0, rows + block_size, values)

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """SwiGLU: SiLU of the first half of each row, times the second half."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)
