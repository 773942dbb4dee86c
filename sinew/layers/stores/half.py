"""A store of weights that stay in half precision while the arithmetic is float32.

The store is for CPUs without half-precision products, where float32 is several times faster, and for policies
whose float32 weights do not fit in memory. A block of rows is converted to float32 just before its product,
which is exact. So only one converted block exists at a time, and the weights stay in the memory map of the
file.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sinew.core import upcast_text
from sinew.layers.stores.plain import Plain
from sinew.layers.stores.store import Held

DTYPES = (torch.bfloat16, torch.float16)
# A block has this number of weights. In float32 it has 4 MiB, which stay in the last-level cache between the
# conversion and the product.
BLOCK = 1 << 20
# A block has at least this number of rows, because each product packs all of x again.
ROWS = 256
_scratch = threading.local()


@dataclass(frozen=True)
class Half(Plain):
    """A store of half-precision weights, whose products are computed in float32."""

    kind = "half"

    def dtype(self, held: Held) -> torch.dtype:
        return torch.float32

    def product(self, held: Held, x: Tensor, bias: Tensor | None = None) -> Tensor:
        bias = None if bias is None else bias.float()
        if x.device.type != "cpu":  # On the meta device, only shapes are computed.
            return F.linear(x.float(), held.weight.float(), bias)
        rows = x.float().reshape(-1, x.shape[-1])
        if torch.is_grad_enabled() and rows.requires_grad:
            out = _Product.apply(rows, held.weight)
        else:
            out = product(rows, held.weight)
        if bias is not None:
            out = out + bias if out.requires_grad else out.add_(bias)
        return out.view(*x.shape[:-1], -1)

    def take(self, held: Held, ids: Tensor | tuple[int, ...]) -> Tensor:
        return super().take(held, ids).float()

    def precision(self, part: str, dtype: str) -> str:
        return dtype if dtype == "fp32" else upcast_text(dtype)


HALF = Half()


class _Product(torch.autograd.Function):
    """An autograd function for :func:`product` with a gradient for ``x`` only.

    Autograd would otherwise store the float32 weights for the backward pass of real-time chunking.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return product(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return product(gradient.contiguous(), weight.t()), None


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x W^T``, float32 [M, N], for x float32 [M, K] and W [N, K] in half precision."""
    count, width = weight.shape
    rows = max(ROWS, BLOCK // width)
    out = x.new_empty(len(x), count)
    scratch = _buffer(min(rows, count) * width)
    for start in range(0, count, rows):
        part = weight[start : start + rows]
        wide = scratch[: part.numel()].view(part.shape).copy_(part)
        torch.mm(x, wide.t(), out=out[:, start : start + rows])
    return out


def _buffer(size: int) -> Tensor:
    """Return a float32 buffer for at least ``size`` numbers. Each thread has its own buffer and reuses it."""
    buffer = getattr(_scratch, "tensor", None)
    if buffer is None or buffer.numel() < size:
        # Leave inference mode, because a tensor from inference mode could not be written outside of it later.
        with torch.inference_mode(False):
            buffer = _scratch.tensor = torch.empty(size)
    return buffer
