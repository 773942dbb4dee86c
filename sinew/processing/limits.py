"""Compute the ranges of states and actions in training from the policy's statistics.

The ranges are used to measure how far a value is outside of the training data.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sinew.core import PolicySpec
from sinew.processing.normalize import Angles, Normalizer, PartNormalizer, RotationPart
from sinew.steps.vector.base import VectorStep, apply_steps

# For mean and standard deviation, a range goes from this many deviations below the mean to this many above it.
DEVIATIONS = 3.0
FLOOR = 0.1  # smallest half width, relative to the centre or to 1, for joints that never moved in training


def ranges(normalizer: Normalizer | PartNormalizer | Angles | RotationPart) -> tuple[np.ndarray, np.ndarray]:
    """Return (centre, half width) of each dimension's range in training, float64 [D] or [steps, D].

    A range goes from the minimum to the maximum, from the lower to the upper quantile, or three standard deviations to
    each side of the mean. The half width is infinite for values without statistics: values that are not normalised,
    angles and rotations.
    """
    if isinstance(normalizer, PartNormalizer):
        pairs = [ranges(part) for part in normalizer.parts]
        rows = max((centre.shape[0] for centre, _half in pairs if centre.ndim == 2), default=0)
        if rows:
            pairs = [
                tuple(np.broadcast_to(each, (rows, each.shape[-1])) for each in pair)  # type: ignore[misc]
                for pair in pairs
            ]
        return (
            np.concatenate([centre for centre, _half in pairs], axis=-1),
            np.concatenate([half for _centre, half in pairs], axis=-1),
        )
    if normalizer.mode == "identity":
        return np.zeros(normalizer.dim), np.full(normalizer.dim, np.inf)
    shape = (normalizer.rows, normalizer.dim) if normalizer.rows else (normalizer.dim,)
    low, high = (normalizer.unnormalize(np.full(shape, end)).astype(np.float64) for end in (-1.0, 1.0))
    centre, half = (low + high) / 2, np.abs(high - low) / 2
    if normalizer.mode == "mean_std":
        half = DEVIATIONS * half
    return centre, np.maximum(half, FLOOR * np.maximum(1.0, np.abs(centre)))


def unit_sizes(
    normalizer: Normalizer | PartNormalizer, steps: Sequence[VectorStep], spec: PolicySpec
) -> list[float | None]:
    """Return how much each action changes, in robot units, if the model's output changes by one.

    Rounding errors of the model are measured in these units.

    Args:
        normalizer: Normaliser of the actions.
        steps: Processing steps after the normaliser.
        spec: The policy's specification.

    Returns:
        One number per action. None for an action that depends on several outputs. If the steps of a chunk
        have different statistics, the number is the largest of all steps.
    """
    shape = (getattr(normalizer, "rows", 0) or 1, normalizer.width)
    with np.errstate(all="ignore"):  # a state of zeros may be an invalid pose, whose result is NaN
        ends = [
            apply_steps(
                np.asarray(normalizer.unnormalize(np.full(shape, end, np.float32)), np.float64),
                steps,
                np.zeros(spec.state.dim),
            )
            for end in (-1.0, 1.0)
        ]
    half = np.abs(ends[1] - ends[0]).max(axis=0) / 2
    start = 0
    for part in getattr(normalizer, "parts", ()):
        if isinstance(part, RotationPart):
            half[start : start + part.dim] = np.nan
        start += part.dim
    for step in steps:
        if not step.monotone:
            half[list(step.dims)] = np.nan
    return [float(size) if np.isfinite(size) and size > 0 else None for size in half]
