"""Rotate queries and keys and write them into the cache, after a library computed the packed projections.

:mod:`.qkv_rope` does the same after its product. Here it is a separate pass, and a program computes some rows of one
head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sinew.engine.cuda.kernels.fp8_quantize import FLOATING
from sinew.engine.cuda.kernels.lang import check, kernel, same_dtype, tl
from sinew.engine.cuda.kernels.launch import Launch, Tile
from sinew.engine.cuda.kernels.tiles import tile_for


@kernel
def write_turned(
    low,  # float32 [BLOCK_M, BLOCK_N], from the lower half of the head
    high,  # float32 [BLOCK_M, BLOCK_N], the same columns from the upper half of the head
    cos,
    sin,
    q,
    k,
    v,
    rows,
    cols,
    ok,
    head,
    q_row,
    k_row,
    v_row,
    H: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
):
    """Rotate queries and keys, and write queries, keys and values to their memory. Values are not rotated."""
    HALF: tl.constexpr = D // 2
    if head < H + KV:
        table = rows[:, None] * HALF + cols[None, :]
        c = tl.load(cos + table, mask=ok, other=0.0)
        s = tl.load(sin + table, mask=ok, other=0.0)
        turned_low = low * c - high * s
        turned_high = high * c + low * s
        if head < H:
            to_q = q + rows[:, None] * q_row + (head * D + cols)[None, :]
            tl.store(to_q, turned_low.to(q.dtype.element_ty), mask=ok)
            tl.store(to_q + HALF, turned_high.to(q.dtype.element_ty), mask=ok)
        else:
            to_k = k + rows[:, None] * k_row + ((head - H) * D + cols)[None, :]
            tl.store(to_k, turned_low.to(k.dtype.element_ty), mask=ok)
            tl.store(to_k + HALF, turned_high.to(k.dtype.element_ty), mask=ok)
    else:
        to_v = v + rows[:, None] * v_row + ((head - H - KV) * D + cols)[None, :]
        tl.store(to_v, low.to(v.dtype.element_ty), mask=ok)
        tl.store(to_v + HALF, high.to(v.dtype.element_ty), mask=ok)


@kernel
def rope_kernel(
    packed,  # [M, (H + 2 Hkv) * D]
    bias,  # [(H + 2 Hkv) * D] or None
    cos,  # float32 [M, D / 2]
    sin,
    q,  # [M, H, D]; the rows may be strided
    k,  # [M, Hkv, D]; the rows may be strided
    v,
    M,
    packed_row,
    q_row,
    k_row,
    v_row,
    H: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # a power of two of at least D / 2
):
    HALF: tl.constexpr = D // 2
    HEADS: tl.constexpr = H + 2 * KV
    head = tl.program_id(0) % HEADS  # heads change fastest, because all heads share the tables of their rows
    rows = (tl.program_id(0) // HEADS) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    ok = (rows < M)[:, None] & (cols < HALF)[None, :]
    x_tile = packed + rows[:, None] * packed_row + (head * D + cols)[None, :]
    low = tl.load(x_tile, mask=ok, other=0.0).to(tl.float32)
    high = tl.load(x_tile + HALF, mask=ok, other=0.0).to(tl.float32)
    if bias is not None:
        low += tl.load(bias + head * D + cols, mask=cols < HALF, other=0.0).to(tl.float32)[None, :]
        high += tl.load(bias + head * D + HALF + cols, mask=cols < HALF, other=0.0).to(tl.float32)[None, :]
    write_turned(low, high, cos, sin, q, k, v, rows, cols, ok, head, q_row, k_row, v_row, H, KV, D)


def prepare(
    packed: Tensor,
    cos: Tensor,
    sin: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bias: Tensor | None = None,
    tile: Tile | None = None,
) -> Launch:
    M, columns = packed.shape
    H, D = q.shape[-2:]
    KV = k.shape[-2]
    if D % 2:
        raise ValueError(f"q: rotation needs an even head size, got {D}")
    check("packed", packed, (M, (H + 2 * KV) * D), rows_apart=True)
    check("q", q, (M, H, D), rows_apart=True)
    check("k", k, (M, KV, D), rows_apart=True)
    check("v", v, (M, KV, D), rows_apart=True)
    for name, table in (("cos", cos), ("sin", sin)):
        check(name, table, (M, D // 2))
        same_dtype(name, table, torch.float32)
    for name, tensor in (("packed", packed), ("q", q), ("k", k), ("v", v)):
        if tensor.dtype not in FLOATING:
            raise ValueError(f"{name}: expected dtype float32, bfloat16 or float16, got {tensor.dtype}")
    if bias is not None:
        check("bias", bias, (columns,))
    tile = tile or tile_for("rope", (M, columns, D), packed.dtype, packed.device)
    arguments = {
        "packed": packed,
        "bias": bias,
        "cos": cos,
        "sin": sin,
        "q": q,
        "k": k,
        "v": v,
        "M": M,
        "packed_row": packed.stride(0),
        "q_row": q.stride(0),
        "k_row": k.stride(0),
        "v_row": v.stride(0),
        "H": H,
        "KV": KV,
        "D": D,
        "BLOCK_M": tile.m,
        "BLOCK_N": 1 << (D // 2 - 1).bit_length(),
    }
    return Launch(rope_kernel, (-(-M // tile.m) * (H + 2 * KV),), arguments, tile)


def rope(packed: Tensor, cos: Tensor, sin: Tensor, q: Tensor, k: Tensor, v: Tensor, **options) -> None:
    """Compute :func:`reference` with the kernel, and write q, k and v.

    Args:
        packed: [M, (H + 2 Hkv) D]: queries, then keys, then values.
        cos: float32 [M, D / 2], one row per row of ``packed``.
        sin: float32 [M, D / 2].
        q: [M, H, D], written. H may be 0, for keys and values alone.
        k: [M, Hkv, D], written. The rows may be rows of a cache. Hkv may be 0, for queries alone.
        v: [M, Hkv, D], written.
        **options: Other options of :func:`prepare`.
    """
    prepare(packed, cos, sin, q, k, v, **options)()


def reference(
    packed: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: tuple[int, int],
    *,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v of packed + bias, with q and k rotated, in float32 rounded once.

    For a float32 product, the result equals :func:`.qkv_rope.reference`.

    Args:
        packed: [M, (H + 2 Hkv) D].
        cos: float32 [M, D / 2].
        sin: float32 [M, D / 2].
        heads: (H, Hkv).
        bias: [(H + 2 Hkv) D], or None.
        dtype: Dtype of the results, by default packed's dtype.
    """
    H, KV = heads
    wide = packed.float() if bias is None else packed.float() + bias.float()
    turning, v = wide.unflatten(-1, (H + 2 * KV, 2 * cos.shape[-1])).split([H + KV, KV], dim=1)
    low, high = turning.chunk(2, dim=-1)
    c, s = cos[:, None], sin[:, None]
    dtype = dtype or packed.dtype
    turned = torch.cat([low * c - high * s, high * c + low * s], dim=-1).to(dtype)
    return turned[:, :H], turned[:, H:], v.to(dtype)
