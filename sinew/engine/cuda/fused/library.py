"""The fused operations as products of cuBLAS with our row-wise kernels around them.

For a GPU whose library multiplies a shape faster than our kernels do, by more than its extra passes cost. Which
of the two a problem gets is measured (``sinew tune``).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sinew.engine.cuda.fused.ops import PlainOps, ResidualStream
from sinew.engine.cuda.fused.rows import RowOps, Target
from sinew.engine.cuda.kernels import gated_mlp


class Library(PlainOps):
    """Attention is torch's, as in :class:`PlainOps`; everything else has one launch per pass."""

    def __init__(self, rows: RowOps):
        self.rows = rows

    def norm_linear(self, x: Tensor, weight: Tensor, *, silu: bool = False, **norm: Any) -> Tensor:
        y = self._product(x, weight, **norm)
        return F.silu(y) if silu else y

    def gated_mlp(self, x: Tensor, weight: Tensor, activation: gated_mlp.Activation, **norm: Any) -> Tensor:
        packed, bias = self._product(x, weight, **norm | {"bias": None}), norm.get("bias")
        to = Target(x.dtype)
        return self.rows.activate(packed, to, activation=activation, gated=True, bias=bias).data

    def qkv_rope(
        self, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, int], **norm: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        packed = self._product(x, weight, **norm | {"bias": None})
        return self.rows.rope(packed, cos, sin, heads, norm.get("bias"))

    def splitk_linear(
        self,
        x: Tensor,
        weight: Tensor,
        *,
        bias: Tensor | None = None,
        gate: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        if bias is None and gate is None and residual is not None and residual.dtype == weight.dtype:
            return torch.addmm(residual, x, weight.T)  # added before the sum is rounded
        return super().splitk_linear(x, weight, bias=bias, gate=gate, residual=residual)

    def stream_linear(self, x: Tensor, weight: Tensor, **rest: Any) -> ResidualStream:
        return super().stream_linear(x, weight, **rest)  # over the product above: another way than PlainOps's

    def ada_rms(self, x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
        _, normed = self.rows.norm(x, Target(x.dtype), eps=eps, weight=scale, offset=1.0, shift=shift)
        return normed.data

    def _product(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float | None = None,
        bias: Tensor | None = None,
        scale: Tensor | None = None,
        squares: Tensor | None = None,
    ) -> Tensor:
        if squares is not None:
            assert eps is not None, "squares: expected only with a norm"
            x = self.rows.norm(x, Target(weight.dtype), eps=eps, squares=squares)[1].data
        elif eps is not None:
            _, normed = self.rows.norm(x, Target(weight.dtype), eps=eps, weight=scale, offset=1.0)
            x = normed.data
        elif scale is not None:
            x = (x.float() * (1.0 + scale.float())).to(x.dtype)
        return F.linear(x.to(weight.dtype), weight, None if bias is None else bias.to(weight.dtype))
