"""Attention of a few queries over the keys and values of a prefix and of the queries' own tokens.

All query heads of one key/value head are packed into the rows of a tile (50 queries of 8 heads are 400 rows), so each
key is read once for all of them. The keys may be split between ``tile.split`` programs per block of rows. The last
program joins a few parts, as in :mod:`.splitk_linear`. A second kernel joins many parts, because one program would read
them for longer than all programs took to compute them. Both join the parts in their order.

If all rows of a mask are one row in memory (``expand``), the kernel reads one byte per key instead of one per query and
key. This leaves registers for larger tiles.

All tensors have a leading axis of observations, and each observation has its own keys. The third axis of the grid is
the observation. For a single observation, the kernel has no strides of this axis, and its machine code contains no
trace of the axis.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sinew.engine.cuda.kernels.lang import (
    LOG2E,
    MASKED,
    came_last,
    check,
    dot,
    kernel,
    same_dtype,
    tl,
)
from sinew.engine.cuda.kernels.launch import Launch, Tile
from sinew.engine.cuda.kernels.tiles import TOGETHER, tile_for
from sinew.engine.cuda.kernels.workspace import Workspace

KeyValue = tuple[Tensor, Tensor]
JOINED_ROWS = 1


@kernel
def fold_keys(
    acc,
    peak,
    total,
    query,  # [BLOCK_M, D]
    k,
    v,
    mask,  # mask of the segment's first key
    first,  # index of the first key of the block
    row_ok,
    mask_rows,
    length,
    row,
    scale,
    MASKED: tl.constexpr,
    KEY_MASK: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Add one block of keys to a softmax (base 2) that is computed block by block.

    Returns:
        The new numerator, largest score and denominator of each row.
    """
    keys = first + tl.arange(0, BLOCK_N)
    key_ok = keys < length
    inside = tl.arange(0, D)
    # [D, BLOCK_N]
    k_tile = tl.load(k + (keys[None, :] * row + inside[:, None]), mask=key_ok[None, :], other=0.0)
    # A masked key gets the score MASKED. A position after the last key gets the score minus infinity.
    hidden = tl.where(key_ok, MASKED, float("-inf"))
    if KEY_MASK:
        sees = tl.load(mask + keys, mask=key_ok, other=0)[None, :]
    else:
        ok = row_ok[:, None] & key_ok[None, :]
        sees = tl.load(mask + (mask_rows[:, None] + keys[None, :]), mask=ok, other=0)
    scores = dot(query, k_tile, tl.zeros((query.shape[0], BLOCK_N), tl.float32), UPCAST) * scale
    scores = tl.where(sees != 0, scores, hidden[None, :])
    highest = tl.maximum(peak, tl.max(scores, axis=1))
    weights = tl.exp2(scores - highest[:, None])
    fade = tl.exp2(peak - highest)
    # [BLOCK_N, D]
    v_tile = tl.load(v + (keys[:, None] * row + inside[None, :]), mask=key_ok[:, None], other=0.0)
    acc = dot(weights.to(v_tile.dtype), v_tile, acc * fade[:, None], UPCAST)
    return acc, highest, total * fade + tl.sum(weights, axis=1)


@kernel
def joined(
    parts,
    sums,
    block,
    blocks,
    rows,
    inside,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    D: tl.constexpr,
):
    """Return the softmax's numerator and denominator for some rows of a block of rows.

    They are sums over all parts of the keys, in order. ``blocks`` is the number of blocks of all observations.
    """
    totals = sums + SPLIT * blocks * BLOCK_M
    acc = tl.zeros((rows.shape[0], D), tl.float32)
    peak = tl.full((rows.shape[0],), -3.0e38, tl.float32)
    total = tl.zeros((rows.shape[0],), tl.float32)
    for s in tl.static_range(SPLIT):  # the unrolled loop requests all parts at the same time
        at = (s * blocks + block) * BLOCK_M + rows
        other = tl.load(sums + at, cache_modifier=".cg")
        highest = tl.maximum(peak, other)
        fade, rise = tl.exp2(peak - highest), tl.exp2(other - highest)
        numerator = tl.load(parts + (at * D)[:, None] + inside[None, :], cache_modifier=".cg")
        acc = acc * fade[:, None] + numerator.to(tl.float32) * rise[:, None]
        total = total * fade + tl.load(totals + at, cache_modifier=".cg") * rise
        peak = highest
    return acc, total


@kernel
def packed_attention_kernel(
    q,  # [B, M, KV * GROUP, D]
    k,  # [B, P, KV, D]
    v,
    own_k,  # [B, S, KV, D] or None
    own_v,
    mask,  # uint8 [B, M, P + S], or [B, P + S] with KEY_MASK
    out,  # [B, M, KV * GROUP, D]
    parts,  # [SPLIT, B * tiles, BLOCK_M, D] in q's dtype: the softmax's partial numerators
    sums,  # float32 [2, SPLIT, B * tiles, BLOCK_M]: largest scores, then denominators
    arrivals,  # int32 [B * tiles]
    M,
    scale,  # scale of the scores times log2(e)
    q_row,
    kv_row,
    own_row,
    mask_row,
    out_row,
    q_step,  # distance between two observations in elements; None for a single observation
    kv_step,
    own_step,
    mask_step,
    out_step,
    P: tl.constexpr,
    S: tl.constexpr,
    KV: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    MASKED: tl.constexpr,
    KEY_MASK: tl.constexpr,
    SPLIT: tl.constexpr,
    APART: tl.constexpr,  # True if join_kernel joins the parts
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UPCAST: tl.constexpr,
):
    COUNT: tl.constexpr = (P + BLOCK_N - 1) // BLOCK_N  # number of blocks of the prefix
    # The number of blocks per program. The last programs may have fewer blocks, or none.
    EACH: tl.constexpr = (COUNT + SPLIT - 1) // SPLIT
    tile = tl.program_id(0)
    split = tl.program_id(1)
    if q_step is not None:
        observation = tl.program_id(2)
        q += observation * q_step
        k += observation * kv_step
        v += observation * kv_step
        mask += observation * mask_step
        out += observation * out_step
        if own_k is not None:
            own_k += observation * own_step
            own_v += observation * own_step
    head = tile % KV
    packed = (tile // KV) * BLOCK_M + tl.arange(0, BLOCK_M)  # query * GROUP + head in the group
    queries = packed // GROUP
    row_ok = queries < M
    inside = tl.arange(0, D)
    at = (head * GROUP + packed % GROUP) * D
    query = tl.load(q + (queries * q_row + at)[:, None] + inside[None, :], mask=row_ok[:, None], other=0.0)
    mask_rows = queries * mask_row
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    # The first peak is less than MASKED but finite, because infinity minus infinity is not a number.
    peak = tl.full((BLOCK_M,), -3.0e38, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    # The bounds are not constants. The compiler then loads keys and values ahead, even for a single block.
    for part in range(split * EACH, tl.minimum((split + 1) * EACH, COUNT)):
        acc, peak, total = fold_keys(
            acc, peak, total, query, k + head * D, v + head * D, mask, part * BLOCK_N,
            row_ok, mask_rows, P, kv_row, scale, MASKED, KEY_MASK, D, BLOCK_N, UPCAST,
        )  # fmt: skip
    if own_k is not None:
        for first in range(0, tl.where(split == SPLIT - 1, S, 0), BLOCK_N):
            acc, peak, total = fold_keys(
                acc, peak, total, query, own_k + head * D, own_v + head * D, mask + P, first,
                row_ok, mask_rows, S, own_row, scale, MASKED, KEY_MASK, D, BLOCK_N, UPCAST,
            )  # fmt: skip
    if SPLIT > 1:
        block, blocks = tile, tl.num_programs(0)
        if q_step is not None:
            block, blocks = tl.program_id(2) * blocks + tile, tl.num_programs(2) * blocks
        rows = tl.arange(0, BLOCK_M)
        own = (split * blocks + block) * BLOCK_M + rows
        tl.store(parts + (own * D)[:, None] + inside[None, :], acc.to(parts.dtype.element_ty))
        tl.store(sums + own, peak)
        tl.store(sums + SPLIT * blocks * BLOCK_M + own, total)
        is_last = False
        if not APART:
            is_last = came_last(arrivals + block, SPLIT)
            if is_last:
                acc, total = joined(parts, sums, block, blocks, rows, inside, SPLIT, BLOCK_M, D)
                tl.store(arrivals + block, 0)
    else:
        is_last = True
    if is_last:
        to = out + (queries * out_row + at)[:, None] + inside[None, :]
        tl.store(to, (acc / total[:, None]).to(out.dtype.element_ty), mask=row_ok[:, None])


@kernel
def join_kernel(
    parts,  # partial numerators that packed_attention_kernel wrote
    sums,
    out,  # [B, M, KV * GROUP, D]
    M,
    tiles,  # the number of tiles of all observations
    out_row,
    own_tiles,  # the number of tiles of one observation; None if there is only one observation
    out_step,
    KV: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,  # rows of a tile whose partial results one program adds
):
    block = tl.program_id(0) // (BLOCK_M // ROWS)
    rows = tl.program_id(0) % (BLOCK_M // ROWS) * ROWS + tl.arange(0, ROWS)
    tile = block
    if own_tiles is not None:
        tile = block % own_tiles
        out += block // own_tiles * out_step
    packed = (tile // KV) * BLOCK_M + rows
    queries = packed // GROUP
    at = (tile % KV * GROUP + packed % GROUP) * D
    inside = tl.arange(0, D)
    acc, total = joined(parts, sums, block, tiles, rows, inside, SPLIT, BLOCK_M, D)
    to = out + (queries * out_row + at)[:, None] + inside[None, :]
    tl.store(to, (acc / total[:, None]).to(out.dtype.element_ty), mask=(queries < M)[:, None])


def prepare(
    q: Tensor,
    kv: KeyValue,
    mask: Tensor,
    out: Tensor,
    workspace: Workspace,
    *,
    own: KeyValue | None = None,
    tile: Tile | None = None,
) -> list[Launch]:
    B, M, H, D = q.shape
    P, KV = kv[0].shape[1:3]
    S = 0 if own is None else own[0].shape[1]
    if KV < 1 or H % KV:
        raise ValueError(f"q: expected a multiple of the {KV} key/value heads, got {H} heads")
    if D < 16 or D & (D - 1):
        raise ValueError(f"q: expected a head size that is a power of two, 16 or more, got {D}")
    check_each("q", q, (B, M, H, D))
    check_each("out", out, (B, M, H, D))
    check_each("mask", mask, (B, M, P + S))
    same_dtype("mask", mask, torch.bool)
    for name, tensor in zip(("k", "v", "own k", "own v"), (*kv, *(own or ())), strict=False):
        check_each(name, tensor, (B, S if name.startswith("own") else P, KV, D))
        same_dtype(name, tensor, q.dtype)
    for name, (a, b) in (("k, v", kv), ("own k, v", own or kv)):
        if a.stride()[:2] != b.stride()[:2]:
            raise ValueError(
                f"{name}: expected equal strides of observations and rows, got {a.stride()[:2]} and"
                f" {b.stride()[:2]}"
            )
    problem = M * H // KV, P, S, KV, D
    tile = tile or tile_for("packed_attention", problem, q.dtype, q.device, observations=B)
    tiles = -(-M * (H // KV) // tile.m) * KV
    if tile.split > 1:
        workspace.require(tile.split * B * tiles * tile.m * (D + 2), B * tiles)
    several = B > 1
    arguments = {
        "q": q,
        "k": kv[0],
        "v": kv[1],
        "own_k": None if own is None else own[0],
        "own_v": None if own is None else own[1],
        "mask": mask.view(torch.uint8),
        "out": out,
        "parts": workspace.parts.view(q.dtype),
        "sums": workspace.parts[tile.split * B * tiles * tile.m * D :],
        "arrivals": workspace.arrivals,
        "M": M,
        "scale": D**-0.5 * LOG2E,
        "q_row": q.stride(1),
        "kv_row": kv[0].stride(1),
        "own_row": 0 if own is None else own[0].stride(1),
        "mask_row": mask.stride(1),
        "out_row": out.stride(1),
        "q_step": q.stride(0) if several else None,
        "kv_step": kv[0].stride(0) if several else None,
        "own_step": own[0].stride(0) if several and own is not None else None,
        "mask_step": mask.stride(0) if several else None,
        "out_step": out.stride(0) if several else None,
        "P": P,
        "S": S,
        "KV": KV,
        "GROUP": H // KV,
        "D": D,
        "MASKED": MASKED,
        "KEY_MASK": M > 1 and mask.stride(1) == 0,
        "SPLIT": tile.split,
        "APART": tile.split > TOGETHER,
        "BLOCK_M": tile.m,
        "BLOCK_N": tile.n,
        "UPCAST": False,
    }
    grid = (tiles, tile.split, B) if several else (tiles, tile.split)
    launches = [Launch(packed_attention_kernel, grid, arguments, tile)]
    if tile.split > TOGETHER:
        shared = ("parts", "sums", "out", "M", "out_row", "out_step", "KV", "GROUP", "D", "SPLIT", "BLOCK_M")
        joining = {name: arguments[name] for name in shared} | {"tiles": B * tiles, "ROWS": JOINED_ROWS}
        joining["own_tiles"] = tiles if several else None
        rows = (B * tiles * (tile.m // JOINED_ROWS),)
        launches.append(Launch(join_kernel, rows, joining, Tile(tile.m, split=tile.split)))
    return launches


def check_each(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Check a tensor with an axis of observations. Observations and rows may have any stride."""
    if len(tensor) != shape[0]:
        raise ValueError(f"{name}: expected {shape[0]} observations, got {len(tensor)}")
    check(name, tensor[0], shape[1:], rows_apart=True)


def packed_attention(
    q: Tensor, kv: KeyValue, mask: Tensor, *, workspace: Workspace, out: Tensor | None = None, **options
) -> Tensor:
    """Compute :func:`reference` with the kernel.

    The rows of all tensors may be strided, so the keys and values may be views of one cache. ``tile.m`` counts packed
    rows (query x head), ``tile.n`` keys.

    Args:
        q: [B, M, H, D].
        kv: Keys and values of the prefix, [B, P, Hkv, D] each.
        mask: bool [B, M, P + S], True for visible keys. A mask that is equal for all queries may be one expanded row.
        workspace: Memory for partial sums.
        out: Memory for the result, [B, M, H, D], or None.
        **options: ``own``, keys and values of the queries' own tokens, [B, S, Hkv, D] each (without it, S = 0), and
            ``tile``.
    """
    out = torch.empty_like(q) if out is None else out
    for launch in prepare(q, kv, mask, out, workspace, **options):
        launch()
    return out


def reference(q: Tensor, kv: KeyValue, mask: Tensor, *, own: KeyValue | None = None) -> Tensor:
    """Return softmax(q k^T / sqrt(D)) v over the visible keys of the same observation, in float32, rounded once to q's
    dtype.

    A query without visible keys averages all values, as ``sinew.layers.attention.attend`` does. The kernel rounds the
    weights to v's dtype before the second product, but the reference does not.
    """
    k, v = kv if own is None else tuple(torch.cat(pair, dim=1) for pair in zip(kv, own, strict=True))
    G = q.shape[2] // k.shape[2]
    k, v = (tensor.float().repeat_interleave(G, dim=2) for tensor in (k, v))  # [B, P + S, H, D]
    scores = torch.einsum("bmhd,bkhd->bhmk", q.float(), k) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~mask[:, None], MASKED).softmax(dim=-1)
    return torch.einsum("bhmk,bkhd->bmhd", weights, v).to(q.dtype)
