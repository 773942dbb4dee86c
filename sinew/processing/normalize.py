"""State and action vectors between world units and model units. Formulas: ``schema.Normalization``."""

from __future__ import annotations

from typing import Any

import numpy as np

from sinew.bundle.schema import Normalization
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
        self.mode, self.dim = recipe.mode, dim
        self.openpi = recipe.convention == "openpi"
        self.dtype: Any = np.float64 if self.openpi else np.float32
        self.eps = self.dtype(recipe.eps)
        self.stats: list[Any] = []
        for name in STATISTICS[recipe.mode]:
            values = np.asarray(recipe.stats.get(name, ()), self.dtype)
            if values.shape != (dim,):
                raise BundleError(f"statistics of {what}: {name} has {values.size} values, expected {dim}")
            if not np.isfinite(values).all():
                raise BundleError(f"statistics of {what}: {name} has values that are not finite")
            self.stats.append(values)

    def normalize(self, x: np.ndarray) -> np.ndarray:
        x = x.astype(self.dtype)
        if self.mode == "identity":
            return x
        a, b = self.stats
        if self.mode == "mean_std":
            return (x - a) / (b + self.eps)
        return 2 * (x - a) / self._span() - 1

    def unnormalize(self, x: np.ndarray) -> np.ndarray:
        x = x.astype(self.dtype)
        if self.mode == "identity":
            return x
        a, b = self.stats
        if self.mode == "mean_std":
            return x * (b + self.eps if self.openpi else b) + a
        return (x + 1) / 2 * self._span() + a

    def affine(self) -> tuple[np.ndarray, np.ndarray]:
        """(scale, offset), float64 [dim] each: ``unnormalize(x)`` is ``x * scale + offset``, up to rounding. For who
        computes it elsewhere."""
        if self.mode == "identity":
            return np.ones(self.dim), np.zeros(self.dim)
        a = self.stats[0].astype(np.float64)
        if self.mode == "mean_std":
            return (self.stats[1] + (self.eps if self.openpi else 0)).astype(np.float64), a
        half = self._span().astype(np.float64) / 2
        return half, a + half

    def _span(self) -> np.ndarray:
        low, high = self.stats
        return high - low + self.eps if self.openpi else np.where(high == low, self.eps, high - low)
