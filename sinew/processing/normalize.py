"""State and action vectors between world units and model units. Formulas: ``schema.Normalization``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sinew.bundle.schema import Normalization, VectorPart
from sinew.core import BundleError

STATISTICS: dict[str, tuple[str, ...]] = {
    "mean_std": ("mean", "std"),
    "min_max": ("min", "max"),
    "quantiles": ("q01", "q99"),
    "quantile10": ("q10", "q90"),
    "identity": (),
}


class Normalizer:
    """``normalize`` and ``unnormalize`` for vectors [..., dim], in the precision of the recipe's convention."""

    def __init__(self, recipe: Normalization, dim: int, what: str):
        self.mode, self.dim, self.clip, self.rows = recipe.mode, dim, recipe.clip, recipe.rows
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
                    f"statistics of {what}: {name} has {values.size} values, expected {expected}"
                )
            if self.rows:
                values = values.reshape(self.rows, dim)
            if not np.isfinite(values).all():
                raise BundleError(f"statistics of {what}: {name} has values that are not finite")
            self.stats.append(values)

    @property
    def width(self) -> int:
        """Return how many numbers of the model's vector they fill."""
        return self.dim

    @property
    def is_affine(self) -> bool:
        """Return True if the inverse is one scale and one offset per dimension: see :meth:`affine`."""
        return not self.clip and not self.rows and not self.snap

    def normalize(self, x: np.ndarray) -> np.ndarray:
        x = x.astype(self.dtype)
        if self.mode == "identity":
            return x
        a, b = self.stats
        if self.mode == "mean_std":
            x = (x - a) / (b + self.eps)
        elif self.gr00t:
            x = np.where(b == a, 0, 2 * (x - a) / np.where(b == a, 1, b - a) - 1)
        else:
            x = 2 * (x - a) / self._span(a, b) - 1
        return np.clip(x, -1, 1) if self.clip else x

    def unnormalize(self, x: np.ndarray) -> np.ndarray:
        """x: [..., dim], or [steps, dim] where each step has its own statistics."""
        x = x.astype(self.dtype)
        if self.mode == "identity":
            return x
        if self.clip:
            x = np.clip(x, -1, 1)
        if self.snap:
            x[..., self.snap] = x[..., self.snap] >= self.snap_at
        a, b = (stat[: len(x)] for stat in self.stats) if self.rows else self.stats
        if self.mode == "mean_std":
            return x * (b + self.eps if self.openpi else b) + a
        return (x + 1) / 2 * self._span(a, b) + a

    def affine(self) -> tuple[np.ndarray, np.ndarray]:
        """(scale, offset), float64 [dim] each: ``unnormalize(x)`` is ``x * scale + offset``, up to rounding. For who
        computes it elsewhere."""
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


class PartNormalizer:
    """The same for a vector whose parts are normalised each in its own way: ``schema.VectorPart``."""

    def __init__(self, parts: Sequence[VectorPart], what: str):
        self.dim = sum(part.dim for part in parts)
        self.dtype: Any = np.float64
        self.is_affine = False
        self.parts = [
            (Normalizer(part.normalization, part.dim, f"{what}.{part.name}"), part.sin_cos) for part in parts
        ]
        self.width = sum(part.dim * (1 + part.sin_cos) for part in parts)

    def normalize(self, x: np.ndarray) -> np.ndarray:
        """Return the model's form of x [dim]: [width]."""
        found, start = [], 0
        for normalizer, sin_cos in self.parts:
            part = x[..., start : start + normalizer.dim]
            found += [np.sin(part), np.cos(part)] if sin_cos else [normalizer.normalize(part)]
            start += normalizer.dim
        return np.concatenate(found, axis=-1)

    def unnormalize(self, x: np.ndarray) -> np.ndarray:
        """Return world units of x [steps, dim]; an angle comes back from its sine and cosine alone."""
        found, start = [], 0
        for normalizer, sin_cos in self.parts:
            width = normalizer.dim * (1 + sin_cos)
            part = x[..., start : start + width]
            if sin_cos:
                found.append(np.arctan2(part[..., : normalizer.dim], part[..., normalizer.dim :]))
            else:
                found.append(normalizer.unnormalize(part))
            start += width
        return np.concatenate(found, axis=-1)


def normalizer(
    recipe: Normalization, parts: Sequence[VectorPart], dim: int, what: str
) -> Normalizer | PartNormalizer:
    """Return what normalises a vector of ``dim`` numbers: its parts where there are any."""
    return PartNormalizer(parts, what) if parts else Normalizer(recipe, dim, what)
