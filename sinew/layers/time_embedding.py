"""Sine-cosine embeddings of the solver's time."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sinusoidal_embedding(t: Tensor, size: int, min_period: float, max_period: float) -> Tensor:
    """Return sines, then cosines, of a time t, as in openpi (``create_sinusoidal_pos_embedding``).

    The angles go up to 2 pi / 0.004, where a float32 product loses three digits. The computation is therefore in
    float64, as in openpi.

    Args:
        t: [...], from 0 to 1. It is first rounded to float32, as in openpi.
        size: Width of the embedding.
        min_period: Shortest period.
        max_period: Longest period. The periods between are geometric.

    Returns:
        float32 [..., size].
    """
    fraction = torch.linspace(0.0, 1.0, size // 2, dtype=torch.float64, device=t.device)
    period = min_period * (max_period / min_period) ** fraction
    angle = t.float()[..., None].double() * (1.0 / period * 2 * math.pi)  # [..., size / 2]
    return torch.cat([angle.sin(), angle.cos()], dim=-1).float()


def cosines_then_sines(t: Tensor, size: int, longest: float) -> Tensor:
    """Return cosines, then sines, of t * longest^(-j / (size / 2)), float32 [..., size].

    The computation is in float32, as in GLIDE's ``timestep_embedding`` (Nichol et al. 2021).

    Args:
        t: [...], a time or a noise level.
        size: Width of the embedding.
        longest: Longest period, divided by 2 pi.
    """
    half = size // 2
    exponent = torch.arange(half, dtype=torch.float32, device=t.device) * (-math.log(longest) / half)
    angle = t.float()[..., None] * exponent.exp()  # [..., size / 2]
    return torch.cat([angle.cos(), angle.sin()], dim=-1)


def level_sinusoids(level: Tensor, size: int) -> Tensor:
    """Return sines, then cosines, of level * 10000^(-j / (size / 2 - 1)), float32 [..., size].

    The computation is in float32, as in LeRobot's ``DiffusionSinusoidalPosEmb``.

    Args:
        level: [...], the noise level of diffusion (a whole number), or a time.
        size: Width of the embedding.
    """
    half = size // 2
    exponent = torch.arange(half, dtype=torch.float32, device=level.device) * (-math.log(10_000) / (half - 1))
    angle = level.float()[..., None] * exponent.exp()  # [..., size / 2]
    return torch.cat([angle.sin(), angle.cos()], dim=-1)
