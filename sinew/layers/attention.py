"""Attention with grouped key/value heads, and the masks that flow-matching VLAs use."""

from __future__ import annotations

import torch
from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Masked scaled dot-product attention, with scores and softmax in float32.

    A query without any allowed key (padding) averages all values, as the reference does, so the result has no NaN.

    Args:
        q: [B, Lq, H, D].
        k: [B, Lk, Hkv, D], with H a multiple of Hkv.
        v: [B, Lk, Hkv, D].
        mask: bool [B, Lq, Lk], True if the query may attend to the key.

    Returns:
        [B, Lq, H * D] in v's dtype.
    """
    B, Lq, H, D = q.shape
    Lk, Hkv = k.shape[1:3]
    G = H // Hkv
    # The queries of one group share one key head (grouped-query attention). Moving the group into the query
    # axis avoids a copy of the keys for each query.
    q = q.float().view(B, Lq, Hkv, G, D).permute(0, 2, 3, 1, 4)  # [B, Hkv, G, Lq, D]
    q = q.reshape(B, Hkv, G * Lq, D)
    scores = q @ k.float().permute(0, 2, 3, 1) * D**-0.5  # [B, Hkv, G * Lq, Lk]
    scores = scores.view(B, Hkv, G, Lq, Lk)
    scores = scores.masked_fill(~mask[:, None, None], torch.finfo(torch.float32).min)
    weights = scores.softmax(dim=-1).to(v.dtype).view(B, Hkv, G * Lq, Lk)
    out = weights @ v.transpose(1, 2)  # [B, Hkv, G * Lq, D]
    return out.view(B, Hkv, G, Lq, D).permute(0, 3, 1, 2, 4).reshape(B, Lq, H * D)


def key_mask(valid: Tensor, queries: int) -> Tensor:
    """Return an attention mask with which every query attends to every valid key.

    The mask has the memory of one row, which is expanded to all queries. For self-attention the mask equals
    :func:`block_mask` with a single block, except for padded queries, whose results are never read.

    Args:
        valid: bool [B, L], False for padding.
        queries: Number of queries.

    Returns:
        bool [B, queries, L].
    """
    return valid[:, None].expand(-1, queries, -1)


def block_mask(valid: Tensor, opens_block: Tensor) -> Tensor:
    """Return a block-causal mask, with which a token attends to the valid tokens of its own block and of earlier
    blocks.

    Source: big_vision's ``make_attn_mask``, as used by openpi and LeRobot.

    Args:
        valid: bool [B, L], False for padding.
        opens_block: bool [B, L], True where a new block starts. All True gives a causal mask, and all False gives a
            bidirectional mask.

    Returns:
        bool [B, L, L], indexed [query, key].
    """
    block = opens_block.long().cumsum(dim=1)  # [B, L]
    may_see = block[:, None, :] <= block[:, :, None]
    return may_see & valid[:, None, :] & valid[:, :, None]
