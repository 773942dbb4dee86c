"""Solvers: from noise to actions along a learned velocity field.

The solver owns the loop and the number of steps; time grid, sign and noise distribution are the
model's convention, described by its configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

Array = TypeVar("Array")  # a tensor, or an array of an engine without torch
Velocity = Callable[[Any, Any], Any]  # (x [B, H, D], t [B]) -> [B, H, D]


def times(steps: int) -> list[float]:
    """Where Euler evaluates: 1 + step * dt in double precision, to be rounded once to float32, so that they
    are those of the reference."""
    return [1.0 + step * (-1.0 / steps) for step in range(steps)]


def euler(
    velocity: Velocity,
    noise: Array,
    steps: int,
    after_step: Callable[[], None] | None = None,
    moments: Sequence[Any] | None = None,
) -> Array:
    """Forward Euler from t = 1 (noise) to t = 0 (actions), the openpi and LeRobot convention.

    noise: float32 [B, H, D]. ``after_step`` runs after each step: timing, cancellation. ``moments``: what the
    velocity takes in place of the time, one per step, from an engine that has prepared it.
    """
    dt = -1.0 / steps
    x: Any = noise
    for step, time in enumerate(times(steps)):
        if moments is None:
            import torch  # here, because engines without torch bring their moments

            t = torch.full((x.shape[0],), time, dtype=torch.float32, device=x.device)
        else:
            t = moments[step]
        x = x + dt * velocity(x, t)
        if after_step:
            after_step()
    return x
