"""Convert state and action vectors between robot units and model units. The formulas are in
``schema.Normalization``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from sinew_client.rotations import from_6d, from_vector, to_6d, to_vector

from sinew.bundle.schema import STATISTICS, Normalization, VectorPart
from sinew.core import BundleError


class Normalizer:
    """Normalises vectors [..., dim], and inverts the normalisation, in the precision (float32 or float64) that the
    recipe's ``convention`` states.

    Args:
        recipe: How the vector is normalised.
        dim: Size of the vector.
        what: "state" or "action", for messages.

    Raises:
        BundleError: The statistics have another size, or are not finite.
    """

    def __init__(self, recipe: Normalization, dim: int, what: str):
        self.mode, self.clip, self.rows = recipe.mode, recipe.clip, recipe.rows
        self.dim = self.width = dim  # width: the number of values in the model's vector after normalisation
        self.snap, self.snap_at = list(recipe.snap), recipe.snap_at
        self.openpi, self.gr00t = (recipe.convention == name for name in ("openpi", "gr00t"))
        self.dtype: Any = np.float64 if self.openpi or self.gr00t else np.float32
        self.eps = self.dtype(recipe.eps)
        self.stats: list[Any] = []
        for name in STATISTICS[recipe.mode]:
            values = np.asarray(recipe.stats.get(name, ()), self.dtype)
            expected = dim * max(self.rows, 1)
            if values.shape != (expected,):
                raise BundleError(
                    f"statistics of {what}: {name} has {values.size} values, expected {expected}; convert the"
                    " checkpoint again"
                )
            if self.rows:
                values = values.reshape(self.rows, dim)
            if not np.isfinite(values).all():
                raise BundleError(
                    f"statistics of {what}: {name} has values that are not finite; compute the statistics again"
                )
            self.stats.append(values)

    @property
    def is_affine(self) -> bool:
        """Return True if the inverse of the normalisation only multiplies each dimension by a number and adds
        a number (:meth:`affine`).
        """
        return not self.clip and not self.rows and not self.snap

    def normalize(self, x: np.ndarray) -> np.ndarray:
        x = x.astype(self.dtype)
        if self.mode == "identity":
            return np.clip(x, -1, 1) if self.clip else x
        a, b = self.stats
        if self.mode == "mean_std":
            x = (x - a) / (b + self.eps)
        elif self.gr00t:
            x = np.where(b == a, 0, 2 * (x - a) / np.where(b == a, 1, b - a) - 1)
        else:
            x = 2 * (x - a) / self._span(a, b) - 1
        return np.clip(x, -1, 1) if self.clip else x

    def unnormalize(self, x: np.ndarray) -> np.ndarray:
        """Invert the normalisation. ``x`` is [..., dim], or [steps, dim] if each step has its own statistics."""
        x = x.astype(self.dtype)
        if self.clip:
            x = np.clip(x, -1, 1)
        if self.mode == "identity":
            return x
        if self.snap:
            x[..., self.snap] = x[..., self.snap] >= self.snap_at
        a, b = (stat[: len(x)] for stat in self.stats) if self.rows else self.stats
        if self.mode == "mean_std":
            return x * (b + self.eps if self.openpi else b) + a
        return (x + 1) / 2 * self._span(a, b) + a

    def affine(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the inverse of the normalisation as (scale, offset), float64 [dim] each, for engines that
        compute it themselves.

        ``unnormalize(x)`` is ``x * scale + offset``, except for rounding.
        """
        if self.mode == "identity":
            return np.ones(self.dim), np.zeros(self.dim)
        a = self.stats[0].astype(np.float64)
        if self.mode == "mean_std":
            return (self.stats[1] + (self.eps if self.openpi else 0)).astype(np.float64), a
        half = self._span(*self.stats).astype(np.float64) / 2
        return half, a + half

    def _span(self, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        if self.gr00t:
            return high - low
        return high - low + self.eps if self.openpi else np.where(high == low, self.eps, high - low)


class Angles:
    """Normalises angles [..., dim] to their sines followed by their cosines."""

    mode = "identity"  # angles need no statistics
    rows = 0

    def __init__(self, dim: int):
        self.dim, self.width = dim, 2 * dim

    def normalize(self, x: np.ndarray) -> np.ndarray:
        return np.concatenate([np.sin(x), np.cos(x)], axis=-1)

    def unnormalize(self, x: np.ndarray) -> np.ndarray:
        """Return the angles, computed from the sines and cosines in ``x``."""
        return np.arctan2(x[..., : self.dim], x[..., self.dim :])


class RotationPart:
    """Normalises a rotation vector [..., 3] to the first two columns of its rotation matrix (Zhou et al. 2019)."""

    mode = "identity"
    rows, dim, width = 0, 3, 6

    def normalize(self, x: np.ndarray) -> np.ndarray:
        return to_6d(np.swapaxes(from_vector(x), -1, -2))

    def unnormalize(self, x: np.ndarray) -> np.ndarray:
        return to_vector(np.swapaxes(from_6d(x), -1, -2))


class PartNormalizer:
    """Normalises a vector whose parts have different normalisations (``schema.VectorPart``)."""

    def __init__(self, parts: Sequence[VectorPart], what: str):
        self.dim = sum(part.dim for part in parts)
        self.dtype: Any = np.float64
        self.is_affine = False
        self.parts = [part_normalizer(part, what) for part in parts]
        self.width = sum(part.width for part in self.parts)

    def normalize(self, x: np.ndarray) -> np.ndarray:
        """Convert x [..., dim] from robot units to model units, [..., width]."""
        parts, start = [], 0
        for part in self.parts:
            parts.append(part.normalize(x[..., start : start + part.dim]))
            start += part.dim
        return np.concatenate(parts, axis=-1)

    def unnormalize(self, x: np.ndarray) -> np.ndarray:
        """Convert x [steps, width] from model units to robot units."""
        parts, start = [], 0
        for part in self.parts:
            parts.append(part.unnormalize(x[..., start : start + part.width]))
            start += part.width
        return np.concatenate(parts, axis=-1)


def part_normalizer(part: VectorPart, what: str) -> Normalizer | Angles | RotationPart:
    """Return the normaliser of one part of a vector. ``what`` ("state" or "action") is for messages.

    Raises:
        BundleError: The statistics do not fit the mode or the size.
    """
    if part.rotation:
        return RotationPart()
    return (
        Angles(part.dim) if part.sin_cos else Normalizer(part.normalization, part.dim, f"{what}.{part.name}")
    )


def normalizer(
    recipe: Normalization, parts: Sequence[VectorPart], dim: int, what: str
) -> Normalizer | PartNormalizer:
    """Return the normaliser of a vector with ``dim`` numbers. If the vector has parts, each part is normalised on its
    own."""
    return PartNormalizer(parts, what) if parts else Normalizer(recipe, dim, what)
