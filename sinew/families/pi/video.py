"""A vision transformer that reads several frames of a view and answers for the newest one (MEM, arXiv 2603.03596).

Section III-C and appendix C there, as LeRobot's pi0.5 has it (``policies/pi05/memory.py``). No layer has weights of its
own for it: every ``temporal_every``-th one attends across frames and patches with the projections that it has.
"""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from sinew.layers.vit import VisionTransformer, ViTConfig, ViTLayer


class VideoTransformer(VisionTransformer):
    """:class:`VisionTransformer` over frames. With one frame it computes what that does."""

    def __init__(self, config: ViTConfig, temporal_every: int):
        super().__init__(config)
        check_frames(config, temporal_every)
        self.temporal_every = temporal_every

    def watch(self, frames: Tensor) -> Tensor:
        """frames: [B, T, 3, height, width], the newest last -> features of the newest [B, patches, C].

        Frames that are not there are left out. Ages are counted from the newest frame and none sees a later one, so
        masking them changes nothing: T is 1 at the start of an episode.
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
        x = x[:, -1]  # [B, P, C]: no frame is mixed with another any more
        for layer in self.layers[last:]:
            x = layer(x)
        return self.norm(x)


def check_frames(config: ViTConfig, temporal_every: int) -> None:
    """Raise ValueError for a tower that cannot read frames so."""
    if not 1 <= temporal_every <= config.num_layers or config.prefix_tokens or config.hidden_size % 2:
        raise ValueError(
            f"vision: expected attention across frames every 1 to {config.num_layers} layers, an even width and"
            f" no prefix tokens, got {temporal_every}, {config.hidden_size} and {config.prefix_tokens}"
        )


def frame_ages(frames: int, size: int, device: torch.device) -> Tensor:
    """Return the embedding of a frame's age, float32 [frames, size]: sin and cos - 1 of each frequency, interleaved.

    The newest frame's is exactly zero.
    """
    age = torch.arange(frames, dtype=torch.float32, device=device)[:, None] - (frames - 1)
    pairs = torch.arange(0, size, 2, dtype=torch.float32, device=device)
    angle = age * torch.exp(pairs * (-math.log(10_000.0) / size))  # [T, size / 2]
    return torch.stack([angle.sin(), angle.cos() - 1.0], dim=-1).flatten(1)


def across_frames(layer: ViTLayer, x: Tensor, ages: Tensor, newest: bool) -> Tensor:
    """Run a layer whose values are mixed over the frames up to each one, patch by patch, before patches attend to each
    other (appendix C, equation 3). The ages are not in what the layer adds to.

    x: [B, T, P, C]; ages: [T, C]. Returns the same, or the newest frame's [B, 1, P, C] where nothing else is read.
    """
    B, T, P, _ = x.shape
    attn = layer.attn
    q, k, v = attn.project(layer.norm1(x + ages[:, None]))  # [B, T, P, C] each

    def by_patch(part: Tensor) -> Tensor:  # [B, T, P, C] -> [B * P, heads, T, D]
        return part.unflatten(-1, (-1, attn.head_dim)).permute(0, 2, 3, 1, 4).flatten(0, 1)

    sees = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()
    mixed = F.scaled_dot_product_attention(by_patch(q), by_patch(k), by_patch(v), attn_mask=sees)
    v = mixed.unflatten(0, (B, P)).permute(0, 3, 1, 2, 4).flatten(3)  # [B, T, P, C]
    if newest:
        x, q, k, v = (part[:, -1:] for part in (x, q, k, v))
    attended = attn.attend(*(part.flatten(0, 1).contiguous() for part in (q, k, v))).unflatten(0, x.shape[:2])
    x = x + layer.scale1(attn.o_proj(attended))
    return x + layer.scale2(layer.mlp(layer.norm2(x)))
