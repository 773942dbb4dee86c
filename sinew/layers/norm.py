"""Normalisation layers. Statistics are float32 whatever the dtype of the stream."""

from __future__ import annotations

import torch
from torch import Tensor, nn


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

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * rms_normalize(x, self.eps).to(x.dtype)


class GemmaRMSNorm(RMSNorm):
    """Gemma's form: the stored weight is an offset from one, and rounding comes last."""

    def forward(self, x: Tensor) -> Tensor:
        return (rms_normalize(x, self.eps) * (1.0 + self.weight.float())).to(x.dtype)


class LayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))
