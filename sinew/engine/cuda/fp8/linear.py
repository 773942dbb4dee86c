"""Linear layers in FP8 (format e4m3 for weights and activations): half the bytes of bfloat16, and twice its speed.

Weights have one scale per output channel and are converted once. The input of a layer has one scale from calibration
(``scales.py``). No scale depends on k, so both scales can be applied after the sum:
``y[m, n] = s * w[n] * sum_k x[m, k] * W[n, k]``. PyTorch computes this with ``torch._scaled_mm``, which reads s for
each row.

Devices without FP8 arithmetic (compute capability below 8.9) are rejected. On a CPU, a reference emulates the layers:
numbers are converted to e4m3 and back, and then multiplied in float32.
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
    """A weight in e4m3: ``weight`` is approximately ``data * scale[:, None]``.

    Attributes:
        data: e4m3 [out, in], contiguous.
        scale: float32 [out].
        dtype: Dtype of the original layer, and of its products.
    """

    data: Tensor
    scale: Tensor
    dtype: torch.dtype = torch.bfloat16

    def wide(self) -> Tensor:
        """Return the weight in float32, [out, in]."""
        return self.data.float() * self.scale[:, None]


def supported(device: torch.device) -> tuple[bool, str]:
    """Return True if a device can compute in FP8, and the reason for the answer. A CPU emulates FP8."""
    if device.type != "cuda":
        return True, "emulated by the reference"
    capability = tiles.capability(device)
    reason = f"FP8 needs compute capability {NEEDS / 10}, and this device has {capability / 10}"
    return capability >= NEEDS, reason


def unfit(weight: Tensor) -> str | None:
    """Return the reason why a weight cannot be stored in FP8, or None."""
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
    """Convert a weight, [out, in], to e4m3. The scale of an output channel is its largest magnitude / 448.

    Raises:
        ValueError: The shape does not fit, a number is not finite, or the device has no FP8.
    """
    if why := unfit(weight):
        raise ValueError(f"weight: {why}")
    _require(weight.device)
    if not weight.is_meta and not torch.isfinite(weight).all():
        raise ValueError("weight: expected finite numbers, got NaN or infinity")
    return by_channel(weight)


def by_channel(weight: Tensor) -> Fp8Weight:
    """Convert a weight without checks."""
    wide = weight.float()
    amax = wide.abs().amax(-1).clamp(min=fp8_quantize.SMALLEST)
    # Divide by a tensor. A GPU replaces the division by a number by a product with its reciprocal, which can differ in
    # the last bit.
    scale = amax / torch.full_like(amax, fp8_quantize.LARGEST)
    data = fp8_quantize.rounded(wide / scale[:, None])
    dtype = weight.dtype if weight.dtype in (torch.float16, torch.float32) else torch.bfloat16
    return Fp8Weight(data.contiguous(), scale.contiguous(), dtype)


def fp8_linear(x: Tensor, weight: Fp8Weight, x_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x times an FP8 weight, [M, N] in ``weight.dtype``.

    On a GPU, one launch converts x and one launch multiplies. The converted x is allocated, which is allowed in a
    recording.

    Args:
        x: [M, K] in bfloat16, float16 or float32.
        weight: The weight.
        x_scale: float32 scalar on x's device, from calibration.
        bias: [N], or None.
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
    """Return the product of converted activations and an FP8 weight, [M, N] in ``weight.dtype``. On a CPU, the
    reference computes.

    Args:
        data: e4m3 [M, K], as the kernels write it.
        scales: float32 [M].
        weight: The weight.
        bias: [N], or None.
    """
    product = reference if data.device.type == "cpu" else library_product
    return product(data, scales, weight, bias)


def library_product(data: Tensor, scales: Tensor, weight: Fp8Weight, bias: Tensor | None = None) -> Tensor:
    """Compute :func:`multiply` with PyTorch's cuBLAS or CUTLASS product, rounded to bfloat16 for every dtype.

    PyTorch has no other product with scales per row. The tensor cores of Hopper GPUs add e4m3 products with fewer bits
    than float32. With fast accumulation, as here, these sums are not corrected.
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
    """Define :func:`multiply`: convert both factors to float32, multiply them, and round the result once."""
    y = (data.float() * scales[:, None]) @ weight.wide().T
    return (y if bias is None else y + bias.float()).to(weight.dtype)


class Fp8Linear(nn.Module):
    """An FP8 layer that replaces a :class:`sinew.layers.linear.Linear`, with the same ``forward(x)`` and the same
    output dtype."""

    linear_in_weight = True
    data: Tensor
    scale: Tensor
    bias: Tensor | None
    x_scale: Tensor

    def __init__(self, weight: Fp8Weight, x_scale: Tensor, bias: Tensor | None = None):
        super().__init__()
        self.out_features, self.in_features = weight.data.shape
        self.dtype = weight.dtype
        self.register_buffer("data", weight.data)
        self.register_buffer("scale", weight.scale)
        self.register_buffer("bias", bias)
        self.register_buffer("x_scale", x_scale)

    @classmethod
    def of(cls, linear: nn.Linear, x_scale: float) -> Fp8Linear:
        """Convert a linear layer.

        Args:
            linear: The layer.
            x_scale: The scale of the layer's input, from calibration.

        Raises:
            ValueError: The scale is invalid, or :func:`quantize_weight` cannot convert the weight.
        """
        if not 0 < x_scale < float("inf"):
            raise ValueError(f"x_scale: expected a finite number above 0, got {x_scale}")
        scale = torch.full((), x_scale, dtype=torch.float32, device=linear.weight.device)
        bias = None if linear.bias is None else linear.bias.detach()
        return cls(quantize_weight(linear.weight.detach()), scale, bias)

    @property
    def weight(self) -> Fp8Weight:
        """Return the weight.

        It has the attribute ``dtype``, which other code reads from the weight of any linear layer.
        """
        return Fp8Weight(self.data, self.scale, self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.in_features)
        y = fp8_linear(flat, self.weight, self.x_scale, self.bias)
        return y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, input scale {float(self.x_scale):.3g}"


def _require(device: torch.device) -> None:
    fine, reason = supported(device)
    if not fine:
        raise ValueError(f"device {device}: {reason}")
