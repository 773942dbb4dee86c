"""A vision transformer that reads several frames of a view and returns features of the newest frame.

Source: MEM (arXiv 2603.03596), section III-C and appendix C, as in LeRobot's pi0.5 (``policies/pi05/memory.py``). There
are no additional weights: every ``temporal_every``-th layer attends across frames and patches with its own projections.
"""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from sinew.layers.vit import VisionTransformer, ViTConfig, ViTLayer


class VideoTransformer(VisionTransformer):
    """A :class:`VisionTransformer` over several frames. With one frame it equals :class:`VisionTransformer`."""

    def __init__(self, config: ViTConfig, temporal_every: int):
        super().__init__(config)
        check_frames(config, temporal_every)
        self.temporal_every = temporal_every

    def watch(self, frames: Tensor) -> Tensor:
        """Encode the frames of a view.

        Missing frames at the start of an episode are omitted, so T is then smaller. This gives the same result as a
        mask, because ages are counted from the newest frame and no frame attends to a later frame.

        Args:
            frames: [B, T, 3, height, width], the newest frame last.

        Returns:
            Features of the newest frame, [B, patches, C].
        """
        B, T = frames.shape[:2]
        pixels = frames.flatten(0, 1)
        patches = self.patch_embedding(pixels.to(self.patch_embedding.weight.dtype))  # [B * T, C, rows, cols]
        rows, cols = patches.shape[-2:]
        x = self.positions(rows, cols) + patches.flatten(2).transpose(1, 2)
        x = x.unflatten(0, (B, T))  # [B, T, P, C]
        ages = frame_ages(T, x.shape[-1], x.device).to(x.dtype)
        last = len(self.layers) // self.temporal_every * self.temporal_every
        for number, layer in enumerate(self.layers, 1):
            if number > last:
                break
            if number % self.temporal_every:
                x = layer(x.flatten(0, 1)).unflatten(0, (B, T))
            else:
                x = across_frames(cast(ViTLayer, layer), x, ages, newest=number == last)
        x = x[:, -1]  # keep only the newest frame, [B, P, C], because no later layer reads other frames
        for layer in self.layers[last:]:
            x = layer(x)
        return self.norm(x)


def check_frames(config: ViTConfig, temporal_every: int) -> None:
    """Raise ValueError if the tower cannot read several frames."""
    if not 1 <= temporal_every <= config.num_layers or config.prefix_tokens or config.hidden_size % 2:
        raise ValueError(
            f"vision: expected attention across frames every 1 to {config.num_layers} layers, an even width and"
            f" no prefix tokens, got {temporal_every}, {config.hidden_size} and {config.prefix_tokens}"
        )


def frame_ages(frames: int, size: int, device: torch.device) -> Tensor:
    """Return the embedding of each frame's age, float32 [frames, size].

    The entries alternate between sin and cos - 1 of each frequency. The embedding of the newest frame is exactly zero.
    """
    age = torch.arange(frames, dtype=torch.float32, device=device)[:, None] - (frames - 1)
    pairs = torch.arange(0, size, 2, dtype=torch.float32, device=device)
    angle = age * torch.exp(pairs * (-math.log(10_000.0) / size))  # [T, size / 2]
    return torch.stack([angle.sin(), angle.cos() - 1.0], dim=-1).flatten(1)


def across_frames(layer: ViTLayer, x: Tensor, ages: Tensor, newest: bool) -> Tensor:
    """Run a layer that attends across frames (appendix C, equation 3).

    For each patch, the values of all frames up to the current frame are mixed first. Then the patches of a frame attend
    to each other. The age embeddings are added to the attention's input only, not to the residual stream.

    Args:
        layer: The layer.
        x: Input, [B, T, P, C].
        ages: [T, C].
        newest: True returns only the newest frame, if later layers read no other frame.

    Returns:
        [B, T, P, C], or [B, 1, P, C] if ``newest`` is True.
    """
    B, T, P, _ = x.shape
    attn = layer.attn
    q, k, v = attn.project(layer.norm1(x + ages[:, None]))  # [B, T, P, C] each

    def by_patch(part: Tensor) -> Tensor:  # input shape [B, T, P, C], output shape [B * P, heads, T, D]
        return part.unflatten(-1, (-1, attn.head_dim)).permute(0, 2, 3, 1, 4).flatten(0, 1)

    sees = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()
    mixed = F.scaled_dot_product_attention(by_patch(q), by_patch(k), by_patch(v), attn_mask=sees)
    v = mixed.unflatten(0, (B, P)).permute(0, 3, 1, 2, 4).flatten(3)  # [B, T, P, C]
    if newest:
        x, q, k, v = (part[:, -1:] for part in (x, q, k, v))
    attended = attn.attend(*(part.flatten(0, 1).contiguous() for part in (q, k, v))).unflatten(0, x.shape[:2])
    x = x + layer.scale1(attn.o_proj(attended))
    return x + layer.scale2(layer.mlp(layer.norm2(x)))
