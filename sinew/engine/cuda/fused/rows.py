"""Kernels that run before and after library products: norm, activation, rotation and conversion, one launch each.

In layers that use library products (vision tower, a language model with many rows, FP8), these kernels do all other
work. ``RowReferences`` defines their results, and ``RowKernels`` runs them on a GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sinew.engine.cuda.fp8 import linear as fp8
from sinew.engine.cuda.kernels import activate, fp8_quantize, rope, row_norm, weight_only_linear
from sinew.engine.cuda.kernels.fp8_quantize import E4M3
from sinew.engine.cuda.lowbit.weights import WeightOnly
from sinew.engine.plan.norms import UnitLayerNorm, UnitRMSNorm
from sinew.layers.norm import GemmaRMSNorm, LayerNorm, RMSNorm

# Norms whose weights do not change, or that have no weights.
CONSTANT = (RMSNorm, GemmaRMSNorm, LayerNorm, UnitRMSNorm, UnitLayerNorm)


class RowTarget(NamedTuple):
    """The dtype and scale in which a matrix product expects its input.

    Attributes:
        dtype: The dtype.
        scale: For e4m3, the scale of the tensor, float32 scalar.
    """

    dtype: torch.dtype
    scale: Tensor | None = None

    @classmethod
    def of(cls, linear: Any) -> RowTarget:
        """Return the dtype and scale of the input that a ``Linear`` or an ``Fp8Linear`` expects."""
        if isinstance(linear, fp8.Fp8Linear):
            return cls(E4M3, linear.x_scale)
        return cls(linear.dtype)


class Operand(NamedTuple):
    """The input of a matrix product, in the dtype that the product expects.

    Attributes:
        data: [M, K].
        scales: For e4m3, the scale of each row, float32 [M]. Otherwise None.
    """

    data: Tensor
    scales: Tensor | None = None


def norm_options(norm: Any) -> dict[str, Any]:
    """Return the options of ``row_norm`` for a norm of one of the classes :data:`CONSTANT`.

    Low-bit weights cannot contain the weight of the norm before them, so the kernel of the norm multiplies by it.
    """
    options: dict[str, Any] = {"eps": norm.eps}
    if isinstance(norm, LayerNorm):
        options |= {"weight": norm.weight, "shift": norm.bias}
    elif isinstance(norm, RMSNorm):
        options |= {"weight": norm.weight, "offset": 1.0 if isinstance(norm, GemmaRMSNorm) else 0.0}
    return options


class RowOps(ABC):
    """The operations between library products.

    The argument ``to`` is the dtype and scale that the next product expects.
    """

    @abstractmethod
    def norm(
        self, x: Tensor, to: RowTarget, *, branch: Tensor | None = None, **norm: Any
    ) -> tuple[Tensor, Operand]:
        """Return total = x + gate * (branch + branch_bias), and the norm of total as the next product's input.

        Args:
            x: The residual stream, [M, C].
            to: The form of the operand.
            branch: [M, C], or None.
            **norm: eps, kind, weight, offset, shift, gate and branch_bias, as in ``row_norm.reference``.
        """

    @abstractmethod
    def activate(
        self, packed: Tensor, to: RowTarget, *, activation: Any, gated: bool, bias: Tensor | None = None
    ) -> Operand:
        """Return activation(gate) * up of packed [M, 2 N] if ``gated``, else activation(packed) of [M, N], after the
        bias."""

    @abstractmethod
    def convert(self, x: Tensor, to: RowTarget) -> Operand:
        """Return x, [M, K], as the input of a matrix product."""

    @abstractmethod
    def rope(
        self, packed: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, int], bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Split packed projections, [M, (H + 2 Hkv) D], into q [M, H, D], k and v [M, Hkv, D]. Rotate q and k."""

    def product(self, operand: Operand, linear: Any, bias: bool = True, onto: Tensor | None = None) -> Tensor:
        """Return the product of an operand and a layer, [M, N] in the layer's dtype.

        Args:
            operand: [M, K].
            linear: The layer.
            bias: True adds the layer's bias.
            onto: [M, N], to which the product is added in place. None for new memory.
        """
        weight, added = linear.weight, linear.bias if bias else None
        if isinstance(getattr(linear, "store", None), WeightOnly):
            return self.weight_only(operand.data, weight, linear.scale, bias=added, onto=onto)
        if operand.scales is not None:
            y = fp8.multiply(operand.data, operand.scales, weight, added)
        elif onto is not None and added is None and onto.dtype == weight.dtype:
            # The product adds in place, which saves a pass and rounds once.
            return onto.addmm_(operand.data, weight.t())
        else:
            y = F.linear(operand.data, weight, None if added is None else added.to(weight.dtype))
        return y if onto is None else onto.add_(y)

    @abstractmethod
    def weight_only(
        self, x: Tensor, codes: Tensor, scales: Tensor, *, bias: Tensor | None, onto: Tensor | None
    ) -> Tensor:
        """Return x times a weight that stays in low-bit, as :meth:`product` does.

        Args:
            x: [M, K].
            codes: int8 [N, K], or uint8 [N, K / 2].
            scales: float32 [N], or float16 [N, K / 32].
            bias: [N], or None.
            onto: [M, N], to which the product is added in place. None for new memory.
        """


class RowReferences(RowOps):
    """The definitions of the kernels, in PyTorch on any device."""

    def norm(self, x, to, *, branch=None, **norm):
        total, data, scales = row_norm.reference(x, branch=branch, dtype=to.dtype, x_scale=to.scale, **norm)
        return total, Operand(data, scales)

    def activate(self, packed, to, *, activation, gated, bias=None):
        options = {"activation": activation, "gated": gated, "bias": bias}
        return Operand(*activate.reference(packed, dtype=to.dtype, x_scale=to.scale, **options))

    def convert(self, x, to):
        if to.dtype != E4M3:
            return Operand(x.to(to.dtype))
        return Operand(*fp8_quantize.reference(x, x_scale=to.scale))

    def rope(self, packed, cos, sin, heads, bias=None):
        return rope.reference(packed, cos, sin, heads, bias=bias)

    def weight_only(self, x, codes, scales, *, bias, onto):
        options = {} if onto is None else {"residual": onto, "dtype": onto.dtype}
        y = weight_only_linear.reference(x, codes, scales, bias=bias, **options)
        return y if onto is None else onto.copy_(y)


class RowKernels(RowOps):
    def norm(self, x, to, *, branch=None, **norm):
        options = {"dtype": to.dtype, "x_scale": to.scale, **norm}
        total, data, scales = row_norm.row_norm(x, branch=branch, **options)
        return total, Operand(data, scales)

    def activate(self, packed, to, *, activation, gated, bias=None):
        options = {"activation": activation, "gated": gated, "bias": bias}
        return Operand(*activate.activate(packed, dtype=to.dtype, x_scale=to.scale, **options))

    def convert(self, x, to):
        if to.dtype != E4M3:
            return Operand(x.to(to.dtype))
        return Operand(*fp8_quantize.fp8_quantize(x, x_scale=to.scale))

    def rope(self, packed, cos, sin, heads, bias=None):
        H, KV = heads
        D = 2 * cos.shape[-1]
        q, k, v = (packed.new_empty(len(packed), count, D) for count in (H, KV, KV))
        rope.rope(packed, cos, sin, q, k, v, bias=bias)
        return q, k, v

    def weight_only(self, x, codes, scales, *, bias, onto):
        # Each element of the residual is read before it is written, so the sum needs no memory of its own.
        return weight_only_linear.weight_only_linear(x, codes, scales, bias=bias, residual=onto, out=onto)
