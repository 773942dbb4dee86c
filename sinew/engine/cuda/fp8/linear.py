"""Linear layers in FP8: weights and activations in e4m3, half of bfloat16's bytes and twice its rate.

Weights have one scale per output channel and are converted once. Activations have one scale from calibration
(``scales.py``), or one per row, found while they are converted. Neither scale varies along the depth, so both leave
the sum: ``y[m, n] = s[m] * w[n] * sum_k x[m, k] * W[n, k]``, which is ``torch._scaled_mm`` with scales of rows.

The tensors of a device without FP8 arithmetic (compute capability below 8.9) are refused. On a CPU the reference
computes, which is what the layers mean: conversion to e4m3 and back, and a product in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sinew.engine.cuda.kernels import fp8_quantize, tiles

NEEDS = 89  # least compute capability for FP8 products, times 10
DIVISOR = 16  # PyTorch's product requires that both sizes of a weight are multiples of this number


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """``weight ~ data * scale[:, None]``.

    Attributes:
        data: e4m3 [out, in], contiguous.
        scale: float32 [out].
        dtype: Dtype of the original layer, and of its products.
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
    for name, size in (("output", weight.shape[0]), ("input", weight.shape[1])):
        if size % DIVISOR:
            return f"expected an {name} size that is a multiple of {DIVISOR}, got {size}"
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
    x: Tensor, weight: Fp8Weight, x_scale: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """x: [M, K], bfloat16, float16 or float32 -> [M, N] in ``weight.dtype``.

    x_scale: float32 scalar on x's device, from calibration; None: a scale per row. Two launches on a GPU, one
    that converts x and one that multiplies; their intermediate is allocated, which a graph's capture may do.
    """
    N, K = weight.data.shape
    if x.ndim != 2 or x.shape[1] != K:
        raise ValueError(f"x: expected shape [rows, {K}], got {list(x.shape)}")
    if x.dtype not in fp8_quantize.FLOATING:
        raise ValueError(f"x: expected bfloat16, float16 or float32, got {x.dtype}")
    if x.device.type != "cuda":
        return reference(*fp8_quantize.reference(x, x_scale=x_scale), weight, bias)
    _require(x.device)
    return multiply(*fp8_quantize.fp8_quantize(x, x_scale=x_scale), weight, bias)


def multiply(data: Tensor, scales: Tensor, weight: Fp8Weight, bias: Tensor | None = None) -> Tensor:
    """data: e4m3 [M, K], scales: float32 [M], as the kernels leave them -> [M, N] in ``weight.dtype``.

    On a CPU the reference.
    """
    product = reference if data.device.type == "cpu" else library_product
    return product(data, scales, weight, bias)


def library_product(data: Tensor, scales: Tensor, weight: Fp8Weight, bias: Tensor | None = None) -> Tensor:
    """Compute :func:`multiply` with PyTorch's cuBLAS or CUTLASS product, rounded to bfloat16 for every dtype.

    There is no other product with scales of rows. Hopper's tensor cores add e4m3 products with fewer bits than
    float32, and fast accumulation uses their result.
    """
    y = torch._scaled_mm(  # noqa: SLF001 - the public function calls this one, and it was measured
        data,
        weight.data.t(),
        scale_a=scales[:, None],
        scale_b=weight.scale[None],
        bias=None if bias is None else bias.to(torch.bfloat16),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return y.to(weight.dtype)


def reference(data: Tensor, scales: Tensor, weight: Fp8Weight, bias: Tensor | None = None) -> Tensor:
    """Define :func:`multiply`: both dequantised, multiplied in float32, rounded once."""
    y = (data.float() * scales[:, None]) @ weight.wide().T
    return (y if bias is None else y + bias.float()).to(weight.dtype)


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
            # Check the value before the move, because a tensor on the meta device has no value.
            if not 0 < float(x_scale) < float("inf"):
                raise ValueError(f"x_scale: expected a finite number above 0, got {float(x_scale)}")
            x_scale = x_scale.to(device)
        bias = None if linear.bias is None else linear.bias.detach()
        return cls(quantize_weight(linear.weight.detach()), bias, x_scale)

    @property
    def weight(self) -> Fp8Weight:
        """The weight, with the ``weight.dtype`` that readers of a linear layer expect."""
        return Fp8Weight(self.data, self.scale, self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.in_features)
        y = fp8_linear(flat, self.weight, self.x_scale, self.bias)
        return y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        scales = "per row" if self.x_scale is None else f"{float(self.x_scale):.3g}"
        return f"{self.in_features}, {self.out_features}, input scale {scales}"


def _require(device: torch.device) -> None:
    fine, reason = supported(device)
    if not fine:
        raise ValueError(f"device {device}: {reason}")
