"""A linear layer for few rows, with gate and residual: it streams the weight, so all of the device should read.

With 50 rows and 1,024 columns there are 16 blocks of 64 columns for 132 multiprocessors. The depth is therefore
split between ``tile.split`` programs. Each writes its part of the sum; the last one to arrive adds the parts in
their order, so the result does not depend on who was last, and finishes the row: bias, gate, residual.
"""

from __future__ import annotations

from torch import Tensor

from sinew.engine.kernels.lang import check, dot, kernel, same_dtype, tl, wait_for_input
from sinew.engine.kernels.launch import Launch, Tile
from sinew.engine.kernels.norm_linear import product
from sinew.engine.kernels.tuning import tile_for
from sinew.engine.kernels.workspace import Workspace


@kernel
def splitk_linear_kernel(
    x,  # [M, K]
    weight,  # [N, K]
    bias,  # [N] or None
    gate,  # [N] or None
    residual,  # [M, N] or None
    out,  # [M, N]
    parts,  # float32 [SPLIT, tiles, BLOCK_M, BLOCK_N]
    arrivals,  # int32 [tiles], zero before and after
    M,
    x_row,
    residual_row,
    out_row,
    N: tl.constexpr,
    K: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    DEPTH: tl.constexpr = ((K + BLOCK_K - 1) // BLOCK_K + SPLIT - 1) // SPLIT * BLOCK_K  # of one program
    blocks_m = tl.cdiv(M, BLOCK_M)
    tile = tl.program_id(0)
    split = tl.program_id(1)
    rows = (tile % blocks_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = (tile // blocks_m) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_ok, col_ok = rows < M, cols < N
    depth = split * DEPTH + tl.arange(0, BLOCK_K)
    x_tile = x + (rows[:, None] * x_row + depth[None, :])
    w_tile = weight + (cols[None, :] * K + depth[:, None])
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    wait_for_input(PDL)
    for k in range(0, DEPTH, BLOCK_K):
        k_ok = k + depth < K
        a = tl.load(x_tile + k, mask=row_ok[:, None] & k_ok[None, :], other=0.0)
        b = tl.load(w_tile + k, mask=k_ok[:, None] & col_ok[None, :], other=0.0)
        acc = dot(a, b, acc, UPCAST)
    is_last = True
    if SPLIT > 1:
        tiles = tl.num_programs(0)
        inside = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        own = parts + (split * tiles + tile) * (BLOCK_M * BLOCK_N) + inside
        tl.store(own, acc)
        tl.debug_barrier()  # every thread's part is written before one thread says so
        is_last = tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
        if is_last:
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for s in range(SPLIT):
                part = parts + (s * tiles + tile) * (BLOCK_M * BLOCK_N) + inside
                acc += tl.load(part, cache_modifier=".cg")
            tl.store(arrivals + tile, 0)
    if is_last:
        if bias is not None:
            acc += tl.load(bias + cols, mask=col_ok, other=0.0).to(tl.float32)[None, :]
        if gate is not None:
            acc *= tl.load(gate + cols, mask=col_ok, other=0.0).to(tl.float32)[None, :]
        ok = row_ok[:, None] & col_ok[None, :]
        if residual is not None:
            before = residual + rows[:, None] * residual_row + cols[None, :]
            acc += tl.load(before, mask=ok, other=0.0).to(tl.float32)
        at = out + (rows[:, None] * out_row + cols[None, :])
        tl.store(at, acc.to(out.dtype.element_ty), mask=ok)


def prepare(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    workspace: Workspace,
    *,
    bias: Tensor | None = None,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
    tile: Tile | None = None,
    pdl: bool = False,
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
    tile = tile or tile_for("splitk_linear", (M, N, K), weight.dtype, x.device)
    tiles = -(-M // tile.m) * -(-N // tile.n)
    if tile.split > 1:
        workspace.require(tile.split * tiles * tile.m * tile.n, tiles)
    arguments = {
        "x": x,
        "weight": weight,
        "bias": bias,
        "gate": gate,
        "residual": residual,
        "out": out,
        "parts": workspace.parts,
        "arrivals": workspace.arrivals,
        "M": M,
        "x_row": x.stride(0),
        "residual_row": 0 if residual is None else residual.stride(0),
        "out_row": out.stride(0),
        "N": N,
        "K": K,
        "SPLIT": tile.split,
        "BLOCK_M": tile.m,
        "BLOCK_N": tile.n,
        "BLOCK_K": tile.k,
        "UPCAST": False,
        "PDL": pdl,
    }
    return Launch(splitk_linear_kernel, (tiles, tile.split), arguments, tile, pdl)


def splitk_linear(
    x: Tensor, weight: Tensor, *, workspace: Workspace, out: Tensor | None = None, **options
) -> Tensor:
    """x: [M, K], weight: [N, K] -> [M, N] in x's dtype; options as :func:`twin`'s.

    ``out`` may be ``residual``: each element is read by the program that writes it, before it writes.
    """
    out = x.new_empty(len(x), len(weight)) if out is None else out
    prepare(x, weight, out, workspace, **options)()
    return out


def twin(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """residual + gate * (x W^T + bias), in float32, rounded once. Absent parts are left out."""
    y = product(x, weight, None, bias, None)
    if gate is not None:
        y = y * gate.float()
    return (y if residual is None else residual.float() + y).to(x.dtype)
