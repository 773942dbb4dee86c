"""Attention with grouped key/value heads, and the masks that flow-matching VLAs use."""

from __future__ import annotations

import torch
from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Masked scaled dot-product attention, with scores and softmax in float32.

    A row that may attend to nothing (padding) averages all values, as the reference does, so no NaN arises.

    Args:
        q: [B, Lq, H, D].
        k: [B, Lk, Hkv, D], with H a multiple of Hkv.
        v: [B, Lk, Hkv, D].
        mask: bool [B, Lq, Lk], True if the row may attend to the column.

    Returns:
        [B, Lq, H * D] in v's dtype.
    """
    B, Lq, H, D = q.shape
    Lk, Hkv = k.shape[1:3]
    G = H // Hkv
    # Queries of one group share their key head: fold the group into the rows instead of repeating keys.
    q = q.float().view(B, Lq, Hkv, G, D).permute(0, 2, 3, 1, 4)  # [B, Hkv, G, Lq, D]
    q = q.reshape(B, Hkv, G * Lq, D)
    scores = q @ k.float().permute(0, 2, 3, 1) * D**-0.5  # [B, Hkv, G * Lq, Lk]
    scores = scores.view(B, Hkv, G, Lq, Lk)
    scores = scores.masked_fill(~mask[:, None, None], torch.finfo(torch.float32).min)
    weights = scores.softmax(dim=-1).to(v.dtype).view(B, Hkv, G * Lq, Lk)
    out = weights @ v.transpose(1, 2)  # [B, Hkv, G * Lq, D]
    return out.view(B, Hkv, G, Lq, D).permute(0, 3, 1, 2, 4).reshape(B, Lq, H * D)


def key_mask(valid: Tensor, queries: int) -> Tensor:
    """Return a mask with which every query attends to every valid key: one row of memory, expanded.

    valid: bool [B, L], False for padding -> bool [B, queries, L]. Over a sequence's own keys it equals
    :func:`block_mask` with one block, except in rows of padding, which are never read.
    """
    return valid[:, None].expand(-1, queries, -1)


def block_mask(valid: Tensor, opens_block: Tensor) -> Tensor:
    """Block-causal mask: a token sees every valid token of its own block and of the blocks before it.

    valid: bool [B, L], False for padding; opens_block: bool [B, L], True where a new block starts (all True
    is causal, all False is bidirectional). Returns bool [B, L, L] indexed [query, key].
    Source: big_vision's ``make_attn_mask``, as used by openpi and LeRobot.
    """
    block = opens_block.long().cumsum(dim=1)  # [B, L]
    may_see = block[:, None, :] <= block[:, :, None]
    return may_see & valid[:, None, :] & valid[:, :, None]
