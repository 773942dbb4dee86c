"""Combine the actions that several chunks have for one control step: weights and aggregation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence

import numpy as np


@dataclass(frozen=True)
class Fusion:
    """The weights with which new actions are mixed with the old actions for the same control steps.

    The result is weight * new + (1 - weight) * old. Without an old action, the new action is used unchanged.

    Attributes:
        near: Weight of the first new action, 0 to 1.
        far: Weight of all new actions from number ``rows`` on. The weight changes linearly from ``near`` to ``far``.
        rows: Number of actions over which the weight changes; 0 for the constant weight ``far``.

    Raises:
        ValueError: A weight is not from 0 to 1, or ``rows`` is negative.
    """

    near: float = 1.0
    far: float = 1.0
    rows: int = 0

    def __post_init__(self) -> None:
        if not (0.0 <= self.near <= 1.0 and 0.0 <= self.far <= 1.0):
            raise ValueError(f"fusion: expected weights from 0 to 1, got {self.near} and {self.far}")
        if self.rows < 0:
            raise ValueError(f"fusion: expected 0 or more actions, got {self.rows}")

    def weight(self, distance: int) -> float:
        """Return the weight of the new action that is ``distance`` actions after the first new action."""
        if distance >= self.rows:
            return self.far
        return self.near + (self.far - self.near) * max(distance, 0) / self.rows

    def __call__(self, old: np.ndarray, new: np.ndarray, distance: int = 0) -> np.ndarray:
        """Mix two actions, float32 [D]. ``distance`` is the position of the new action (:meth:`weight`)."""
        weight = self.weight(distance)
        if weight == 1.0:
            return new
        return between(((1.0 - weight) * old + weight * new).astype(np.float32), old, new)


def between(mixed: np.ndarray, one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Clip a mixture of two actions to the range between them, because a rounded mixture may be outside by a bit.

    Args:
        mixed: The mixture, float32 [D].
        one: The first action, float32 [D].
        other: The second action, float32 [D].

    Returns:
        The mixture inside the range. So it exceeds no limit of the robot that both actions respect.
    """
    return np.clip(mixed, np.minimum(one, other), np.maximum(one, other))


def parse_fusion(text: str) -> Fusion:
    """Parse a rule that mixes new and old actions.

    Args:
        text: A key of :data:`AGGREGATES`, ``mix:WEIGHT`` for a constant weight, or ``ramp:ROWS``. With ``ramp:ROWS``,
            the first new action has the weight 1 / (ROWS + 1), and the action ROWS later has the weight 1.

    Returns:
        The rule.

    Raises:
        ValueError: The text is not a rule.

    Example:
        >>> parse_fusion("mix:0.3")
        Fusion(near=0.3, far=0.3, rows=0)
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
    """Compute the weighted mean of the actions that several chunks have for one control step.

    The mean is computed from the differences to the newest action. So if all actions are equal, the result is exactly
    this action.

    Args:
        rows: The actions, each float32 [D], from the oldest chunk to the newest.
        decay: m of the weights w_i = exp(-m i), where the oldest chunk has i = 0 (ACT).
        alpha: Factor of the weights w_i = exp(alpha cos(action_i, newest action)), in place of ``decay`` (CogACT).

    Returns:
        The mean, float32 [D].
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
    """Compute the weights with which real-time chunking pulls each action of a new chunk to the running chunk.

    The formula is equation 5 of arXiv 2506.07339. The code is ``get_prefix_weights`` in src/model.py of
    Physical-Intelligence/real-time-chunking-kinetix.

    Args:
        length: Number of actions in a chunk.
        delay: Number of actions that will be executed before the new chunk arrives. Their weight is 1.
        end: Index of the first action with weight 0. The weights fall from ``delay`` to ``end``.
        schedule: One of :data:`SCHEDULES`.

    Returns:
        The weights, float64 [length], 0 to 1.

    Raises:
        ValueError: The schedule is unknown.
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
    """Compute the factor of the velocity of each action in a new chunk, for GR00T's real-time chunking.

    The first ``delay`` actions have the factor 0, so the solver does not change them. A ramp rises up to action
    ``end``. The actions after it have the factor 1. The ramp is (1 - e^(-rate t)) / (1 - e^(-rate)) over
    linspace(0, 1, end - delay + 2)[1:-1] (Isaac-GR00T N1.6 and N1.7).

    Args:
        length: Number of actions in a chunk.
        delay: Number of actions that will be executed before the new chunk arrives.
        end: Index of the first action with the factor 1.
        rate: Steepness of the ramp.

    Returns:
        The factors, float64 [length], 0 to 1.
    """
    end = max(0, min(end, length))
    frozen = max(0, min(delay, end))
    strength = np.ones(length)
    strength[:frozen] = 0.0
    moment = np.linspace(0.0, 1.0, end - frozen + 2)[1:-1]
    strength[frozen:end] = np.minimum(np.expm1(-rate * moment) / np.expm1(-rate), 1.0)
    return strength
