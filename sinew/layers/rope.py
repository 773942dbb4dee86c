"""Rotary position embedding in the half-split form (Su et al. 2021), which openpi and LeRobot use."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rotation(NamedTuple):
    """The tables of a rotary position embedding: cos and sin of ``positions / theta^(2i/D)``, computed once
    per sequence in float32.

    Tables are [B, L, 1, D/2] and broadcast over heads. A table is [1, L, 1, D/2] if all sequences of a batch
    have the same positions.
    """

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, positions: Tensor, head_dim: int, theta: float) -> Rotation:  # int [B, L]
        half = head_dim // 2
        exponents = (2.0 / head_dim) * torch.arange(half, dtype=torch.float32, device=positions.device)
        radians = positions[..., None].float() / theta**exponents  # [B, L, D/2]
        return cls(radians.cos()[..., None, :], radians.sin()[..., None, :])

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the rotation to queries or keys x [B, L, H, D]. The rotation is computed in float32, and the
        result has x's dtype.
        """
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat([a * self.cos - b * self.sin, b * self.cos + a * self.sin], dim=-1).to(x.dtype)


def rotate_axes(positions: Tensor, head_dim: int, theta: float, axes: tuple[int, ...]) -> Rotation:
    """Return a rotation with several position axes: frequency f is multiplied by positions[..., axes[f]].

    Args:
        positions: int [B, L, axes].
        head_dim: Width of a head.
        theta: Base of the frequencies.
        axes: For each of the head_dim / 2 frequencies, the axis of ``positions``.
    """
    exponents = (2.0 / head_dim) * torch.arange(head_dim // 2, dtype=torch.float32, device=positions.device)
    columns = positions.float().unbind(-1)
    coordinates = torch.stack([columns[axis] for axis in axes], dim=-1)  # [B, L, head_dim / 2]
    radians = coordinates / theta**exponents
    return Rotation(radians.cos()[..., None, :], radians.sin()[..., None, :])
