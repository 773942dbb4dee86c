"""A linear layer whose weight stays in 8 or 4 bits in GPU memory. Activations keep their floating-point dtype.

For few rows, a product is limited by reading the weight, so a weight with a quarter of the bytes takes less time. A
program reads the integers (codes) of a block of the weight and converts them in its registers. The conversion is exact,
because bfloat16 contains all integers up to 256. A scale multiplies a sum, never a single weight:

    int8          y = scale * sum_k x * code                               a scale for each output channel
    q8_0, q4_0    y = sum over groups of (scale * sum over 32 of x * code)    a scale for each 32 weights of a row

Sums are float32. Groups are added in their order, and so are the blocks of ``tile.k`` of int8. Unlike the products of
the engine "cpu" (``sinew/layers/stores/lowbit.py``), this product does not round activations to int8.

This kernel has run in Triton's interpreter only, and was compiled for GPUs. It has never run on a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sinew.engine.cuda.kernels.fp8_quantize import FLOATING
from sinew.engine.cuda.kernels.lang import check, dot, kernel, same_dtype, tl
from sinew.engine.cuda.kernels.launch import Launch, Tile
from sinew.engine.cuda.kernels.tiles import tile_for

GROUP = 32  # weights of a row that share a scale
OFFSET = 8  # number that is subtracted from a code of 4 bits


@kernel
def as_float(codes, dtype: tl.constexpr, UPCAST: tl.constexpr):
    """Convert integers to ``dtype``. UPCAST converts to float32, because Triton's interpreter has no bfloat16."""
    if UPCAST:
        return codes.to(tl.float32)
    else:
        return codes.to(dtype)


@kernel
def weight_only_linear_kernel(
    x,  # [M, K]
    codes,  # int8 [N, K]; or uint8 [N, K / 2] with two codes in a byte
    scales,  # float32 [N], or float16 [N, K / 32]
    bias,  # [N] or None
    residual,  # [M, N] or None
    out,  # [M, N]
    M,
    x_row,
    residual_row,
    out_row,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUPED: tl.constexpr,  # True for a scale for each 32 weights
    NIBBLES: tl.constexpr,  # True for two codes in a byte
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    # Weights that share one sum of products.
    DEPTH: tl.constexpr = 32 if GROUPED else BLOCK_K
    GROUPS: tl.constexpr = K // 32
    WHOLE: tl.constexpr = K % BLOCK_K == 0  # no load along the depth needs a mask
    dtype: tl.constexpr = x.dtype.element_ty
    blocks_m = tl.cdiv(M, BLOCK_M)
    # Consecutive programs compute different rows with the same block of the weight, as in norm_linear.
    block = tl.program_id(0)
    rows = (block % blocks_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = (block // blocks_m) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_ok, col_ok = rows < M, cols < N
    ok = row_ok[:, None] & col_ok[None, :]
    x_rows = x + rows[:, None] * x_row
    # Load the operands of the epilogue before the loop: they arrive while the loop loads the weight.
    if not GROUPED:
        scale = tl.load(scales + cols, mask=col_ok, other=0.0)
    if bias is not None:
        bias_row = tl.load(bias + cols, mask=col_ok, other=0.0).to(tl.float32)[None, :]
    if residual is not None:
        before = residual + rows[:, None] * residual_row + cols[None, :]
        stream = tl.load(before, mask=ok, other=0.0).to(tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        for part in tl.static_range(BLOCK_K // DEPTH):
            at = k + part * DEPTH
            if NIBBLES:
                # Byte j of a group's 16 bytes contains weight j in its low bits and weight 16 + j in its high bits.
                half = tl.arange(0, 16)
                inside = WHOLE | (at + half < K)  # all True or all False, because K is a multiple of 32
                x_ok = row_ok[:, None] & inside[None, :]
                low_x = tl.load(x_rows + at + half[None, :], mask=x_ok, other=0.0)
                high_x = tl.load(x_rows + at + 16 + half[None, :], mask=x_ok, other=0.0)
                place = codes + cols[None, :] * (K // 2) + at // 2 + half[:, None]
                byte = tl.load(place, mask=inside[:, None] & col_ok[None, :], other=0)
                low = as_float((byte & 15).to(tl.int8) - 8, dtype, UPCAST)
                high = as_float((byte >> 4).to(tl.int8) - 8, dtype, UPCAST)
                total = dot(low_x, low, tl.zeros((BLOCK_M, BLOCK_N), tl.float32), UPCAST)
                total = dot(high_x, high, total, UPCAST)
            else:
                depth = at + tl.arange(0, DEPTH)
                inside = WHOLE | (depth < K)
                x_ok = row_ok[:, None] & inside[None, :]
                a = tl.load(x_rows + depth[None, :], mask=x_ok, other=0.0)
                place = codes + cols[None, :] * K + depth[:, None]
                code = tl.load(place, mask=inside[:, None] & col_ok[None, :], other=0)
                b = as_float(code, dtype, UPCAST)
                if GROUPED:
                    total = dot(a, b, tl.zeros((BLOCK_M, BLOCK_N), tl.float32), UPCAST)
                else:
                    acc = dot(a, b, acc, UPCAST)
            if GROUPED:
                scale_ok = col_ok & (WHOLE | (at < K))
                own = tl.load(scales + cols * GROUPS + at // 32, mask=scale_ok, other=0.0)
                acc += total * own.to(tl.float32)[None, :]
    if not GROUPED:
        acc *= scale[None, :]
    if bias is not None:
        acc += bias_row
    if residual is not None:
        acc += stream
    tl.store(out + rows[:, None] * out_row + cols[None, :], acc.to(out.dtype.element_ty), mask=ok)


def width(codes: Tensor) -> int:
    """Return the number of weights in a row of ``codes``: int8 [N, K], or uint8 [N, K / 2]."""
    return codes.shape[1] * (2 if codes.dtype == torch.uint8 else 1)


def prepare(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    tile: Tile | None = None,
) -> Launch:
    M, K = x.shape
    N = len(codes)
    nibbles, grouped = codes.dtype == torch.uint8, scales.ndim == 2
    if codes.dtype not in (torch.int8, torch.uint8):
        raise ValueError(f"codes: expected dtype torch.int8 or torch.uint8, got {codes.dtype}")
    if nibbles and not grouped:
        raise ValueError(
            "scales: two codes in a byte need a scale for each 32 weights, got one for each channel"
        )
    if grouped and K % GROUP:
        raise ValueError(
            f"x: a scale for each {GROUP} weights needs rows that are a multiple of {GROUP}, got {K}"
        )
    if x.dtype not in FLOATING:
        raise ValueError(f"x: expected dtype float32, bfloat16 or float16, got {x.dtype}")
    check("x", x, (M, K), rows_apart=True)
    check("codes", codes, (N, K // 2 if nibbles else K))
    check("scales", scales, (N, K // GROUP) if grouped else (N,))
    same_dtype("scales", scales, torch.float16 if grouped else torch.float32)
    check("out", out, (M, N), rows_apart=True)
    if bias is not None:
        check("bias", bias, (N,))
    if residual is not None:
        check("residual", residual, (M, N), rows_apart=True)
    tile = tile or tile_for("weight_only_linear", (M, N, K), codes.dtype, x.device)
    if grouped and tile.k % GROUP:
        raise ValueError(f"tile: expected a depth that is a multiple of {GROUP}, got {tile.k}")
    arguments = {
        "x": x,
        "codes": codes,
        "scales": scales,
        "bias": bias,
        "residual": residual,
        "out": out,
        "M": M,
        "x_row": x.stride(0),
        "residual_row": 0 if residual is None else residual.stride(0),
        "out_row": out.stride(0),
        "N": N,
        "K": K,
        "GROUPED": grouped,
        "NIBBLES": nibbles,
        "BLOCK_M": tile.m,
        "BLOCK_N": tile.n,
        "BLOCK_K": tile.k,
        "UPCAST": False,
    }
    grid = (-(-M // tile.m) * -(-N // tile.n),)
    return Launch(weight_only_linear_kernel, grid, arguments, tile)


def weight_only_linear(
    x: Tensor, codes: Tensor, scales: Tensor, *, out: Tensor | None = None, **options
) -> Tensor:
    """Compute :func:`reference` with the kernel. Return [M, N] in x's dtype, or in the dtype of ``out``.

    Args:
        x: [M, K].
        codes: int8 [N, K], or uint8 [N, K / 2].
        scales: float32 [N], or float16 [N, K / 32].
        out: Memory for the result, or None. It may be ``residual``, because a program reads each element before it
            writes it.
        **options: Other options of :func:`prepare`.
    """
    out = x.new_empty(len(x), len(codes)) if out is None else out
    prepare(x, codes, scales, out, **options)()
    return out


def widened(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the weight as float32 [N, K], from codes and scales as in :func:`weight_only_linear`."""
    N, K = len(codes), width(codes)
    if codes.dtype == torch.uint8:
        bytes_ = codes.view(N, -1, GROUP // 2)
        numbers = torch.cat([bytes_ & 15, bytes_ >> 4], dim=-1).to(torch.int8) - OFFSET
    else:
        numbers = codes
    scale = scales.float() if scales.ndim == 2 else scales[:, None]
    return (numbers.reshape(N, scale.shape[1], -1).float() * scale[..., None]).view(N, K)


def reference(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return residual + (x W^T + bias) with W = :func:`widened`, in float32, rounded once to ``dtype``.

    By default, ``dtype`` is x's dtype. Absent arguments are left out of the formula.
    """
    y = x.float() @ widened(codes, scales).T
    if bias is not None:
        y = y + bias.float()
    return (y if residual is None else residual.float() + y).to(dtype or x.dtype)
