"""Linear layers in FP8: weights and activations in e4m3, half of bfloat16's bytes and twice its rate.

Weights have one scale per output channel and are converted once. Activations have one scale from calibration
(``scales.py``), or one per row, found while they are converted. The product is the kernel of ``fp8_product.py``.

The tensors of a device without FP8 arithmetic (compute capability below 8.9) are refused. On a CPU the reference
computes, which is what the layers mean: conversion to e4m3 and back, and a product in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sinew.engine.cuda.kernels import fp8_product, fp8_quantize, tiles
from sinew.engine.cuda.kernels.fp8_product import DIVISOR

NEEDS = 89  # compute capability * 10


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """``weight ~ data * scale[:, None]``. data: e4m3 [out, in], contiguous; scale: float32 [out].

    dtype: of the layer that it stands for, in which its products come out.
    """

    data: Tensor
    scale: Tensor
    dtype: torch.dtype = torch.bfloat16

    def wide(self) -> Tensor:
        """Float32 [out, in]."""
        return self.data.float() * self.scale[:, None]


def supported(device: torch.device) -> tuple[bool, str]:
    """Return whether a device computes in FP8 (a CPU emulates it), and why."""
    if device.type != "cuda":
        return True, "emulated by the reference"
    capability = tiles.capability(device)
    reason = f"compute capability {capability / 10}, FP8 needs {NEEDS / 10}"
    return capability >= NEEDS, reason


def unfit(weight: Tensor) -> str | None:
    """Why a weight cannot be in FP8, None if it can."""
    if weight.ndim != 2:
        return f"expected [out, in], got {weight.ndim} axes"
    if weight.shape[1] % DIVISOR:
        return f"expected an input size that is a multiple of {DIVISOR}, got {weight.shape[1]}"
    if weight.shape[1] > fp8_quantize.LONGEST_ROW:
        return f"expected an input size of at most {fp8_quantize.LONGEST_ROW}, got {weight.shape[1]}"
    return None


@torch.no_grad()
def quantize_weight(weight: Tensor) -> Fp8Weight:
    """[out, in] -> e4m3 with one scale per output channel, its largest value / 448.

    Raises ValueError for a shape that does not fit, numbers that are not finite, or a device without FP8.
    """
    if why := unfit(weight):
        raise ValueError(f"weight: {why}")
    _require(weight.device)
    if not weight.is_meta and not torch.isfinite(weight).all():
        raise ValueError("weight: expected finite numbers, got some that are not")
    data, scale = fp8_quantize.reference(weight)
    dtype = weight.dtype if weight.dtype in (torch.float16, torch.float32) else torch.bfloat16
    return Fp8Weight(data.contiguous(), scale.contiguous(), dtype)


def fp8_linear(
    x: Tensor,
    weight: Fp8Weight,
    x_scale: Tensor | None = None,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """x: [M, K], bfloat16 or float32 -> [M, N] in ``weight.dtype``, or written to ``out``.

    x_scale: float32 scalar on x's device, from calibration; None: a scale per row. Two launches on a GPU, one
    that converts x and one that multiplies; their intermediate is allocated, which a graph's capture may do.
    """
    _check(x, weight, out)
    if x.device.type != "cuda":
        result = reference(x, weight, x_scale, bias)
        return result if out is None else out.copy_(result)
    _require(x.device)
    data, scales = fp8_quantize.fp8_quantize(x, x_scale=x_scale)
    return multiply(data, scales, weight, bias, out)


def multiply(
    data: Tensor,
    scales: Tensor,
    weight: Fp8Weight,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """data: e4m3 [M, K], scales: float32 [M], as the kernels leave them -> [M, N] in ``weight.dtype``, or ``out``.

    On a CPU the reference.
    """
    if data.device.type == "cpu":
        y = fp8_product.reference(data, scales, weight.data, weight.scale, bias=bias, dtype=weight.dtype)
        return y if out is None else out.copy_(y)
    made: dict[str, Any] = {"bias": bias, "out": out, "dtype": weight.dtype}
    return fp8_product.fp8_product(data, scales, weight.data, weight.scale, **made)


def reference(
    x: Tensor, weight: Fp8Weight, x_scale: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Define :func:`fp8_linear` by dequantisation: x and weight to e4m3 and back, product in float32."""
    data, scales = fp8_quantize.reference(x, x_scale=x_scale)
    return fp8_product.reference(data, scales, weight.data, weight.scale, bias=bias, dtype=weight.dtype)


class Fp8Linear(nn.Module):
    """In place of a :class:`sinew.layers.linear.Linear`: the same ``forward(x)``, the same dtype out."""

    linear_in_weight = True
    data: Tensor
    scale: Tensor
    bias: Tensor | None
    x_scale: Tensor | None

    def __init__(self, weight: Fp8Weight, bias: Tensor | None = None, x_scale: Tensor | None = None):
        super().__init__()
        self.out_features, self.in_features = weight.data.shape
        self.dtype = weight.dtype
        self.register_buffer("data", weight.data)
        self.register_buffer("scale", weight.scale)
        self.register_buffer("bias", bias)
        self.register_buffer("x_scale", x_scale)

    @classmethod
    def of(cls, linear: nn.Linear, x_scale: Tensor | float | None = None) -> Fp8Linear:
        """x_scale: of the layer's input, from calibration; None: each row's own. Raises as :func:`quantize_weight`."""
        device = linear.weight.device
        if x_scale is not None:
            x_scale = torch.as_tensor(x_scale, dtype=torch.float32).reshape(())
            if not 0 < float(x_scale) < float("inf"):  # before it moves: the meta device holds no value
                raise ValueError(f"x_scale: expected a finite number above 0, got {float(x_scale)}")
            x_scale = x_scale.to(device)
        bias = None if linear.bias is None else linear.bias.detach()
        return cls(quantize_weight(linear.weight.detach()), bias, x_scale)

    @property
    def weight(self) -> Fp8Weight:
        """``weight.dtype`` is what readers of a linear layer's ``weight.dtype`` want to know."""
        return Fp8Weight(self.data, self.scale, self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.in_features)
        y = fp8_linear(flat, self.weight, self.x_scale, self.bias)
        return y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        scales = "per row" if self.x_scale is None else f"{float(self.x_scale):.3g}"
        return f"{self.in_features}, {self.out_features}, input scale {scales}"


def _check(x: Tensor, weight: Fp8Weight, out: Tensor | None) -> None:
    N, K = weight.data.shape
    if x.ndim != 2 or x.shape[1] != K:
        raise ValueError(f"x: expected shape [rows, {K}], got {list(x.shape)}")
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"x: expected bfloat16, float16 or float32, got {x.dtype}")
    if out is not None and tuple(out.shape) != (len(x), N):
        raise ValueError(f"out: expected shape {[len(x), N]}, got {list(out.shape)}")


def _require(device: torch.device) -> None:
    fine, reason = supported(device)
    if not fine:
        raise ValueError(f"device {device}: {reason}")
