"""Solvers: from noise to actions along a learned velocity field.

The solver owns the loop and the number of steps; time grid, sign and noise distribution are the
model's convention, described by its configuration.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Velocity = Callable[[Tensor, Tensor], Tensor]  # (x [B, H, D], t [B]) -> [B, H, D]


def euler(
    velocity: Velocity, noise: Tensor, steps: int, after_step: Callable[[], None] | None = None
) -> Tensor:
    """Forward Euler from t = 1 (noise) to t = 0 (actions), the openpi and LeRobot convention.

    noise: float32 [B, H, D]. The times are 1 + step * dt in double precision, rounded once to float32, so
    that they are those of the reference. ``after_step`` runs after each step: timing, cancellation.
    """
    dt = -1.0 / steps
    x = noise
    for step in range(steps):
        t = torch.full((x.shape[0],), 1.0 + step * dt, dtype=torch.float32, device=x.device)
        x = x + dt * velocity(x, t)
        if after_step:
            after_step()
    return x
