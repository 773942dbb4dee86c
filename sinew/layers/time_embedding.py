"""Sine-cosine embeddings of the solver's time."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sinusoidal_embedding(t: Tensor, size: int, min_period: float, max_period: float) -> Tensor:
    """Return sines, then cosines, float32 [..., size], of t [...] in [0, 1], rounded to float32 first as upstream's is.

    Periods run geometrically from ``min_period`` to ``max_period``. The angles reach 2 pi / 0.004, where a
    float32 product has lost three digits: float64 until the end, as openpi does
    (``create_sinusoidal_pos_embedding``).
    """
    fraction = torch.linspace(0.0, 1.0, size // 2, dtype=torch.float64, device=t.device)
    period = min_period * (max_period / min_period) ** fraction
    angle = t.float()[..., None].double() * (1.0 / period * 2 * math.pi)  # [..., size / 2]
    return torch.cat([angle.sin(), angle.cos()], dim=-1).float()


def cosines_then_sines(t: Tensor, size: int, longest: float) -> Tensor:
    """Return cosines, then sines, float32 [..., size], of t * longest^(-j / (size / 2)), for a time or a noise level t
    [...]. In float32, as the references compute it (GLIDE's ``timestep_embedding``, Nichol et al. 2021).
    """
    half = size // 2
    exponent = torch.arange(half, dtype=torch.float32, device=t.device) * (-math.log(longest) / half)
    angle = t.float()[..., None] * exponent.exp()  # [..., size / 2]
    return torch.cat([angle.cos(), angle.sin()], dim=-1)


def level_sinusoids(level: Tensor, size: int) -> Tensor:
    """Return sines, then cosines, float32 [..., size], of level * 10000^(-j / (size / 2 - 1)), for a noise level [...]
    of diffusion, a whole number, or a time. In float32, as the reference computes it (LeRobot
    ``DiffusionSinusoidalPosEmb``).
    """
    half = size // 2
    exponent = torch.arange(half, dtype=torch.float32, device=level.device) * (-math.log(10_000) / (half - 1))
    angle = level.float()[..., None] * exponent.exp()  # [..., size / 2]
    return torch.cat([angle.sin(), angle.cos()], dim=-1)
