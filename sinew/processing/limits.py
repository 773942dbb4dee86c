"""Measure how far a state or an action is outside the training data, from the policy's statistics alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sinew.core import PolicySpec
from sinew.processing.normalize import Angles, Normalizer, PartNormalizer, RotationPart
from sinew.steps.vector.base import VectorStep, apply_steps

DEVIATIONS = 3.0  # standard deviations that count as the half width of a range
FLOOR = 0.1  # smallest half width, relative to the centre or to 1, for joints that never moved in training


def ranges(normalizer: Normalizer | PartNormalizer | Angles | RotationPart) -> tuple[np.ndarray, np.ndarray]:
    """Return (centre, half width) of each dimension's range in training, float64 [D] or [steps, D].

    The range is that of the minimum and maximum, of the quantiles, or three standard deviations to each side. The
    half width is infinite without statistics: no normalisation, angles, rotations.
    """
    if isinstance(normalizer, PartNormalizer):
        found = [ranges(part) for part in normalizer.parts]
        rows = max((centre.shape[0] for centre, _half in found if centre.ndim == 2), default=0)
        if rows:
            found = [
                tuple(np.broadcast_to(each, (rows, each.shape[-1])) for each in pair)  # type: ignore[misc]
                for pair in found
            ]
        return (
            np.concatenate([centre for centre, _half in found], axis=-1),
            np.concatenate([half for _centre, half in found], axis=-1),
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
    """Return the change of each action, in robot units, for a change of one in the model's output. Rounding errors of
    the model are measured in these units.

    None for an action that is made of several outputs. If each action of a chunk has its own statistics, it is the
    widest of them.
    """
    shape = (getattr(normalizer, "rows", 0) or 1, normalizer.width)
    with np.errstate(all="ignore"):  # the state of zeros is not a valid pose
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
