"""Low-bit weights: their storage, their values, and the product that uses them.

Every format stores a matrix [channels, k] row by row as bytes, so that a bundle's tensor is used without a copy. A
weight is ``scale * (code - offset)``. The product rounds each row of activations to int8 and adds integers:

    s = 127 / max(max|x|, smallest),  q = round(x * s)                      half to even, float32
    y = (sum over groups of scale * sum(q * (code - offset))) / s + bias    inner sums exact, outer float32 in order

``sinew/bundle/quant.py`` describes the formats. For ternary weights the product is that of BitNet (Wang et al. 2023,
section 2, with ``smallest`` = 1e-5). All operations after the exact sums are rounded in one fixed order, so a compiled
kernel gives the same bits as the reference in this file.

Weights in bfloat16 (:data:`BF16_PANELS`) use activations that are rounded to bfloat16, to nearest even. The products
are added in float32, and rounded to nearest even after each addition, in the order 1, 0, 3, 2, ... of k. Numbers below
2^-126 count as zeros. The instruction ``vdpbf16ps`` adds in this way (Intel 64 and IA-32 manual, volume 2; AMD's Zen 4
gives the same bits).

:data:`BF16_TILES` are the same weights in the same layout, added in the order of the AMX instruction ``tdpbf16ps``. In
each group of 32 values of k, the even values form one sum and the odd values form another. Each sum starts at zero and
adds in the order of k, each step a fused multiply-add. Then ``y = y + (even + odd)``. Each step rounds to nearest even,
and numbers below 2^-126 count as zeros.

Two more orders of the same weights are for ARM. :data:`BF16_FUSED` adds the products in the order of k. Each step is a
fused multiply-add in float32 (the instruction ``fmla``), rounded to nearest even. Numbers below 2^-126 are not flushed.

:data:`BF16_ODD` adds in the order of the instruction ``bfmmla``: ``y = y + (x0 * w0 + x1 * w1)`` for each pair of k.
Each product and each sum is rounded to odd: an inexact result is cut off, and its last bit is set. Numbers below 2^-126
count as zeros (Arm Architecture Reference Manual for A-profile, ``BFMMLA`` with ``FPCR.EBF`` = 0, which Linux sets).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

PANELS = "int8-panels"  # int8 in the order of lay_out, for kernels that read this order
FOURS = "int8-fours"  # the same with signed codes, for sdot on ARM
EIGHTS = "int8-eights"  # signed codes, with 8 neighbouring values of k, for smmla on ARM
INTEGERS = (PANELS, FOURS, EIGHTS)
BF16_PANELS = "bf16-panels"  # bfloat16 in the order of lay_out
BF16_TILES = "bf16-tiles"  # the layout of BF16_PANELS; products are added in another order
BF16_FUSED = "bf16-fused"  # the same layout, in the order of fused multiply-adds
BF16_ODD = "bf16-odd"  # the same layout, in the order of bfmmla
HALVES = (
    BF16_TILES,
    BF16_PANELS,
    BF16_ODD,
    BF16_FUSED,
)  # summation orders of bfloat16, on each CPU the faster one first
CHANNELS = 16  # output channels in a panel
TILE = 32  # values of k in one tile of bfloat16
LARGEST = 127  # An int8 activation is at most this number.
TINY = 1e-30  # The largest activation of a row counts as at least this number.


def codes(weight: Tensor, name: str, k: int) -> Tensor:
    """Unpack the stored rows of a weight to low-bit integers (codes).

    Args:
        weight: uint8 [N, bytes].
        name: Name of the format.
        k: Number of weights in a row.

    Returns:
        The codes minus the format's offset, int8 [N, k].
    """
    if name == "int8":
        return weight.view(torch.int8)
    if name in INTEGERS:
        return laid_back(weight, name).view(torch.int8)
    # sinew.bundle.quant requires gguf, which may be missing on a machine that uses only a GPU.
    from sinew.bundle.quant import FORMATS

    offset, rows = FORMATS[name].offset, weight.shape[0]
    if name == "ternary":  # Byte j of 16 contains the weights j, 16 + j, 32 + j and 48 + j of 64.
        packed = weight.view(rows, -1, 1, 16)
        shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=weight.device)
        spread = (packed >> shifts[:, None]) & 3  # [N, K / 64, 4, 16]
        return spread.view(rows, -1)[:, :k].to(torch.int8) - offset
    blocks = weight.view(rows, k // 32, -1)[..., 2:]
    if name == "q8_0":
        return blocks.reshape(rows, k).view(torch.int8)
    nibbles = torch.cat([blocks & 15, blocks >> 4], dim=-1)  # [N, K / 32, 32]
    return nibbles.view(rows, k).to(torch.int8) - offset


def lies_in_panels(rows: int, k: int) -> bool:
    """Return True if int8 weights [rows, k] can be divided into panels, the blocks of 16 output channels that
    the kernels read.
    """
    return rows % CHANNELS == 0 and k % 8 == 0


def lay_out(weight: Tensor, order: str = PANELS) -> Tensor:
    """Reorder a weight for the kernels.

    A panel has 16 channels. An int8 panel is [k / 4][16][4]. In the order :data:`PANELS`, its codes are stored with an
    offset of 128, as unsigned numbers, because ``vpdpbusd`` multiplies unsigned numbers. In the order :data:`EIGHTS`, a
    panel is [k / 8][16][8]. A bfloat16 panel is [k / 2][16][2].

    Args:
        weight: int8 codes as uint8 [N, k], or bfloat16 [N, k].
        order: The order of int8 codes, one of :data:`INTEGERS`.

    Returns:
        uint8 [N, k] in the given order, or uint8 [N, 2 k] in the order of :data:`BF16_PANELS`.
    """
    if weight.dtype == torch.bfloat16:
        return _turned(weight.view(torch.int32), CHANNELS).view(torch.uint8)
    laid = _turned(weight.view(_unit(order)), CHANNELS).view(torch.uint8)
    return laid ^ 0x80 if order == PANELS else laid


def _unit(order: str) -> torch.dtype:
    """Return the integer type of a unit, the neighbouring values of k of one channel."""
    return torch.int64 if order == EIGHTS else torch.int32


def _turned(units: Tensor, height: int) -> Tensor:
    """Transpose each block of ``height`` rows of units [N, M].

    A second call with a height of M / 16 reverses the first call.
    """
    turned = units.view(len(units) // CHANNELS, height, -1).transpose(1, 2)
    # A copy, because contiguous() would keep the strides of a side of length 1, and view() rejects them for bytes.
    return turned.clone(memory_format=torch.contiguous_format).view(units.shape)


def lay_out_into(weight: Tensor, panels: Tensor, order: str = PANELS) -> None:
    """Write the result of :func:`lay_out` for ``weight`` to ``panels``, which has the same shape."""
    panels.copy_(lay_out(weight, order))


def laid_back(weight: Tensor, order: str = PANELS) -> Tensor:
    """Convert int8 weights from the memory layout of the kernels (:func:`lay_out`) back to plain rows."""
    return _laid_back(weight ^ 0x80 if order == PANELS else weight, _unit(order))


def _laid_back(panels: Tensor, unit: torch.dtype = torch.int32) -> Tensor:
    return _turned(panels.view(unit), panels.shape[1] // unit.itemsize).view(torch.uint8)


def group_scales(weight: Tensor, k: int) -> Tensor:
    """Return the scales that are stored in the rows of a weight, float32 [N, k / 32]."""
    halves = weight.view(weight.shape[0], k // 32, -1)[..., :2].contiguous()
    return halves.view(torch.float16)[..., 0].float()


def scales_of(weight: Tensor, scale: Tensor | None, k: int) -> Tensor:
    """Return the scales of a low-bit weight as float32 [N, groups].

    Args:
        weight: Stored rows, uint8 [N, bytes].
        scale: float32 [N] or [1]. None reads the scales from the rows.
        k: Number of weights in a row.
    """
    if scale is None:
        return group_scales(weight, k)
    return scale.expand(weight.shape[0])[:, None]


def dequantize(weight: Tensor, scale: Tensor | None, name: str, k: int) -> Tensor:
    """Return the weights as float32 [N, k]. The values equal those of the ``gguf`` package for its formats.

    Args:
        weight: Stored rows, uint8 [N, bytes].
        scale: float32 [N] or [1]. None if the rows contain their scales.
        name: Name of the format.
        k: Length of a row in weights.
    """
    if name in HALVES:
        return _laid_back(weight).view(torch.bfloat16).float()
    scales = scales_of(weight, scale, k)  # [N, G]
    values = codes(weight, name, k).view(len(weight), scales.shape[1], -1)
    return (values.float() * scales[..., None]).view(len(weight), k)


def quantize_rows(x: Tensor, smallest: float) -> tuple[Tensor, Tensor]:
    """Round each row of activations to int8.

    Args:
        x: float32 [M, K].
        smallest: Lower bound of the largest activation of a row.

    Returns:
        Whole numbers as float32 [M, K], and the scale of each row, [M, 1]. The scale is NaN if a number of the row is
        not finite.
    """
    largest = x.abs().amax(-1, keepdim=True)
    finite = torch.isfinite(largest)
    largest = torch.where(finite, largest, 1.0).clamp(min=smallest)
    # Do not divide a number by a tensor: torch computes that as a product with the reciprocal, which has other bits.
    scale = torch.full_like(largest, LARGEST) / largest
    whole = torch.where(finite, torch.round(x * scale), 0.0)
    return whole, torch.where(finite, scale, torch.nan)


def reference(
    x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, name: str, smallest: float
) -> Tensor:
    """Compute the product of activations and a low-bit weight in plain PyTorch.

    The kernels must give exactly the same bits.

    Args:
        x: float32 [M, K].
        weight: uint8 [N, bytes] in format ``name``.
        scale: float32 [N] or [1]. None if the rows contain their scales.
        bias: float32 [N].
        name: Name of the format.
        smallest: Lower bound of the largest activation of a row.

    Returns:
        float32 [M, N].
    """
    K = x.shape[1]
    if name in HALVES:
        y = _SUMS[name](x, dequantize(weight, None, name, K))
        return y if bias is None else y + bias
    whole, steps = quantize_rows(x, smallest)
    weights = codes(weight, name, K)
    scales = scales_of(weight, scale, K)  # [N, G]
    size = K // scales.shape[1]
    # A sum of 32 products (formats with scales in their rows) stays below 2^24, where float32 is exact. A longer sum
    # needs float64.
    wide = torch.float32 if scale is None else torch.float64
    y = x.new_zeros(x.shape[0], weight.shape[0])
    for g, each in enumerate(scales.unbind(1)):
        part = slice(g * size, (g + 1) * size)
        y = y + (whole[:, part].to(wide) @ weights[:, part].to(wide).T).float() * each
    y = y * steps.reciprocal()
    return y if bias is None else y + bias


def _in_pairs(x: Tensor, weights: Tensor) -> Tensor:
    """Multiply x by the transposed weights, and add the products in the order of :data:`BF16_PANELS`.

    Each sum is computed in float64, which has enough bits for a correct rounding to float32.

    Args:
        x: float32 [M, K].
        weights: float32 [N, K] with bfloat16 values.

    Returns:
        float32 [M, N].
    """
    x, weights = _normal(_normal(x).bfloat16().double()), _normal(weights).double()
    y = torch.zeros(len(x), len(weights))
    for i in range(x.shape[1]):
        at = i ^ 1
        y = _normal((y.double() + x[:, at, None] * weights[:, at]).float())
    return y


def _in_tiles(x: Tensor, weights: Tensor) -> Tensor:
    """Multiply x by the transposed weights, as :func:`_in_pairs` does, but add the products in the order of
    :data:`BF16_TILES`.
    """
    x, weights = _normal(_normal(x).bfloat16().double()), _normal(weights).double()
    y = torch.zeros(len(x), len(weights))
    for first in range(0, x.shape[1], TILE):
        sums = [torch.zeros_like(y), torch.zeros_like(y)]
        for at in range(first, min(first + TILE, x.shape[1])):
            sums[at % 2] = _normal((sums[at % 2].double() + x[:, at, None] * weights[:, at]).float())
        y = _normal(y + _normal(sums[0] + sums[1]))
    return y


def _fused(x: Tensor, weights: Tensor) -> Tensor:
    """Multiply x by the transposed weights, as :func:`_in_pairs` does, but add the products in the order of
    :data:`BF16_FUSED`.
    """
    x, weights = x.bfloat16().double(), weights.double()
    y = torch.zeros(len(x), len(weights))
    for at in range(x.shape[1]):
        y = (y.double() + x[:, at, None] * weights[:, at]).float()
    return y


def _to_odd(x: Tensor, weights: Tensor) -> Tensor:
    """Multiply x by the transposed weights, as :func:`_in_pairs` does, but add the products in the order of
    :data:`BF16_ODD`.
    """
    x, weights = _normal(x.bfloat16().double()), _normal(weights).double()
    y = torch.zeros(len(x), len(weights), dtype=torch.float64)
    for at in range(0, x.shape[1], 2):
        # A product of two bfloat16 values has 16 bits, so its rounding changes only what is too large or too small.
        first, second = (_normal((x[:, i, None] * weights[:, i]).float()).double() for i in (at, at + 1))
        y = _add_to_odd(y, _add_to_odd(first, second))
    return y.float()


def _add_to_odd(a: Tensor, b: Tensor) -> Tensor:
    """Return a + b rounded to odd: the float32 value towards zero, with its last bit set if the sum is inexact. Numbers
    below 2^-126 count as zeros.

    Args:
        a: float64 with float32 values.
        b: The same, in the same shape.
    """
    total = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)  # the exact sum is total + error (Knuth's TwoSum)
    inexact = total.isfinite() & (error != 0)
    bits = total.view(torch.int64)
    bits = bits - (inexact & (error.signbit() != total.signbit())).long()  # the float64 value towards zero
    bits = torch.where(inexact, bits | 1, bits)
    rest = bits & ((1 << 29) - 1)  # the bits for which float32 has no room
    odd = ((bits - rest) | ((rest != 0).long() << 29)).view(torch.float64)
    return _normal(torch.where(total.isfinite(), odd, total).float()).double()


_SUMS = {BF16_PANELS: _in_pairs, BF16_TILES: _in_tiles, BF16_FUSED: _fused, BF16_ODD: _to_odd}


def _normal(t: Tensor) -> Tensor:
    """Return ``t`` with zeros in place of numbers below 2^-126."""
    return torch.where(t.abs() < torch.finfo(torch.float32).tiny, 0.0, t)


def reference_all(
    x: Tensor,
    weights: Sequence[Tensor],
    scales: Sequence[Tensor | None],
    biases: Sequence[Tensor | None],
    name: str,
    smallest: float,
) -> list[Tensor]:
    """Compute the low-bit product (:func:`reference`) for several layers with the same input x. Each list has
    one entry per layer.
    """
    layers = zip(weights, scales, biases, strict=True)
    return [reference(x, weight, scale, bias, name, smallest) for weight, scale, bias in layers]


LayOut = Callable[..., None]  # as lay_out_into
MultiplyAll = Callable[
    [Tensor, Sequence[Tensor], "Sequence[Tensor | None]", "Sequence[Tensor | None]", str, float], list[Tensor]
]
# The entry is the implementation of the low-bit product that the operators use on CPUs.
_on_cpu: list[MultiplyAll] = [reference_all]


def installed() -> MultiplyAll:
    """Return the implementation of the low-bit product that the operators use on CPUs."""
    return _on_cpu[0]


def install(multiply_all: MultiplyAll) -> None:
    """Make the operators use ``multiply_all`` for low-bit products on CPUs. Every bit of its result must
    equal that of :func:`reference_all`.
    """
    _on_cpu[:] = [multiply_all]


def _compute(x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, *rest: Any) -> Tensor:
    return _on_cpu[0](x, [weight], [scale], [bias], *rest)[0]


def _compute_all(*arguments: Any) -> list[Tensor]:
    return _on_cpu[0](*arguments)


def _shape(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _shapes(x: Tensor, weights: Sequence[Tensor], *_: Any) -> list[Tensor]:
    return [_shape(x, weight) for weight in weights]


_LIBRARY = torch.library.Library("sinew", "FRAGMENT")
_LIBRARY.define(
    "lowbit_linear(Tensor x, Tensor weight, Tensor? scale, Tensor? bias, str name, float smallest) -> Tensor"
)
_LIBRARY.define(
    "lowbit_linears(Tensor x, Tensor[] weights, Tensor?[] scales, Tensor?[] biases, str name, float smallest)"
    " -> Tensor[]"
)
_LIBRARY.impl("lowbit_linear", _compute, "CPU")
_LIBRARY.impl("lowbit_linear", reference, "CompositeExplicitAutograd")
_LIBRARY.impl("lowbit_linears", _compute_all, "CPU")
_LIBRARY.impl("lowbit_linears", reference_all, "CompositeExplicitAutograd")
torch.library.register_fake("sinew::lowbit_linear", _shape, lib=_LIBRARY)
torch.library.register_fake("sinew::lowbit_linears", _shapes, lib=_LIBRARY)


def lowbit_linear(
    x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, name: str, smallest: float = TINY
) -> Tensor:
    """Compute a low-bit product as one PyTorch operator, so that exporters and tracers record one node.

    The gradient for x is that of the product with the stored weights, as if x had not been rounded.

    Args:
        x: float32 [..., K].
        weight: uint8 [N, bytes] in format ``name``.
        scale: float32 [N] or [1]. None if the rows contain their scales.
        bias: float32 [N].
        name: Name of the format.
        smallest: Lower bound for the largest activation of a row.

    Returns:
        float32 [..., N].
    """
    flat = x.reshape(-1, x.shape[-1])
    y = torch.ops.sinew.lowbit_linear(flat, weight, scale, bias, name, smallest)
    # The gradient is that of a product with the stored weights, as if x had not been rounded.
    if x.requires_grad:
        wide = flat @ dequantize(weight, scale, name, x.shape[-1]).T
        y = wide + (y - wide).detach()
    return y.view(*x.shape[:-1], weight.shape[0])


def lowbit_linears(
    x: Tensor,
    weights: Sequence[Tensor],
    scales: Sequence[Tensor | None],
    biases: Sequence[Tensor | None],
    name: str,
    smallest: float = TINY,
) -> list[Tensor]:
    """Compute :func:`lowbit_linear` for several layers with the same input x. Each list has one entry per layer.

    The rows of x are rounded once, for all layers.
    """
    if x.requires_grad:
        layers = zip(weights, scales, biases, strict=True)
        return [lowbit_linear(x, *layer, name, smallest) for layer in layers]
    flat = x.reshape(-1, x.shape[-1])
    products = torch.ops.sinew.lowbit_linears(flat, weights, scales, biases, name, smallest)
    return [y.view(*x.shape[:-1], y.shape[-1]) for y in products]
