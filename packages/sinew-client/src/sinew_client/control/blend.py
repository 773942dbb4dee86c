"""Combine the actions that several chunks have for one control step: weights and aggregation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence

import numpy as np


@dataclass(frozen=True)
class Fusion:
    """How a new window is fused with the trajectory: the weight of its waypoints.

    A step without an old waypoint takes the new one unchanged.

    Attributes:
        near: Weight of the first waypoint that can still change.
        far: Weight of the waypoints that are ``rows`` or more after the first. In between, the weight changes linearly.
        rows: Waypoints from the weight ``near`` to the weight ``far``.
    """

    near: float = 1.0
    far: float = 1.0
    rows: int = 0

    def __post_init__(self) -> None:
        if not (0.0 <= self.near <= 1.0 and 0.0 <= self.far <= 1.0):
            raise ValueError(f"fusion: expected weights from 0 to 1, got {self.near} and {self.far}")
        if self.rows < 0:
            raise ValueError(f"fusion: expected 0 or more rows, got {self.rows}")

    def weight(self, distance: int) -> float:
        """Return the weight of the new row that is ``distance`` rows after the first one that can change."""
        if distance >= self.rows:
            return self.far
        return self.near + (self.far - self.near) * max(distance, 0) / self.rows

    def __call__(self, old: np.ndarray, new: np.ndarray, distance: int = 0) -> np.ndarray:
        weight = self.weight(distance)
        if weight == 1.0:
            return new
        return between(((1.0 - weight) * old + weight * new).astype(np.float32), old, new)


def between(mixed: np.ndarray, one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Clip a mixture of two actions to the range between them.

    Rounding may leave this range, and then exceed a limit of the robot.
    """
    return np.clip(mixed, np.minimum(one, other), np.maximum(one, other))


def parse_fusion(text: str) -> Fusion:
    """Read a fusion rule.

    Args:
        text: One of :data:`AGGREGATES`, ``mix:WEIGHT`` or ``ramp:ROWS``. ``ramp:ROWS`` changes to the new window
            within ROWS waypoints: the first new waypoint has weight 1 / (ROWS + 1), the waypoint ROWS later has
            weight 1.

    Returns:
        The rule.

    Raises:
        ValueError: The text names no rule.
    """
    kind, _, value = text.partition(":")
    if not value and kind in AGGREGATES:
        return AGGREGATES[kind]
    try:
        if kind == "mix":
            return Fusion(float(value), float(value))
        if kind == "ramp":
            return Fusion(1.0 / (int(value) + 1), 1.0, int(value))
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError(f"fusion: expected mix:WEIGHT or ramp:ROWS, got {text!r} ({error})") from None
    raise ValueError(
        "fusion: expected one of {}, mix:WEIGHT or ramp:ROWS, got {!r}".format(", ".join(AGGREGATES), text)
    )


# These are the aggregate functions of LeRobot's asynchronous client (async_inference/configs.py). The numbers are the
# weight of the new action. The old action has the rest of the weight.
AGGREGATES: dict[str, Fusion] = {
    "weighted_average": Fusion(0.7, 0.7),
    "latest_only": Fusion(),
    "average": Fusion(0.5, 0.5),
    "conservative": Fusion(0.3, 0.3),
}

# This is m of the weights w_i = exp(-m i) of ACT's temporal ensemble (Zhao et al. 2023, section IV-B). The oldest chunk
# has i = 0.
ENSEMBLE_DECAY = 0.01

SCHEDULES = ("exp", "linear", "ones", "zeros")


# This is alpha of the weights w_i = exp(alpha cos(action_i, newest action)) of CogACT's adaptive ensemble (Li et al.
# 2024, section 3.4).
COSINE_ALPHA = 0.1


def ensemble(
    rows: Sequence[np.ndarray], decay: float = ENSEMBLE_DECAY, alpha: float | None = None
) -> np.ndarray:
    """Return the weighted mean of the actions that several chunks have for one step, float32 [D].

    The mean is computed from the differences to the newest action, so equal actions give that action to the bit.

    Args:
        rows: The actions, oldest chunk first.
        decay: m of the weights w_i = exp(-m i).
        alpha: Factor of the weights w_i = exp(alpha cos(row_i, newest)), in place of ``decay``.
    """
    newest = np.asarray(rows[-1], np.float32)
    if alpha is None:
        exponents = -decay * np.arange(len(rows))
    else:
        every = np.stack([np.asarray(row, np.float64) for row in rows])
        sizes = np.linalg.norm(every, axis=1)
        exponents = alpha * (every @ every[-1]) / (sizes * sizes[-1] + 1e-7)
    weights = np.exp(exponents - exponents.max())  # the largest weight is 1, so exp cannot overflow
    offsets = np.stack([np.asarray(row, np.float64) - newest for row in rows])
    return (newest + (weights / weights.sum()) @ offsets).astype(np.float32)


def guidance_weights(length: int, delay: int, end: int, schedule: str = "exp") -> np.ndarray:
    """Return the weight with which each action of a new chunk is pulled to the running chunk, float64 [length].

    The weights are those of real-time chunking: arXiv 2506.07339, equation 5, and ``get_prefix_weights`` of
    Physical-Intelligence/real-time-chunking-kinetix, src/model.py.

    Args:
        length: Actions of a chunk.
        delay: Actions that will be executed before the new chunk arrives. Their weight is 1.
        end: First action with weight 0. The weights fall from ``delay`` to ``end``.
        schedule: One of :data:`SCHEDULES`.
    """
    if schedule not in SCHEDULES:
        raise ValueError("schedule: expected one of {}, got {!r}".format(", ".join(SCHEDULES), schedule))
    end = max(0, min(end, length))
    start = max(0, min(delay, end))
    rows = np.arange(length)
    if schedule == "ones":
        return (rows < end).astype(np.float64)
    if schedule == "zeros":
        return (rows < start).astype(np.float64)
    weights = np.clip((start - 1 - rows) / (end - start + 1) + 1, 0.0, 1.0)
    if schedule == "exp":
        # At weight 1 the exact quotient is 1, but some processors round it to a number above 1.
        weights = np.minimum(weights * np.expm1(weights) / (np.e - 1), 1.0)
        weights[:start] = 1.0
    return np.where(rows < end, weights, 0.0)


def ramp_strength(length: int, delay: int, end: int, rate: float = 6.0) -> np.ndarray:
    """Return the share of the velocity that each action of a new chunk keeps, float64 [length].

    This is the schedule of GR00T's real-time chunking. The first ``delay`` actions have the share 0, so they do not
    change. A ramp rises up to action ``end``. The actions after it have the share 1. The ramp is
    (1 - e^(-rate t)) / (1 - e^(-rate)) over linspace(0, 1, end - delay + 2)[1:-1] (Isaac-GR00T N1.6 and N1.7).
    """
    end = max(0, min(end, length))
    frozen = max(0, min(delay, end))
    strength = np.ones(length)
    strength[:frozen] = 0.0
    moment = np.linspace(0.0, 1.0, end - frozen + 2)[1:-1]
    strength[frozen:end] = np.minimum(np.expm1(-rate * moment) / np.expm1(-rate), 1.0)
    return strength
