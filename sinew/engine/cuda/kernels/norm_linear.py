"""One kernel for an RMS norm and the linear layer after it.

The norm's division is linear, so it can follow the product: norm(x) W' = (x W') / rms(x) ("Running VLAs at Real-time
Speed", section 4.4). A constant affine part is folded into the weight at load time (``sinew/engine/plan/norms.py``).
For an affine part that changes with the solver's step (pi0.5), ``bias`` is the step's shift times the weight, from a
table, and the input already contains the scale.

The kernel that wrote the input also computes the squares of its rows (:mod:`.splitk_linear`). Summing them in the loop
of the product would cost more instructions than the multiplication, again for every block of columns. A kernel that
read each tile twice, for the tensor cores and for its squares, gave different sums at every run on an H100 (triton 3.6,
research/log/2026-11-26.md).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sinew.engine.cuda.kernels.lang import (
    check,
    dot,
    kernel,
    same_dtype,
    tl,
)
from sinew.engine.cuda.kernels.launch import Launch, Tile
from sinew.engine.cuda.kernels.tiles import tile_for

LEAST_COLUMNS = 32  # the least number of columns of squares that a program loads at once


@kernel
def given_squares(squares, rows, row_ok, columns, BLOCK: tl.constexpr):
    """Return the sum of each row of ``squares``, float32 [M, columns].

    Several programs wrote a row of the norm's input. Each of these programs wrote one column of ``squares``.
    """
    at = tl.arange(0, BLOCK)
    ok = row_ok[:, None] & (at < columns)[None, :]
    return tl.sum(tl.load(squares + rows[:, None] * columns + at[None, :], mask=ok, other=0.0), axis=1)


@kernel
def norm_linear_kernel(
    x,  # [M, K]
    weight,  # [N, K]
    bias,  # [N] or None
    given,  # float32 [M, given_columns]: sums of squares of x before its scale; None: no norm
    out,  # [M, N]
    M,
    eps,
    given_columns,
    x_row,
    out_row,
    N: tl.constexpr,
    K: tl.constexpr,
    GIVEN_BLOCK: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    blocks_m = tl.cdiv(M, BLOCK_M)
    # Consecutive programs compute different rows with the same block of the weight, so programs that run together share
    # this block in the cache.
    block = tl.program_id(0)
    rows = (block % blocks_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = (block // blocks_m) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_ok, col_ok = rows < M, cols < N
    depth = tl.arange(0, BLOCK_K)
    x_tile = x + (rows[:, None] * x_row + depth[None, :])
    w_tile = weight + (cols[None, :] * K + depth[:, None])  # [BLOCK_K, BLOCK_N] of the transpose
    # Load the operands of the epilogue before the loop, so that their latency passes while the loop loads the weight.
    if given is not None:
        squares = given_squares(given, rows, row_ok, given_columns, GIVEN_BLOCK)
        inverse = tl.rsqrt(squares / K + eps)[:, None]
    if bias is not None:
        bias_row = tl.load(bias + cols, mask=col_ok, other=0.0).to(tl.float32)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        k_ok = k + depth < K
        a = tl.load(x_tile + k, mask=row_ok[:, None] & k_ok[None, :], other=0.0)
        b = tl.load(w_tile + k, mask=k_ok[:, None] & col_ok[None, :], other=0.0)
        acc = dot(a.to(b.dtype), b, acc, UPCAST)
    if given is not None:
        acc *= inverse
    if bias is not None:
        acc += bias_row
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
    squares: Tensor | None = None,
    silu: bool = False,
    tile: Tile | None = None,
) -> Launch:
    M, K = x.shape
    N = len(weight)
    check("x", x, (M, K), rows_apart=True)
    check("weight", weight, (N, K))
    check("out", out, (M, N), rows_apart=True)
    if weight.dtype != torch.float32:  # published checkpoints store the head's last projection in float32
        same_dtype("weight", weight, x.dtype)
    if bias is not None:
        check("bias", bias, (N,))
    tile = tile or tile_for("norm_linear", (M, N, K), weight.dtype, x.device)
    arguments = {
        "x": x,
        "weight": weight,
        "bias": bias,
        **statistics(M, eps, squares),
        "out": out,
        "M": M,
        "eps": 0.0 if eps is None else eps,
        "x_row": x.stride(0),
        "out_row": out.stride(0),
        "N": N,
        "K": K,
        "SILU": silu,
        "BLOCK_M": tile.m,
        "BLOCK_N": tile.n,
        "BLOCK_K": tile.k,
        "UPCAST": False,
    }
    grid = (-(-M // tile.m) * -(-N // tile.n),)
    return Launch(norm_linear_kernel, grid, arguments, tile)


def statistics(M: int, eps: float | None, squares: Tensor | None) -> dict[str, Any]:
    """Return the kernel's arguments for a norm.

    Args:
        M: Number of rows.
        eps: The norm's constant, or None without a norm.
        squares: float32 [M, any number], or None without a norm.
    """
    if (eps is None) != (squares is None):
        raise ValueError("squares: squares and eps must be passed together")
    if squares is None:
        return {"given": None, "given_columns": 0, "GIVEN_BLOCK": 1}
    if squares.ndim != 2:
        raise ValueError(f"squares: expected shape [{M}, columns], got {list(squares.shape)}")
    columns = squares.shape[1]
    check("squares", squares, (M, columns))
    same_dtype("squares", squares, torch.float32)
    # Round up the number of columns. It depends on the tile of the previous kernel, and every new value would compile
    # this kernel again.
    block = max(LEAST_COLUMNS, 1 << (columns - 1).bit_length())
    return {"given": squares, "given_columns": columns, "GIVEN_BLOCK": block}


def norm_linear(x: Tensor, weight: Tensor, *, out: Tensor | None = None, **options) -> Tensor:
    """Compute :func:`reference` with the kernel. Return [M, N] in weight's dtype.

    Args:
        x: [M, K]. If the weight is float32, x is converted to float32.
        weight: [N, K], in x's dtype or float32.
        out: Memory for the result, whose rows may be strided, or None.
        **options: Other options of :func:`prepare`. ``tile`` replaces the table's tile.
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
    squares: Tensor | None = None,
    silu: bool = False,
) -> Tensor:
    """Return :func:`product`, with SiLU if ``silu``, rounded once to weight's dtype."""
    y = product(x, weight, eps, bias, squares)
    return (F.silu(y) if silu else y).to(weight.dtype)


def product(
    x: Tensor,
    weight: Tensor,
    eps: float | None = None,
    bias: Tensor | None = None,
    squares: Tensor | None = None,
) -> Tensor:
    """Return (x W^T) / sqrt(squares / K + eps) + bias, in float32.

    Args:
        x: [M, K].
        weight: [N, K].
        eps: The norm's constant, or None without a norm.
        bias: [N], or None.
        squares: float32 [M, any number]. The sum of a row is the sum of squares of the norm's input. None leaves the
            division out.
    """
    y = x.float() @ weight.float().T
    if squares is not None:
        assert eps is not None, "squares: expected only with a norm"
        y = y * torch.rsqrt(squares.sum(-1, keepdim=True) / x.shape[-1] + eps)
    return y if bias is None else y + bias.float()
