"""A product of e4m3 matrices, with a scale per row and per column in the epilogue. sm_89 and newer.

The weight lies as [out, in]: both operands are contiguous along the depth, which is how 8-bit tensor cores want
them (two-byte types may be transposed on the way, one-byte types may not). Where neither the tensor's nor the
row's scale varies along the depth, they leave the sum:  y[m, n] = s[m] * w[n] * sum_k x[m, k] * W[n, k].

The sum is float32 in the reference. Hopper's tensor cores add e4m3 products with fewer bits; like cuBLASLt's fast
accumulation, this kernel takes what they give.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sinew.engine.cuda.kernels.fp8_quantize import E4M3
from sinew.engine.cuda.kernels.lang import (
    check,
    dot,
    kernel,
    same_dtype,
    tl,
)
from sinew.engine.cuda.kernels.launch import Launch, Tile
from sinew.engine.cuda.kernels.tiles import tile_for

DIVISOR = 16  # of the depth: rows of 16 bytes, as wide copies and cuBLASLt want them


@kernel
def fp8_product_kernel(
    x,  # e4m3 [M, K]
    x_scale,  # float32 [M]
    weight,  # e4m3 [N, K]
    w_scale,  # float32 [N]
    bias,  # [N] or None
    out,  # [M, N]
    M,
    out_row,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    blocks_m = tl.cdiv(M, BLOCK_M)
    block = tl.program_id(0)  # row blocks run fastest: they share a block of the weight
    rows = (block % blocks_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = (block // blocks_m) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_ok, col_ok = rows < M, cols < N
    depth = tl.arange(0, BLOCK_K)
    x_tile = x + (rows[:, None] * K + depth[None, :])
    w_tile = weight + (cols[None, :] * K + depth[:, None])  # [BLOCK_K, BLOCK_N] of the transpose
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        k_ok = k + depth < K
        a = tl.load(x_tile + k, mask=row_ok[:, None] & k_ok[None, :], other=0.0)
        b = tl.load(w_tile + k, mask=k_ok[:, None] & col_ok[None, :], other=0.0)
        acc = dot(a, b, acc, UPCAST)
    acc *= tl.load(x_scale + rows, mask=row_ok, other=0.0)[:, None]
    acc *= tl.load(w_scale + cols, mask=col_ok, other=0.0)[None, :]
    if bias is not None:
        acc += tl.load(bias + cols, mask=col_ok, other=0.0).to(tl.float32)[None, :]
    at = out + (rows[:, None] * out_row + cols[None, :])
    tl.store(at, acc.to(out.dtype.element_ty), mask=row_ok[:, None] & col_ok[None, :])


def prepare(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    w_scale: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    tile: Tile | None = None,
) -> Launch:
    M, K = x.shape
    N = len(weight)
    check("x", x, (M, K))
    check("weight", weight, (N, K))
    for name, tensor in (("x", x), ("weight", weight)):
        same_dtype(name, tensor, E4M3)
    if K % DIVISOR:
        raise ValueError(f"x: expected a depth that is a multiple of {DIVISOR}, got {K}")
    for name, tensor, size in (("x_scale", x_scale, M), ("w_scale", w_scale, N)):
        check(name, tensor, (size,))
        same_dtype(name, tensor, torch.float32)
    check("out", out, (M, N), rows_apart=True)
    if bias is not None:
        check("bias", bias, (N,))
    tile = tile or tile_for("fp8_product", (M, N, K), weight.dtype, x.device)
    arguments = {
        "x": x,
        "x_scale": x_scale,
        "weight": weight,
        "w_scale": w_scale,
        "bias": bias,
        "out": out,
        "M": M,
        "out_row": out.stride(0),
        "N": N,
        "K": K,
        "BLOCK_M": tile.m,
        "BLOCK_N": tile.n,
        "BLOCK_K": tile.k,
        "UPCAST": False,
    }
    grid = (-(-M // tile.m) * -(-N // tile.n),)
    return Launch(fp8_product_kernel, grid, arguments, tile)


def fp8_product(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    w_scale: Tensor,
    *,
    out: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    **options,
) -> Tensor:
    """x: e4m3 [M, K], weight: e4m3 [N, K], scales float32 [M] and [N] -> [M, N] in ``dtype``, or in ``out``."""
    out = torch.empty(len(x), len(weight), dtype=dtype, device=x.device) if out is None else out
    prepare(x, x_scale, weight, w_scale, out, **options)()
    return out


def reference(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    w_scale: Tensor,
    *,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """(x * x_scale) (weight * w_scale)^T + bias: both dequantised, multiplied in float32, rounded once."""
    y = (x.float() * x_scale[:, None]) @ (weight.float() * w_scale[:, None]).T
    return (y if bias is None else y + bias.float()).to(dtype)
