"""Convert activations to e4m3, for a product of :mod:`sinew.engine.cuda.fp8.linear`.

e4m3 has three bits of mantissa, no infinity, and 448 as its largest number. Larger values become NaN or 448, depending
on the converter and on PyTorch's version, so values are clamped first.

The scale of the tensor comes from calibration. The kernels also write it once per row, because the product reads a
scale per row. Kernels that write e4m3 themselves (:mod:`.row_norm`, :mod:`.activate`) share the conversion in this
module.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sinew.engine.cuda.kernels.lang import check, kernel, same_dtype, tl
from sinew.engine.cuda.kernels.launch import Launch, Tile
from sinew.engine.cuda.kernels.tiles import capability, tile_for

E4M3 = torch.float8_e4m3fn
FLOATING = (torch.float32, torch.bfloat16, torch.float16)
NEEDS = 89  # least compute capability for the conversion, times 10
LARGEST = 448.0  # the largest number in e4m3
# A scale is computed from at least this magnitude, so that zeros cause no division by zero.
SMALLEST = 2.0**-40
LONGEST_ROW = 1 << 15  # the largest number of elements that one program can have in registers


@kernel
def on_the_grid(x):
    """Return x rounded to the nearest number of e4m3, ties to even. Its conversion is then exact.

    Only Triton's interpreter needs this function, because its conversion does not carry out of the mantissa (127.9
    becomes 64).
    """
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)  # 2^exponent of x
    step = tl.maximum(power, 0.015625) * 0.125
    return ((x / step + 12582912.0) - 12582912.0) * step


@kernel
def to_e4m3(wide, scale, UPCAST: tl.constexpr):
    """Return wide / scale as e4m3: divided exactly, clamped, rounded to nearest."""
    y = tl.minimum(tl.maximum(tl.div_rn(wide, scale), -448.0), 448.0)
    if UPCAST:
        y = on_the_grid(y)
    return y.to(tl.float8e4nv)


@kernel
def fp8_quantize_kernel(
    x,  # [M, K]
    x_scale,  # float32 [1]
    data,  # e4m3 [M, K]
    scales,  # float32 [M]
    x_row,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK_K)
    ok = cols < K
    wide = tl.load(x + row * x_row + cols, mask=ok, other=0.0).to(tl.float32)
    scale = tl.load(x_scale)
    tl.store(data + row * K + cols, to_e4m3(wide, scale, UPCAST), mask=ok)
    tl.store(scales + row, scale)


def prepare(
    x: Tensor,
    data: Tensor,
    scales: Tensor,
    *,
    x_scale: Tensor,
    tile: Tile | None = None,
) -> Launch:
    M, K = x.shape
    check("x", x, (M, K), rows_apart=True)
    check("data", data, (M, K))
    same_dtype("data", data, E4M3)
    check_row("x", K)
    check_output("data", data, scales, x_scale)
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
    }
    return Launch(fp8_quantize_kernel, (M,), arguments, tile)


def check_row(what: str, elements: int) -> None:
    if elements > LONGEST_ROW:
        raise ValueError(f"{what}: expected rows of at most {LONGEST_ROW} elements, got {elements}")


def check_output(what: str, out: Tensor, scales: Tensor | None, x_scale: Tensor | None) -> None:
    """Check that kernels can write ``out``, and that both scales are present exactly for e4m3.

    Raises:
        ValueError: The dtype is not supported, or the scales do not fit.
    """
    if out.dtype != E4M3:
        if out.dtype not in FLOATING:
            raise ValueError(f"{what}: expected dtype float32, bfloat16, float16 or {E4M3}, got {out.dtype}")
        for name, tensor in (("scales", scales), ("x_scale", x_scale)):
            if tensor is not None:
                raise ValueError(f"{name}: can only be passed if {what} is {E4M3}, got {out.dtype}")
        return
    for name, tensor, count in (("scales", scales, len(out)), ("x_scale", x_scale, 1)):
        if tensor is None:
            raise ValueError(f"{name}: must be passed if {what} is {E4M3}")
        check(name, tensor.reshape(-1), (count,))
        same_dtype(name, tensor, torch.float32)
    if out.device.type == "cuda" and (version := capability(out.device)) < NEEDS:
        raise ValueError(f"{what}: {E4M3} needs compute capability {NEEDS / 10}, got {version / 10}")


def new_output(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Return memory for the result and its scales. The scales are None unless ``dtype`` is e4m3."""
    scales = torch.empty(shape[0], dtype=torch.float32, device=device) if dtype == E4M3 else None
    return torch.empty(shape, dtype=dtype, device=device), scales


def converted(wide: Tensor, dtype: torch.dtype, x_scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return float32 rows rounded once to ``dtype``, and their scales. For e4m3, the result is that of
    :func:`reference`."""
    if dtype != E4M3:
        return wide.to(dtype), None
    assert x_scale is not None, "x_scale: must be passed for e4m3"
    return reference(wide, x_scale=x_scale)


def fp8_quantize(
    x: Tensor, *, x_scale: Tensor, data: Tensor | None = None, scales: Tensor | None = None, **options
) -> tuple[Tensor, Tensor]:
    """Compute :func:`reference` with the kernel: x [M, K] -> e4m3 [M, K] and float32 [M]."""
    data = torch.empty(x.shape, dtype=E4M3, device=x.device) if data is None else data
    scales = torch.empty(len(x), dtype=torch.float32, device=x.device) if scales is None else scales
    prepare(x, data, scales, x_scale=x_scale, **options)()
    return data, scales


def reference(x: Tensor, *, x_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3 data and scales, so that x is approximately data * scales.

    Args:
        x: [M, K], with finite values.
        x_scale: The scale of the tensor, float32 scalar.
    """
    scales = x_scale.float().reshape(1).expand(len(x)).contiguous()
    return rounded(x.float() / scales[:, None]), scales


def rounded(scaled: Tensor) -> Tensor:
    """Return numbers as e4m3: clamped to 448, and rounded to nearest, ties to even."""
    return scaled.clamp(-LARGEST, LARGEST).to(E4M3)
