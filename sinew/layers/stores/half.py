"""Weights that stay in half precision while the arithmetic is float32.

For CPUs without half-precision products, where float32 is several times faster, and for policies whose float32 weights
do not fit the memory. A block of rows becomes float32, which rounds nothing, just before it is multiplied: no more
than one block of copies exists, and the weights stay in the file's memory map.
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
BLOCK = 1 << 20  # weights, 4 MiB in float32: they stay in the last cache between the copy and the product
ROWS = 256  # smallest number of rows in a block, because each product packs all of x
_scratch = threading.local()


@dataclass(frozen=True)
class Half(Plain):
    """Products in float32 of a weight in half precision."""

    kind = "half"

    def dtype(self, held: Held) -> torch.dtype:
        return torch.float32

    def product(self, held: Held, x: Tensor, bias: Tensor | None = None) -> Tensor:
        bias = None if bias is None else bias.float()
        if x.device.type != "cpu":  # shapes alone, on the meta device
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

    def precision(self, part: str, word: str) -> str:
        return word if word == "fp32" else upcast_text(word)


HALF = Half()


class _Product(torch.autograd.Function):
    """:func:`product` with a gradient for ``x``, so that guidance keeps no float32 weights for its way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return product(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return product(gradient.contiguous(), weight.t()), None


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x W^T`` as float32 [M, N], for x float32 [M, K] and W [N, K] in half precision."""
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
    """Return float32 memory of at least ``size`` numbers, this thread's own."""
    found = getattr(_scratch, "tensor", None)
    if found is None or found.numel() < size:
        with torch.inference_mode(False):  # or only inference mode could write to it later
            found = _scratch.tensor = torch.empty(size)
    return found
