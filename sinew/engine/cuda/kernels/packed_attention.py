"""Attention of a few queries over a prefix's keys and values and their own.

All query heads of one key/value head are packed into the rows of a tile (50 queries of 8 heads are 400 rows), so
each key is read once for all of them. The keys may be split between ``tile.split`` programs per row block; the
last one to arrive joins the parts in their order, as in :mod:`.splitk_linear`.

A cooperative tile is another kernel for the same: each program has one block of ``tile.n`` keys, prefix and own behind
each other, waits until all programs of its row block have written their parts, and joins its share of the rows. All of
them have to run at once, so there may be no more than the device has multiprocessors, and the launch is a cooperative
one, which a device refuses where they cannot. A counter per row block says how many have arrived. In a launch the
programs add ROUND to it together, the last one what the others leave of it, so that it is a multiple of ROUND exactly
when all have come, and nobody has to reset it: neither a second launch nor a replayed graph meets an old count.

A mask whose rows are one row in memory (``expand``) is read as that: a byte per key instead of one per query and key,
which leaves registers for larger tiles.
"""

from __future__ import annotations

import math

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
    wait_for_input,
)
from sinew.engine.cuda.kernels.launch import Launch, Tile
from sinew.engine.cuda.kernels.tiles import LARGEST_SPLIT
from sinew.engine.cuda.kernels.tuning import multiprocessors, tile_for
from sinew.engine.cuda.kernels.workspace import Workspace

KeyValue = tuple[Tensor, Tensor]
# Looks at a counter, each a round trip to L2, before a program gives up and writes NaN: under a cooperative launch the
# others are microseconds away, and whatever may be wrong with that, a device must not hang.
PATIENCE = 1 << 20


@kernel
def fold_keys(
    acc,
    peak,
    total,
    query,  # [BLOCK_M, D]
    k,
    v,
    mask,  # of this segment's first key
    first,  # key of this block
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
    """One block of keys into the running softmax (base 2): numerator, largest score, denominator."""
    keys = first + tl.arange(0, BLOCK_N)
    key_ok = keys < length
    inside = tl.arange(0, D)
    k_tile = tl.load(
        k + (keys[None, :] * row + inside[:, None]), mask=key_ok[None, :], other=0.0
    )  # [D, BLOCK_N]
    # The score of a key that may not be seen, and of none.
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
    v_tile = tl.load(
        v + (keys[:, None] * row + inside[None, :]), mask=key_ok[:, None], other=0.0
    )  # [BLOCK_N, D]
    acc = dot(weights.to(v_tile.dtype), v_tile, acc * fade[:, None], UPCAST)
    return acc, highest, total * fade + tl.sum(weights, axis=1)


@kernel
def join_part(
    acc, peak, total, parts, peaks, totals, part, rows, inside, BLOCK_M: tl.constexpr, D: tl.constexpr
):
    """One part of the rows into the running softmax, as its program left it."""
    at = part * BLOCK_M + rows
    other = tl.load(peaks + at, cache_modifier=".cg")
    highest = tl.maximum(peak, other)
    fade, rise = tl.exp2(peak - highest), tl.exp2(other - highest)
    numerator = tl.load(parts + (at * D)[:, None] + inside[None, :], cache_modifier=".cg")
    acc = acc * fade[:, None] + numerator * rise[:, None]
    total = total * fade + tl.load(totals + at, cache_modifier=".cg") * rise
    return acc, highest, total


@kernel
def packed_attention_kernel(
    q,  # [M, KV * GROUP, D]
    k,  # [P, KV, D]
    v,
    own_k,  # [S, KV, D] or None
    own_v,
    mask,  # uint8 [M, P + S], or [P + S] with KEY_MASK
    out,  # [M, KV * GROUP, D]
    parts,  # float32 [SPLIT, tiles, BLOCK_M, D], then [SPLIT, tiles, BLOCK_M] twice
    arrivals,  # int32 [tiles]
    M,
    scale,  # of the scores, times log2(e)
    q_row,
    kv_row,
    own_row,
    mask_row,
    out_row,
    P: tl.constexpr,
    S: tl.constexpr,
    KV: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    MASKED: tl.constexpr,
    KEY_MASK: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    BLOCKS: tl.constexpr = ((P + BLOCK_N - 1) // BLOCK_N + SPLIT - 1) // SPLIT  # of the prefix, per program
    tile = tl.program_id(0)
    split = tl.program_id(1)
    head = tile % KV
    packed = (tile // KV) * BLOCK_M + tl.arange(0, BLOCK_M)  # query * GROUP + head in group
    queries = packed // GROUP
    row_ok = queries < M
    inside = tl.arange(0, D)
    at = (head * GROUP + packed % GROUP) * D
    wait_for_input(PDL)
    query = tl.load(q + (queries * q_row + at)[:, None] + inside[None, :], mask=row_ok[:, None], other=0.0)
    mask_rows = queries * mask_row
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    peak = tl.full((BLOCK_M,), -3.0e38, tl.float32)  # below MASKED and finite: no infinity minus infinity
    total = tl.zeros((BLOCK_M,), tl.float32)
    for block in range(BLOCKS):
        acc, peak, total = fold_keys(
            acc, peak, total, query, k + head * D, v + head * D, mask, (split * BLOCKS + block) * BLOCK_N,
            row_ok, mask_rows, P, kv_row, scale, MASKED, KEY_MASK, D, BLOCK_N, UPCAST,
        )  # fmt: skip
    if own_k is not None:  # noqa: SIM102 - known when the kernel is compiled, unlike what follows
        if split == SPLIT - 1:
            for first in range(0, S, BLOCK_N):
                acc, peak, total = fold_keys(
                    acc, peak, total, query, own_k + head * D, own_v + head * D, mask + P, first,
                    row_ok, mask_rows, S, own_row, scale, MASKED, KEY_MASK, D, BLOCK_N, UPCAST,
                )  # fmt: skip
    is_last = True
    if SPLIT > 1:
        tiles = tl.num_programs(0)
        rows = tl.arange(0, BLOCK_M)
        flat = rows[:, None] * D + inside[None, :]
        peaks = parts + SPLIT * tiles * (BLOCK_M * D)
        totals = peaks + SPLIT * tiles * BLOCK_M
        own = split * tiles + tile
        tl.store(parts + own * (BLOCK_M * D) + flat, acc)
        tl.store(peaks + own * BLOCK_M + rows, peak)
        tl.store(totals + own * BLOCK_M + rows, total)
        is_last = came_last(arrivals + tile, SPLIT)
        if is_last:
            acc = tl.zeros((BLOCK_M, D), tl.float32)
            peak = tl.full((BLOCK_M,), -3.0e38, tl.float32)
            total = tl.zeros((BLOCK_M,), tl.float32)
            for s in range(SPLIT):
                acc, peak, total = join_part(
                    acc, peak, total, parts, peaks, totals, s * tiles + tile, rows, inside, BLOCK_M, D
                )
            tl.store(arrivals + tile, 0)
    if is_last:
        to = out + (queries * out_row + at)[:, None] + inside[None, :]
        tl.store(to, (acc / total[:, None]).to(out.dtype.element_ty), mask=row_ok[:, None])


@kernel
def cooperative_attention_kernel(
    q,  # these as above
    k,
    v,
    own_k,
    own_v,
    mask,
    out,
    parts,
    turns,  # int32 [tiles], multiples of ROUND before and after
    M,
    scale,
    q_row,
    kv_row,
    own_row,
    mask_row,
    out_row,
    P: tl.constexpr,
    S: tl.constexpr,
    KV: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    MASKED: tl.constexpr,
    KEY_MASK: tl.constexpr,
    SPLIT: tl.constexpr,
    SHARE: tl.constexpr,  # rows that a program joins: a power of two, so no share is cut by the end of the block
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROUND: tl.constexpr,  # what the programs of a row block add to its counter in all
    PATIENCE: tl.constexpr,  # looks at the counter before a program gives up
    PHASE: tl.constexpr,  # 0: all of it; 1: up to the arrival; 2: from the wait on
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    tile = tl.program_id(0)
    split = tl.program_id(1)
    tiles = tl.num_programs(0)
    head = tile % KV
    first_row = (tile // KV) * BLOCK_M
    inside = tl.arange(0, D)
    peaks = parts + SPLIT * tiles * (BLOCK_M * D)
    totals = peaks + SPLIT * tiles * BLOCK_M
    count = 1
    wait_for_input(PDL)
    if PHASE != 2:
        rows = tl.arange(0, BLOCK_M)
        packed = first_row + rows  # query * GROUP + head in group
        queries = packed // GROUP
        row_ok = queries < M
        at = queries * q_row + (head * GROUP + packed % GROUP) * D
        query = tl.load(q + at[:, None] + inside[None, :], mask=row_ok[:, None], other=0.0)
        keys = split * BLOCK_N + tl.arange(0, BLOCK_N)
        key_ok = keys < P + S
        k_at, v_at = k + head * D + keys * kv_row, v + head * D + keys * kv_row
        if own_k is not None:
            is_own = keys >= P
            k_at = tl.where(is_own, own_k + head * D + (keys - P) * own_row, k_at)
            v_at = tl.where(is_own, own_v + head * D + (keys - P) * own_row, v_at)
        k_tile = tl.load(k_at[None, :] + inside[:, None], mask=key_ok[None, :], other=0.0)  # [D, BLOCK_N]
        if KEY_MASK:
            sees = tl.load(mask + keys, mask=key_ok, other=0)[None, :]
        else:
            ok = row_ok[:, None] & key_ok[None, :]
            sees = tl.load(mask + ((queries * mask_row)[:, None] + keys[None, :]), mask=ok, other=0)
        v_tile = tl.load(v_at[:, None] + inside[None, :], mask=key_ok[:, None], other=0.0)  # [BLOCK_N, D]
        scores = dot(query, k_tile, tl.zeros((BLOCK_M, BLOCK_N), tl.float32), UPCAST) * scale
        # The score of a key that may not be seen, and of none.
        scores = tl.where(sees != 0, scores, tl.where(key_ok, MASKED, float("-inf"))[None, :])
        peak = tl.max(scores, axis=1)  # finite: each program has a key
        weights = tl.exp2(scores - peak[:, None])
        acc = dot(weights.to(v_tile.dtype), v_tile, tl.zeros((BLOCK_M, D), tl.float32), UPCAST)
        own = (split * tiles + tile) * BLOCK_M + rows
        tl.store(parts + (own * D)[:, None] + inside[None, :], acc)
        tl.store(peaks + own, peak)
        tl.store(totals + own, tl.sum(weights, axis=1))
        tl.debug_barrier()  # every thread's part is written before one thread says so
        amount = tl.where(split == SPLIT - 1, ROUND - SPLIT + 1, 1)
        count = tl.atomic_add(turns + tile, amount, sem="acq_rel", scope="gpu") + amount
    if PHASE != 1:
        looks = 0
        while (count % ROUND != 0) & (looks < PATIENCE):
            count = tl.atomic_add(turns + tile, 0, sem="acquire", scope="gpu")
            looks += 1
        tl.debug_barrier()  # no thread reads a part before the one that looked has seen all of them
        if split * SHARE < BLOCK_M:
            mine = split * SHARE + tl.arange(0, SHARE)
            numerator = tl.zeros((SHARE, D), tl.float32)
            highest = tl.full((SHARE,), -3.0e38, tl.float32)
            denominator = tl.zeros((SHARE,), tl.float32)
            for s in tl.static_range(SPLIT):  # unrolled: all parts are on their way at once
                numerator, highest, denominator = join_part(
                    numerator, highest, denominator, parts, peaks, totals, s * tiles + tile, mine, inside, BLOCK_M, D
                )  # fmt: skip
            result = tl.where(count % ROUND != 0, float("nan"), numerator / denominator[:, None])
            joined = first_row + mine
            to = (
                out
                + (joined // GROUP * out_row + (head * GROUP + joined % GROUP) * D)[:, None]
                + inside[None, :]
            )
            tl.store(to, result.to(out.dtype.element_ty), mask=(joined // GROUP < M)[:, None])


def prepare(
    q: Tensor,
    kv: KeyValue,
    mask: Tensor,
    out: Tensor,
    workspace: Workspace,
    *,
    own: KeyValue | None = None,
    tile: Tile | None = None,
    pdl: bool = False,
) -> Launch:
    M, H, D = q.shape
    P, KV = kv[0].shape[:2]
    S = 0 if own is None else len(own[0])
    if KV < 1 or H % KV:
        raise ValueError(f"q: expected a multiple of the {KV} key/value heads, got {H} heads")
    if D < 16 or D & (D - 1):
        raise ValueError(f"q: expected a head size that is a power of two, 16 or more, got {D}")
    check("q", q, (M, H, D), rows_apart=True)
    check("out", out, (M, H, D), rows_apart=True)
    check("mask", mask, (M, P + S), rows_apart=True)
    same_dtype("mask", mask, torch.bool)
    for name, tensor in zip(("k", "v", "own k", "own v"), (*kv, *(own or ())), strict=False):
        check(name, tensor, (S if name.startswith("own") else P, KV, D), rows_apart=True)
        same_dtype(name, tensor, q.dtype)
    for name, (a, b) in (("k, v", kv), ("own k, v", own or kv)):
        if a.stride(0) != b.stride(0):
            raise ValueError(f"{name}: expected one distance between rows, got {a.stride(0)}, {b.stride(0)}")
    tile = tile or tile_for("packed_attention", (M * H // KV, P, S, KV, D), q.dtype, q.device)
    tiles = -(-M * (H // KV) // tile.m) * KV
    if tile.split > 1 or tile.cooperative:
        workspace.require(tile.split * tiles * tile.m * (D + 2), tiles)
    arguments = {
        "q": q,
        "k": kv[0],
        "v": kv[1],
        "own_k": None if own is None else own[0],
        "own_v": None if own is None else own[1],
        "mask": mask.view(torch.uint8),
        "out": out,
        "parts": workspace.parts,
        "arrivals": workspace.arrivals,
        "M": M,
        "scale": D**-0.5 * LOG2E,
        "q_row": q.stride(0),
        "kv_row": kv[0].stride(0),
        "own_row": 0 if own is None else own[0].stride(0),
        "mask_row": mask.stride(0),
        "out_row": out.stride(0),
        "P": P,
        "S": S,
        "KV": KV,
        "GROUP": H // KV,
        "D": D,
        "MASKED": MASKED,
        "KEY_MASK": M > 1 and mask.stride(0) == 0,
        "SPLIT": tile.split,
        "BLOCK_M": tile.m,
        "BLOCK_N": tile.n,
        "UPCAST": False,
        "PDL": pdl,
    }
    grid = tiles, tile.split
    if not tile.cooperative:
        return Launch(packed_attention_kernel, grid, arguments, tile, pdl)
    blocks, most = -(-(P + S) // tile.n), multiprocessors(q.device)
    if tile.split != blocks or blocks > LARGEST_SPLIT:
        raise ValueError(f"tile: expected split {blocks}, at most {LARGEST_SPLIT}, got {tile.split}")
    if most is not None and math.prod(grid) > most:
        raise ValueError(f"tile: expected at most {most} programs at once, got {math.prod(grid)}")
    share = 1 << (-(-tile.m // tile.split) - 1).bit_length()
    del arguments["arrivals"]
    counting = {"turns": workspace.turns, "ROUND": LARGEST_SPLIT, "PATIENCE": PATIENCE, "PHASE": 0}
    arguments |= {"SHARE": share, **counting}
    return Launch(cooperative_attention_kernel, grid, arguments, tile, pdl)


def packed_attention(
    q: Tensor, kv: KeyValue, mask: Tensor, *, workspace: Workspace, out: Tensor | None = None, **options
) -> Tensor:
    """q: [M, H, D]; kv: k and v of the prefix, [P, Hkv, D]; mask: bool [M, P + S], True = may see -> [M, H, D].

    ``own``: k and v of the queries' own tokens, [S, Hkv, D]; without it, S = 0. Rows may be strided, so all of
    them may be views of one cache, and a mask that is the same for every query one row, expanded. ``tile.m`` counts
    packed rows (query x head), ``tile.n`` keys.
    """
    out = torch.empty_like(q) if out is None else out
    prepare(q, kv, mask, out, workspace, **options)()
    return out


def reference(q: Tensor, kv: KeyValue, mask: Tensor, *, own: KeyValue | None = None) -> Tensor:
    """softmax(q k^T / sqrt(D)) v over the visible keys, float32 throughout, rounded once to q's dtype.

    A query that may see nothing averages all values, as ``sinew.layers.attention.attend`` does. The kernel
    rounds the weights to v's dtype before the second product; the reference does not.
    """
    k, v = kv if own is None else tuple(torch.cat(pair) for pair in zip(kv, own, strict=True))
    G = q.shape[1] // k.shape[1]
    k, v = (tensor.float().repeat_interleave(G, dim=1) for tensor in (k, v))  # [P + S, H, D]
    scores = torch.einsum("mhd,khd->hmk", q.float(), k) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~mask, MASKED).softmax(dim=-1)
    return torch.einsum("hmk,khd->mhd", weights, v).to(q.dtype)
