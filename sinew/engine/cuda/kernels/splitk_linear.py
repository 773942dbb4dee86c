"""A linear layer for few rows, with gate and residual. It is limited by reading the weight, so all of the device should
read.

With 50 rows and 1,024 columns there are 16 blocks of 64 columns for 132 multiprocessors. The depth is therefore split
between ``tile.split`` programs, and each program writes its part of the sum. The last program adds the parts in their
order, so the result does not depend on which program is last. It also applies bias, gate and residual.

The result is the stream that a norm reads next. The last program has its block in registers. It can also sum the
squares of its part of each row, and write the block times 1 + ``scale`` for the product of a modulated norm. The scale
is from a table of the solver's step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sinew.engine.cuda.kernels.lang import (
    came_last,
    check,
    dot,
    kernel,
    same_dtype,
    tl,
)
from sinew.engine.cuda.kernels.launch import Launch, Tile
from sinew.engine.cuda.kernels.norm_linear import product
from sinew.engine.cuda.kernels.tiles import tile_for
from sinew.engine.cuda.kernels.workspace import Workspace


@kernel
def splitk_linear_kernel(
    x,  # [M, K]
    weight,  # [N, K]
    bias,  # [N] or None
    gate,  # [N] or None
    residual,  # [M, N] or None
    scale,  # [N] or None
    out,  # [M, N]
    scaled,  # [M, N] or None
    squares,  # float32 [M, blocks of columns] or None
    parts,  # float32 [SPLIT, tiles, BLOCK_M, BLOCK_N]
    arrivals,  # int32 [tiles], zero before and after the launch
    M,
    x_row,
    residual_row,
    out_row,
    scaled_row,
    N: tl.constexpr,
    K: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    # The depth that one program multiplies.
    DEPTH: tl.constexpr = ((K + BLOCK_K - 1) // BLOCK_K + SPLIT - 1) // SPLIT * BLOCK_K
    # True if no load along the depth needs a mask. The compiler cannot derive this from the sizes.
    WHOLE: tl.constexpr = K % (DEPTH * SPLIT) == 0
    blocks_m = tl.cdiv(M, BLOCK_M)
    tile = tl.program_id(0)
    split = tl.program_id(1)
    rows = (tile % blocks_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = (tile // blocks_m) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_ok, col_ok = rows < M, cols < N
    depth = split * DEPTH + tl.arange(0, BLOCK_K)
    x_tile = x + (rows[:, None] * x_row + depth[None, :])
    w_tile = weight + (cols[None, :] * K + depth[:, None])
    # Load the bias, gate and residual before the loop: they arrive while the loop loads the weight.
    ok = row_ok[:, None] & col_ok[None, :]
    if bias is not None:
        bias_row = tl.load(bias + cols, mask=col_ok, other=0.0).to(tl.float32)[None, :]
    if gate is not None:
        gate_row = tl.load(gate + cols, mask=col_ok, other=0.0).to(tl.float32)[None, :]
    if residual is not None:
        before = residual + rows[:, None] * residual_row + cols[None, :]
        stream = tl.load(before, mask=ok, other=0.0).to(tl.float32)
    if scaled is not None:
        factor = 1.0 + tl.load(scale + cols, mask=col_ok, other=0.0).to(tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, DEPTH, BLOCK_K):
        k_ok = (k + depth < K) | WHOLE
        a = tl.load(x_tile + k, mask=row_ok[:, None] & k_ok[None, :], other=0.0)
        b = tl.load(w_tile + k, mask=k_ok[:, None] & col_ok[None, :], other=0.0)
        acc = dot(a, b, acc, UPCAST)
    is_last = True
    if SPLIT > 1:
        tiles = tl.num_programs(0)
        inside = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        own = parts + (split * tiles + tile) * (BLOCK_M * BLOCK_N) + inside
        tl.store(own, acc)
        is_last = came_last(arrivals + tile, SPLIT)
        if is_last:
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for s in tl.static_range(SPLIT):  # the unrolled loop requests all parts at the same time
                part = parts + (s * tiles + tile) * (BLOCK_M * BLOCK_N) + inside
                acc += tl.load(part, cache_modifier=".cg")
            tl.store(arrivals + tile, 0)
    if is_last:
        if bias is not None:
            acc += bias_row
        if gate is not None:
            acc *= gate_row
        if residual is not None:
            acc += stream
        rounded = acc.to(out.dtype.element_ty)
        tl.store(out + (rows[:, None] * out_row + cols[None, :]), rounded, mask=ok)
        # The next norm reads the stored (rounded) values, so sum the squares of these values.
        wide = tl.where(ok, rounded.to(tl.float32), 0.0)
        if squares is not None:
            part = squares + rows * ((N + BLOCK_N - 1) // BLOCK_N) + tile // blocks_m
            tl.store(part, tl.sum(wide * wide, axis=1), mask=row_ok)
        if scaled is not None:
            again = scaled + (rows[:, None] * scaled_row + cols[None, :])
            tl.store(again, (wide * factor[None, :]).to(scaled.dtype.element_ty), mask=ok)


def blocks(N: int, tile: Tile) -> int:
    """Return the number of columns of ``squares``, one for each block of columns that a program finishes."""
    return -(-N // tile.n)


def prepare(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    workspace: Workspace,
    *,
    bias: Tensor | None = None,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
    squares: Tensor | None = None,
    scale: Tensor | None = None,
    scaled: Tensor | None = None,
    tile: Tile | None = None,
) -> Launch:
    M, K = x.shape
    N = len(weight)
    check("x", x, (M, K), rows_apart=True)
    check("weight", weight, (N, K))
    check("out", out, (M, N), rows_apart=True)
    same_dtype("weight", weight, x.dtype)
    for name, vector in (("bias", bias), ("gate", gate)):
        if vector is not None:
            check(name, vector, (N,))
    if residual is not None:
        check("residual", residual, (M, N), rows_apart=True)
    if (scale is None) != (scaled is None):
        raise ValueError("scaled: scaled and scale must be passed together")
    if scale is not None and scaled is not None:
        check("scale", scale, (N,))
        check("scaled", scaled, (M, N), rows_apart=True)
    tile = tile or tile_for("splitk_linear", (M, N, K), weight.dtype, x.device)
    if squares is not None:
        check("squares", squares, (M, blocks(N, tile)))
        same_dtype("squares", squares, torch.float32)
    tiles = -(-M // tile.m) * -(-N // tile.n)
    if tile.split > 1:
        workspace.require(tile.split * tiles * tile.m * tile.n, tiles)
    arguments = {
        "x": x,
        "weight": weight,
        "bias": bias,
        "gate": gate,
        "residual": residual,
        "scale": scale,
        "out": out,
        "scaled": scaled,
        "squares": squares,
        "parts": workspace.parts,
        "arrivals": workspace.arrivals,
        "M": M,
        "x_row": x.stride(0),
        "residual_row": 0 if residual is None else residual.stride(0),
        "out_row": out.stride(0),
        "scaled_row": 0 if scaled is None else scaled.stride(0),
        "N": N,
        "K": K,
        "SPLIT": tile.split,
        "BLOCK_M": tile.m,
        "BLOCK_N": tile.n,
        "BLOCK_K": tile.k,
        "UPCAST": False,
    }
    return Launch(splitk_linear_kernel, (tiles, tile.split), arguments, tile)


def splitk_linear(
    x: Tensor, weight: Tensor, *, workspace: Workspace, out: Tensor | None = None, **options
) -> Tensor:
    """Compute :func:`reference` with the kernel. Return [M, N] in x's dtype, or in the dtype of ``out``.

    Args:
        x: [M, K].
        weight: [N, K].
        workspace: Memory for partial sums.
        out: Memory for the result, or None. It may be ``residual``, because a program reads each element before it
            writes it.
        **options: Other options of :func:`prepare`.
    """
    out = x.new_empty(len(x), len(weight)) if out is None else out
    prepare(x, weight, out, workspace, **options)()
    return out


def reference(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return residual + gate * (x W^T + bias), in float32, rounded once to ``dtype`` (by default x's dtype).

    Absent arguments are left out of the formula.
    """
    y = product(x, weight, bias=bias)
    if gate is not None:
        y = y * gate.float()
    return (y if residual is None else residual.float() + y).to(dtype or x.dtype)


def statistics_reference(stream: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Return the statistics that the next norm needs of a stream.

    Args:
        stream: [M, N].
        scale: Scale of the next norm, [N], or None.

    Returns:
        The sums of squares, float32 [M, 1] (the kernel writes several columns), and stream * (1 + scale) in the
            stream's dtype.
    """
    wide = stream.float()
    scaled = None if scale is None else (wide * (1.0 + scale.float())).to(stream.dtype)
    return wide.pow(2).sum(-1, keepdim=True), scaled
