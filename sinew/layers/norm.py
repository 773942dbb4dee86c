"""Normalisation layers. Statistics are float32 for every dtype of the stream."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from sinew.layers.linear import Linear


def rms_normalize(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last axis, in float32  (Zhang and Sennrich 2019)."""
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


class RMSNorm(nn.Module):
    """Llama's form: the normalised value is rounded to the stream's dtype, then the weight multiplies it."""

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
    """Gemma's form: the stored weight is an offset from one, and rounding comes last."""

    def forward(self, x: Tensor) -> Tensor:
        return (rms_normalize(x, self.eps) * (1.0 + self.weight.float())).to(x.dtype)


class Modulation(NamedTuple):
    """Scale, shift and gate of an adaptive norm, each [B, 1, C]; [B, H, C] where rows have own times."""

    scale: Tensor
    shift: Tensor
    gate: Tensor

    @classmethod
    def of(cls, packed: Tensor) -> Modulation:  # [B, 3C] or [B, H, 3C]
        return cls(*(packed if packed.ndim == 3 else packed[:, None]).chunk(3, dim=-1))


class AdaRMSNorm(nn.Module):
    """RMSNorm whose affine part comes from a condition (pi0.5: the solver's time) instead of a weight.

    The condition also yields a gate for the residual branch that follows. The modulation depends on the
    condition alone, so it is computed apart from the stream it modulates: ``dense(condition)``, [B, 3C].
    """

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.dense = Linear(size, 3 * size)
        self.eps = eps

    def forward(self, x: Tensor, m: Modulation) -> Tensor:
        return (rms_normalize(x, self.eps) * (1.0 + m.scale.float()) + m.shift.float()).to(x.dtype)


class LayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class GroupNorm(nn.GroupNorm):
    """Of [B, C, ...], over each group of channels and all places (Wu and He 2018)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))
