"""Normalisation layers. They compute their statistics in float32 for every dtype of the input."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from sinew.layers.linear import Linear


def rms_normalize(x: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) over the last axis, in float32 (Zhang and Sennrich 2019)."""
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


def modulated_rms(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    """Return rms(x) * (1 + scale) + shift in x's dtype. The sum is computed in float32."""
    return (rms_normalize(x, eps) * (1.0 + scale.float()) + shift.float()).to(x.dtype)


class RMSNorm(nn.Module):
    """Llama's RMS norm: the normalised value is rounded to the input's dtype and then multiplied by the weight."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * rms_normalize(x, self.eps).to(x.dtype)


class GemmaRMSNorm(RMSNorm):
    """Gemma's RMS norm: the factor is 1 + the stored weight, and the result is rounded only at the end."""

    def forward(self, x: Tensor) -> Tensor:
        return (rms_normalize(x, self.eps) * (1.0 + self.weight.float())).to(x.dtype)


class Modulation(NamedTuple):
    """Scale, shift and gate of an adaptive norm, each [B, 1, C]. If each action has its own time, each is [B,
    H, C].
    """

    scale: Tensor
    shift: Tensor
    gate: Tensor

    @classmethod
    def of(cls, packed: Tensor) -> Modulation:  # [B, 3C] or [B, H, 3C]
        return cls(*(packed if packed.ndim == 3 else packed[:, None]).chunk(3, dim=-1))


class AdaRMSNorm(nn.Module):
    """An RMS norm whose scale and shift come from a condition (in pi0.5 the solver's time) instead of a
    weight.

    The condition also gives a gate, which multiplies the residual branch after the norm. The modulation
    (scale, shift and gate) depends only on the condition. So ``dense(condition)``, [B, 3C], is computed
    separately from the hidden states.
    """

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.dense = Linear(size, 3 * size)
        self.eps = eps

    def forward(self, x: Tensor, m: Modulation) -> Tensor:
        return modulated_rms(x, m.scale, m.shift, self.eps)


class LayerNorm(nn.LayerNorm):
    """A layer norm that casts its input to the dtype of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class GroupNorm(nn.GroupNorm):
    """A group norm of [B, C, ...], over each group of channels and all positions (Wu and He 2018)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))
