"""Statistics of a data set in LeRobot's format: min, max, mean, std, count and five quantiles of every column."""

from __future__ import annotations

from typing import Any

import numpy as np

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}


class Statistics:
    """Exact statistics of the columns of a data set. All vectors are stored. For images, only the number of pixels with
    each value is stored, by channel.
    """

    def __init__(self) -> None:
        self._vectors: dict[str, list[np.ndarray]] = {}
        self._counts: dict[str, np.ndarray] = {}  # int64 [3, 256]
        self._pictures: dict[str, int] = {}

    def vectors(self, key: str, values: np.ndarray) -> None:
        """Add rows [n, D] of numbers or booleans to the column ``key``."""
        self._vectors.setdefault(key, []).append(np.asarray(values))

    def picture(self, key: str, picture: np.ndarray) -> None:
        """Add a frame, uint8 [height, width, 3], to the column ``key``."""
        counts = self._counts.setdefault(key, np.zeros((3, 256), np.int64))
        for channel in range(3):
            counts[channel] += np.bincount(picture[..., channel].reshape(-1), minlength=256)
        self._pictures[key] = self._pictures.get(key, 0) + 1

    def merge(self, other: Statistics) -> None:
        """Add the vectors and pixel counts that another object has collected."""
        for key, parts in other._vectors.items():
            self._vectors.setdefault(key, []).extend(parts)
        for key, counts in other._counts.items():
            self._counts[key] = self._counts.get(key, 0) + counts
            self._pictures[key] = self._pictures.get(key, 0) + other._pictures[key]

    def table(self) -> dict[str, dict[str, Any]]:
        """Return the statistics as lists by column and name. Images have values in [0, 1] and shape [3, 1, 1], as in
        LeRobot.
        """
        columns = {key: _of_vectors(np.concatenate(parts)) for key, parts in self._vectors.items()}
        return columns | {key: _of_counts(each, self._pictures[key]) for key, each in self._counts.items()}


def _of_vectors(values: np.ndarray) -> dict[str, Any]:
    numbers = values.astype(np.float64)  # [n, D]
    entries = {
        "min": numbers.min(0),
        "max": numbers.max(0),
        "mean": numbers.mean(0),
        "std": numbers.std(0),
        **{name: np.quantile(numbers, part, axis=0) for name, part in QUANTILES.items()},
    }
    return {name: value.tolist() for name, value in entries.items()} | {"count": [len(numbers)]}


def _of_counts(counts: np.ndarray, pictures: int) -> dict[str, Any]:
    """Compute the statistics of images.

    Args:
        counts: How often each channel had each value, int64 [3, 256].
        pictures: Number of images.
    """
    values = np.arange(256) / 255.0
    total = counts.sum(1, keepdims=True)
    mean = (counts @ values) / total[:, 0]
    variance = (counts @ values**2) / total[:, 0] - mean**2
    rising = counts.cumsum(1) / total
    entries = {
        "min": values[(counts > 0).argmax(1)],
        "max": values[255 - (counts > 0)[:, ::-1].argmax(1)],
        "mean": mean,
        "std": np.sqrt(np.maximum(variance, 0.0)),
        **{name: values[(rising >= part).argmax(1)] for name, part in QUANTILES.items()},
    }
    return {name: value.reshape(3, 1, 1).tolist() for name, value in entries.items()} | {"count": [pictures]}
