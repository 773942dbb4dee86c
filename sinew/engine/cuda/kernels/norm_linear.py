"""A linear layer over an RMS-normalised input, in one pass.

The norm's division is linear, so it moves behind the product: norm(x) W' = (x W') / rms(x). The kernel sums the
squares of the rows while it multiplies them and divides the accumulator ("Running VLAs at Real-time Speed",
section 4.4, where the statistics are a pass of their own). A fixed affine part is folded into the weight at
load time (``sinew/engine/plan/norms.py``). One that changes with the solver's step (pi0.5) is ``scale``, applied
to the input, and ``bias``, the step's shift times the weight, read from a table.

Looking at the input costs more instructions than multiplying it, and every block of columns does it again. Where the
kernel that wrote the input has summed its squares (:mod:`.splitk_linear`), they come as ``squares``, the input
is already scaled, and the loop only multiplies.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sinew.engine.cuda.kernels.lang import (
    ask_for,
    check,
    dot,
    kernel,
    let_next_start,
    prefetched,
    same_dtype,
    tl,
    wait_for_previous,
)
from sinew.engine.cuda.kernels.launch import Launch, Tile
from sinew.engine.cuda.kernels.tiles import tile_for

LEAST_COLUMNS = 32  # of given squares that are read at once


@kernel
def given_squares(squares, rows, row_ok, columns, BLOCK: tl.constexpr):
    """Row sums of ``squares``, float32 [M, columns]: one column from each program that wrote a part of the row."""
    at = tl.arange(0, BLOCK)
    ok = row_ok[:, None] & (at < columns)[None, :]
    return tl.sum(tl.load(squares + rows[:, None] * columns + at[None, :], mask=ok, other=0.0), axis=1)


@kernel
def norm_linear_kernel(
    x,  # [M, K]
    weight,  # [N, K]
    bias,  # [N] or None
    scale,  # [K] or None
    given,  # float32 [M, given_columns], squares of the unscaled x, or None: they are summed here
    out,  # [M, N]
    M,
    eps,
    given_columns,
    x_row,
    out_row,
    N: tl.constexpr,
    K: tl.constexpr,
    NORM: tl.constexpr,
    GIVEN_BLOCK: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
    PREFETCH: tl.constexpr,  # elements of each row of the weight
):
    blocks_m = tl.cdiv(M, BLOCK_M)
    block = tl.program_id(
        0
    )  # row blocks run fastest: they share a block of the weight, which comes from memory
    rows = (block % blocks_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = (block // blocks_m) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_ok, col_ok = rows < M, cols < N
    depth = tl.arange(0, BLOCK_K)
    x_tile = x + (rows[:, None] * x_row + depth[None, :])
    w_tile = weight + (cols[None, :] * K + depth[:, None])  # [BLOCK_K, BLOCK_N] of the transpose
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    let_next_start(PDL)
    if PREFETCH:  # noqa: SIM102 - known when the kernel is compiled, unlike what follows
        if block % blocks_m == 0:  # row blocks share a block of the weight: one asks
            first = (block // blocks_m) * BLOCK_N
            ask_for(weight + first * K, tl.minimum(N - first, BLOCK_N), K, PREFETCH, UPCAST)
    wait_for_previous(PDL)
    for k in range(0, K, BLOCK_K):
        k_ok = k + depth < K
        a = tl.load(x_tile + k, mask=row_ok[:, None] & k_ok[None, :], other=0.0)
        b = tl.load(w_tile + k, mask=k_ok[:, None] & col_ok[None, :], other=0.0)
        if NORM and given is None:
            wide = a.to(tl.float32)
            squares += tl.sum(wide * wide, axis=1)
        if scale is not None:
            factor = 1.0 + tl.load(scale + k + depth, mask=k_ok, other=0.0).to(tl.float32)
            a = (a.to(tl.float32) * factor[None, :]).to(a.dtype)
        acc = dot(a.to(b.dtype), b, acc, UPCAST)
    if given is not None:
        squares = given_squares(given, rows, row_ok, given_columns, GIVEN_BLOCK)
    if NORM:
        acc *= tl.rsqrt(squares / K + eps)[:, None]
    if bias is not None:
        acc += tl.load(bias + cols, mask=col_ok, other=0.0).to(tl.float32)[None, :]
    if SILU:
        acc = acc / (1.0 + tl.exp(-acc))
    at = out + (rows[:, None] * out_row + cols[None, :])
    tl.store(at, acc.to(out.dtype.element_ty), mask=row_ok[:, None] & col_ok[None, :])


def prepare(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    eps: float | None = None,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    squares: Tensor | None = None,
    silu: bool = False,
    tile: Tile | None = None,
    pdl: bool = False,
    prefetch: bool = False,
) -> Launch:
    M, K = x.shape
    N = len(weight)
    check("x", x, (M, K), rows_apart=True)
    check("weight", weight, (N, K))
    check("out", out, (M, N), rows_apart=True)
    if weight.dtype != torch.float32:  # published checkpoints keep the head's last projection wide
        same_dtype("weight", weight, x.dtype)
    if bias is not None:
        check("bias", bias, (N,))
    if scale is not None:
        check("scale", scale, (K,))
    tile = tile or tile_for("norm_linear", (M, N, K), weight.dtype, x.device)
    arguments = {
        "x": x,
        "weight": weight,
        "bias": bias,
        "scale": scale,
        **statistics(M, eps, scale, squares),
        "out": out,
        "M": M,
        "eps": 0.0 if eps is None else eps,
        "x_row": x.stride(0),
        "out_row": out.stride(0),
        "N": N,
        "K": K,
        "NORM": eps is not None,
        "SILU": silu,
        "BLOCK_M": tile.m,
        "BLOCK_N": tile.n,
        "BLOCK_K": tile.k,
        "UPCAST": False,
        "PDL": pdl,
        "PREFETCH": prefetched(prefetch, pdl, weight, tile.n, K),
    }
    grid = (-(-M // tile.m) * -(-N // tile.n),)
    return Launch(norm_linear_kernel, grid, arguments, tile, pdl)


def statistics(M: int, eps: float | None, scale: Tensor | None, squares: Tensor | None) -> dict[str, Any]:
    """The kernel's arguments of given squares."""
    if squares is None:
        return {"given": None, "given_columns": 0, "GIVEN_BLOCK": 1}
    if squares.ndim != 2:
        raise ValueError(f"squares: expected shape [{M}, columns], got {list(squares.shape)}")
    columns = squares.shape[1]
    check("squares", squares, (M, columns))
    same_dtype("squares", squares, torch.float32)
    if eps is None:
        raise ValueError("squares: expected only with a norm, got no eps")
    if scale is not None:
        raise ValueError("scale: expected none with squares, as x is scaled where they are summed")
    # The number of columns depends on the tile of the kernel before: not a reason to compile this one again.
    block = max(LEAST_COLUMNS, 1 << (columns - 1).bit_length())
    return {"given": squares, "given_columns": columns, "GIVEN_BLOCK": block}


def norm_linear(x: Tensor, weight: Tensor, *, out: Tensor | None = None, **options) -> Tensor:
    """x: [M, K], weight: [N, K] -> [M, N] in weight's dtype; :func:`product` says what the options do.

    weight has x's dtype, or float32: then x is widened. ``out``: written in place, rows may be strided.
    ``tile``: instead of the table's. ``pdl``: programmatic dependent launch; ``prefetch`` beside it: a program
    asks for its part of the weight before it waits for x.
    """
    out = weight.new_empty(len(x), len(weight)) if out is None else out
    prepare(x, weight, out, **options)()
    return out


def reference(
    x: Tensor,
    weight: Tensor,
    *,
    eps: float | None = None,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    squares: Tensor | None = None,
    silu: bool = False,
) -> Tensor:
    """:func:`product`, and its SiLU if asked for, rounded once to weight's dtype."""
    y = product(x, weight, eps, bias, scale, squares)
    return (F.silu(y) if silu else y).to(weight.dtype)


def product(
    x: Tensor,
    weight: Tensor,
    eps: float | None = None,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    squares: Tensor | None = None,
) -> Tensor:
    """((x * (1 + scale)) W^T) / sqrt(mean(x^2) + eps) + bias, in float32.

    ``x * (1 + scale)`` alone is rounded to x's dtype before the product: it has to fit the tensor cores. eps
    None: no division; scale None: no factor. squares: float32 [M, any], whose rows sum to those of x^2, of the x that
    was before its scale; x itself is what is multiplied.
    """
    wide = x.float()
    scaled = x if scale is None else (wide * (1.0 + scale.float())).to(x.dtype)
    y = scaled.float() @ weight.float().T
    if eps is not None:
        total = (wide.pow(2) if squares is None else squares).sum(-1, keepdim=True)
        y = y * torch.rsqrt(total / x.shape[-1] + eps)
    return y if bias is None else y + bias.float()
