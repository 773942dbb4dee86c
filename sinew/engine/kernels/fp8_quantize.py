"""Activations to e4m3, for :mod:`sinew.engine.kernels.fp8_product`.

e4m3 has three bits of mantissa, no infinity and 448 as its largest number. What a larger one becomes, NaN or 448,
depends on who converts it and on PyTorch's version, so values are clamped first. The scale is the tensor's, known
from calibration, or each row's own: the whole row lies in registers anyway, so its largest value costs no pass of
its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sinew.engine.kernels.lang import check, kernel, same_dtype, tl, wait_for_input
from sinew.engine.kernels.launch import Launch, Tile
from sinew.engine.kernels.tuning import tile_for

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
SMALLEST = 2.0**-40  # what a row of zeros is scaled by, so that nothing is divided by zero
LONGEST_ROW = 1 << 15  # elements that one program holds in registers


@kernel
def on_the_grid(x):
    """x rounded to a number of e4m3, to nearest, ties to even: its conversion then is exact.

    For the interpreter alone, whose conversion does not carry out of the mantissa (127.9 becomes 64).
    """
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)  # 2^exponent
    step = tl.maximum(power, 0.015625) * 0.125
    return ((x / step + 12582912.0) - 12582912.0) * step


@kernel
def fp8_quantize_kernel(
    x,  # [M, K]
    x_scale,  # float32 [1] or None: each row's own
    data,  # e4m3 [M, K]
    scales,  # float32 [M]
    x_row,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK_K)
    ok = cols < K
    wait_for_input(PDL)
    wide = tl.load(x + row * x_row + cols, mask=ok, other=0.0).to(tl.float32)
    if x_scale is None:
        scale = tl.div_rn(tl.maximum(tl.max(tl.abs(wide), axis=0), 9.094947017729282e-13), 448.0)
    else:
        scale = tl.load(x_scale)
    y = tl.minimum(tl.maximum(tl.div_rn(wide, scale), -448.0), 448.0)
    if UPCAST:
        y = on_the_grid(y)
    tl.store(data + row * K + cols, y.to(data.dtype.element_ty), mask=ok)
    tl.store(scales + row, scale)


def prepare(
    x: Tensor,
    data: Tensor,
    scales: Tensor,
    *,
    x_scale: Tensor | None = None,
    tile: Tile | None = None,
    pdl: bool = False,
) -> Launch:
    M, K = x.shape
    check("x", x, (M, K), rows_apart=True)
    check("data", data, (M, K))
    check("scales", scales, (M,))
    same_dtype("data", data, E4M3)
    same_dtype("scales", scales, torch.float32)
    if K > LONGEST_ROW:
        raise ValueError(f"x: expected rows of at most {LONGEST_ROW} elements, got {K}")
    if x_scale is not None:
        check("x_scale", x_scale.reshape(-1), (1,))
        same_dtype("x_scale", x_scale, torch.float32)
    tile = tile or tile_for("fp8_quantize", (M, K), x.dtype, x.device)
    arguments = {
        "x": x,
        "x_scale": x_scale,
        "data": data,
        "scales": scales,
        "x_row": x.stride(0),
        "K": K,
        "BLOCK_K": 1 << (K - 1).bit_length(),
        "UPCAST": False,
        "PDL": pdl,
    }
    return Launch(fp8_quantize_kernel, (M,), arguments, tile, pdl)


def fp8_quantize(
    x: Tensor, *, data: Tensor | None = None, scales: Tensor | None = None, **options
) -> tuple[Tensor, Tensor]:
    """x: [M, K] -> (e4m3 [M, K], float32 [M]) as :func:`twin`."""
    data = torch.empty(x.shape, dtype=E4M3, device=x.device) if data is None else data
    scales = torch.empty(len(x), dtype=torch.float32, device=x.device) if scales is None else scales
    prepare(x, data, scales, **options)()
    return data, scales


def twin(x: Tensor, *, x_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(data, scales) with ``x ~ data * scales``: values clamped to 448 and rounded to nearest, ties to even.

    x_scale: float32 scalar, of the tensor. None: of each row, its largest value / 448. Values are finite.
    """
    wide = x.float()
    if x_scale is None:
        # By a tensor: a GPU turns the division by a number into a product with its reciprocal, one bit away.
        amax = wide.abs().amax(-1).clamp(min=SMALLEST)
        scales = amax / torch.full_like(amax, LARGEST)
    else:
        scales = x_scale.float().reshape(1).expand(len(x)).contiguous()
    return (wide / scales[:, None]).clamp(-LARGEST, LARGEST).to(E4M3), scales
