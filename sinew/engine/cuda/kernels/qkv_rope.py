"""Packed query, key and value projections, their rotation, and the write into the cache, in one pass.

The two halves of a head are rotated together (``sinew/layers/rope.py``), so a program computes the same columns of both
halves: it multiplies one tile of the input by two tiles of the weight. The caller provides the memory for keys and
values, usually the rows of a cache after the prefix. The norm is computed as in :mod:`.norm_linear`. The depth may be
split between ``tile.split`` programs, as in :mod:`.splitk_linear`. The last program then adds the sums.
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
from sinew.engine.cuda.kernels.norm_linear import given_squares, product, statistics
from sinew.engine.cuda.kernels.rope import write_turned
from sinew.engine.cuda.kernels.tiles import tile_for
from sinew.engine.cuda.kernels.workspace import Workspace


@kernel
def qkv_rope_kernel(
    x,  # [M, K]
    weight,  # [(H + 2 Hkv) * D, K]
    bias,  # [(H + 2 Hkv) * D] or None
    given,  # float32 [M, given_columns]: sums of squares of x, as in norm_linear; or None
    cos,  # float32 [M, D / 2]
    sin,
    q,  # [M, H, D]
    k,  # [M, Hkv, D]; the rows may be strided
    v,
    parts,  # float32 [SPLIT, tiles, 2, BLOCK_M, BLOCK_N]; None without a split
    arrivals,  # int32 [tiles], zero before and after the launch; None without a split
    M,
    eps,
    given_columns,
    x_row,
    q_row,
    k_row,
    v_row,
    K: tl.constexpr,
    H: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    GIVEN_BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # columns of each half of a head
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    HALF: tl.constexpr = D // 2
    PARTS: tl.constexpr = (HALF + BLOCK_N - 1) // BLOCK_N  # blocks of columns per head
    # The depth that one program multiplies.
    DEPTH: tl.constexpr = ((K + BLOCK_K - 1) // BLOCK_K + SPLIT - 1) // SPLIT * BLOCK_K
    blocks_m = tl.cdiv(M, BLOCK_M)
    block = tl.program_id(0)
    rows = (block % blocks_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = (block // blocks_m) // PARTS
    cols = ((block // blocks_m) % PARTS) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_ok, col_ok = rows < M, cols < HALF
    split = tl.program_id(1) if SPLIT > 1 else 0
    depth = split * DEPTH + tl.arange(0, BLOCK_K)
    x_tile = x + (rows[:, None] * x_row + depth[None, :])
    low_tile = weight + ((head * D + cols)[None, :] * K + depth[:, None])
    # Load the operands of the epilogue before the loop, so that their latency passes while the loop loads the weight.
    if given is not None:
        squares = given_squares(given, rows, row_ok, given_columns, GIVEN_BLOCK)
        inverse = tl.rsqrt(squares / K + eps)[:, None]
    if bias is not None:
        low_bias = tl.load(bias + head * D + cols, mask=col_ok, other=0.0).to(tl.float32)[None, :]
        high_bias = tl.load(bias + head * D + HALF + cols, mask=col_ok, other=0.0).to(tl.float32)[None, :]
    low = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    high = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for i in range(0, DEPTH, BLOCK_K):
        k_ok = i + depth < K
        w_ok = k_ok[:, None] & col_ok[None, :]
        a = tl.load(x_tile + i, mask=row_ok[:, None] & k_ok[None, :], other=0.0)
        w_low = tl.load(low_tile + i, mask=w_ok, other=0.0)
        w_high = tl.load(low_tile + HALF * K + i, mask=w_ok, other=0.0)
        low = dot(a, w_low, low, UPCAST)
        high = dot(a, w_high, high, UPCAST)
    is_last = True
    if SPLIT > 1:
        tiles = tl.num_programs(0)
        inside = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        own = split * tiles + block
        tl.store(parts + own * (2 * BLOCK_M * BLOCK_N) + inside, low)
        tl.store(parts + (2 * own + 1) * (BLOCK_M * BLOCK_N) + inside, high)
        is_last = came_last(arrivals + block, SPLIT)
        if is_last:
            low = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            high = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for s in tl.static_range(SPLIT):  # the unrolled loop requests all parts at the same time
                part = s * tiles + block
                low += tl.load(parts + part * (2 * BLOCK_M * BLOCK_N) + inside, cache_modifier=".cg")
                high += tl.load(parts + (2 * part + 1) * (BLOCK_M * BLOCK_N) + inside, cache_modifier=".cg")
            tl.store(arrivals + block, 0)
    if is_last:
        if given is not None:
            low *= inverse
            high *= inverse
        if bias is not None:
            low += low_bias
            high += high_bias
        ok = row_ok[:, None] & col_ok[None, :]
        write_turned(low, high, cos, sin, q, k, v, rows, cols, ok, head, q_row, k_row, v_row, H, KV, D)


def prepare(
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    workspace: Workspace | None = None,
    *,
    eps: float | None = None,
    bias: Tensor | None = None,
    squares: Tensor | None = None,
    tile: Tile | None = None,
) -> Launch:
    M, K = x.shape
    H, D = q.shape[-2:]
    KV = k.shape[-2]
    if D % 2:
        raise ValueError(f"q: rotation needs an even head size, got {D}")
    check("x", x, (M, K), rows_apart=True)
    check("weight", weight, ((H + 2 * KV) * D, K))
    check("q", q, (M, H, D), rows_apart=True)
    check("k", k, (M, KV, D), rows_apart=True)
    check("v", v, (M, KV, D), rows_apart=True)
    for name, table in (("cos", cos), ("sin", sin)):
        check(name, table, (M, D // 2))
        same_dtype(name, table, torch.float32)
    for name, tensor in (("weight", weight), ("q", q), ("k", k), ("v", v)):
        same_dtype(name, tensor, x.dtype)
    if bias is not None:
        check("bias", bias, (len(weight),))
    tile = tile or tile_for("qkv_rope", (M, len(weight), K, D), weight.dtype, x.device)
    tiles = -(-M // tile.m) * (H + 2 * KV) * -(-(D // 2) // tile.n)
    if tile.split == 1:
        workspace = None
    elif workspace is None:
        raise ValueError(
            f"workspace: must be passed for a tile that splits the depth into {tile.split} parts"
        )
    else:
        workspace.require(tile.split * tiles * tile.m * 2 * tile.n, tiles)
    arguments = {
        "x": x,
        "weight": weight,
        "bias": bias,
        **statistics(M, eps, squares),
        "cos": cos,
        "sin": sin,
        "q": q,
        "k": k,
        "v": v,
        "parts": None if workspace is None else workspace.parts,
        "arrivals": None if workspace is None else workspace.arrivals,
        "M": M,
        "eps": 0.0 if eps is None else eps,
        "x_row": x.stride(0),
        "q_row": q.stride(0),
        "k_row": k.stride(0),
        "v_row": v.stride(0),
        "K": K,
        "H": H,
        "KV": KV,
        "D": D,
        "SPLIT": tile.split,
        "BLOCK_M": tile.m,
        "BLOCK_N": tile.n,
        "BLOCK_K": tile.k,
        "UPCAST": False,
    }
    return Launch(qkv_rope_kernel, (tiles, tile.split), arguments, tile)


def qkv_rope(
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    workspace: Workspace | None = None,
    **options,
) -> None:
    """Compute :func:`reference` with the kernel, and write q, k and v.

    Args:
        x: [M, K].
        weight: [(H + 2 Hkv) D, K]: queries, then keys, then values.
        cos: float32 [M, D / 2], one row per row of x.
        sin: float32 [M, D / 2].
        q: [M, H, D], written.
        k: [M, Hkv, D], written. The rows may be rows of a cache. With Hkv = 0, only queries are projected, as in
            cross-attention.
        v: [M, Hkv, D], written.
        workspace: Memory for partial sums, if the tile splits the depth.
        **options: Other options of :func:`prepare`.
    """
    prepare(x, weight, cos, sin, q, k, v, workspace, **options)()


def reference(
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: tuple[int, int],
    *,
    eps: float | None = None,
    bias: Tensor | None = None,
    squares: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v of :func:`.norm_linear.product`, with q and k rotated, each rounded once.

    Args:
        x: [M, K].
        weight: [(H + 2 Hkv) D, K].
        cos: float32 [M, D / 2].
        sin: float32 [M, D / 2].
        heads: (H, Hkv).
        eps: The norm's constant, or None without a norm.
        bias: [(H + 2 Hkv) D], or None.
        squares: Sums of squares for the norm, float32 [M, any number], or None.
    """
    H, KV = heads
    D = 2 * cos.shape[-1]
    packed = product(x, weight, eps, bias, squares).unflatten(-1, (H + 2 * KV, D))  # [M, H + 2 Hkv, D]
    turning, v = packed.split([H + KV, KV], dim=1)
    low, high = turning.chunk(2, dim=-1)
    c, s = cos[:, None], sin[:, None]
    turned = torch.cat([low * c - high * s, high * c + low * s], dim=-1).to(x.dtype)
    return turned[:, :H], turned[:, H:], v.to(x.dtype)
