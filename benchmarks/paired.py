"""Statistics of paired measurements."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median and the two ranks of its 95 % interval, from the normal approximation of the binomial
    distribution."""
    ordered = np.sort(values)
    half = 0.98 * np.sqrt(len(ordered))
    low, high = (np.clip(round(len(ordered) / 2 + s * half), 0, len(ordered) - 1) for s in (-1, 1))
    return float(np.median(ordered)), float(ordered[low]), float(ordered[high])
