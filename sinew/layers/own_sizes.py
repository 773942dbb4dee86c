"""Encode camera views of different sizes. One array contains all views, each in the top left corner of its
part of the array.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

Sizes = Sequence[tuple[int, int]]


def embed_own_sizes(embed: Callable[[Tensor], Tensor], pixels: Tensor, frames: Sizes) -> Tensor:
    """Encode each view at its own size.

    Args:
        embed: Function from the pixels of one view, [B, channels, height, width], to its tokens, [B, N, C].
        pixels: [B, V, channels, H, W]. Pixels outside a view's picture are ignored.
        frames: Height and width in pixels of each view's picture, V entries.

    Returns:
        Tokens of all views, [B, V, most tokens of a view, C]. The tokens of a smaller view are followed by zeros.
    """
    views = [embed(pixels[:, view, :, :height, :width]) for view, (height, width) in enumerate(frames)]
    most = max(tokens.shape[1] for tokens in views)
    return torch.stack([F.pad(tokens, (0, 0, 0, most - tokens.shape[1])) for tokens in views], dim=1)


def without_padding(image_tokens: Tensor, counts: Sequence[int]) -> Tensor:
    """Return the tokens of all views, one view after the other, without padding.

    Args:
        image_tokens: Result of :func:`embed_own_sizes`, [B, V, most, C].
        counts: Number of tokens of each view.

    Returns:
        [B, sum of counts, C].
    """
    return torch.cat([image_tokens[:, view, :count] for view, count in enumerate(counts)], dim=1)
