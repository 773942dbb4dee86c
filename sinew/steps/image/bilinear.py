"""Bilinear resize of a frame straight into channel planes: ``torch.nn.functional.interpolate`` without torch.

Half-pixel centres, no antialiasing. Only pixels that are read are touched: the source rows that some target row
reads, and of those the columns. Bytes are gathered before they become floats, a quarter of the traffic. Columns are
mixed first, then rows, in the order of torch's own weights, so that the two agree to the last bits of float32.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from sinew.steps.image.base import to_unit


def to_planes(frame: np.ndarray) -> np.ndarray:
    """uint8 or float32 [h, w, C] -> float32 [C, h, w] in [0, 1]."""
    return to_unit(np.ascontiguousarray(frame.transpose(2, 0, 1)))


def resize_bilinear(frame: np.ndarray, height: int, width: int) -> np.ndarray:
    """uint8 or float32 [h, w, C] -> float32 [C, height, width] in [0, 1]."""
    size, channels = frame.shape[:2], frame.shape[2]
    rows, first_row, second_row, weight = row_taps(size[0], height)
    columns, column_weight = column_taps(size[1], width, channels)
    lines = frame.reshape(size[0], -1)
    if len(rows) < len(lines):
        lines = lines.take(rows, axis=0)
    pairs = to_unit(lines.take(columns, axis=1))  # [rows, 2 * C * width]: left neighbours, then right
    left, right = pairs[:, : channels * width], pairs[:, channels * width :]
    left *= 1 - column_weight
    right *= column_weight
    left += right
    upper, lower = left.take(first_row, axis=0), left.take(second_row, axis=0)  # [height, C * width]
    upper *= 1 - weight
    lower *= weight
    upper += lower
    return upper.reshape(height, channels, width).transpose(1, 0, 2)


@lru_cache(maxsize=64)
def row_taps(size: int, target: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The source rows that are read, ascending; which of them is each target row's first and second, and the weight
    of the second, float32 [target, 1]."""
    first, second, weight = taps(size, target)
    rows = np.unique(np.concatenate([first, second]))
    return rows, np.searchsorted(rows, first), np.searchsorted(rows, second), weight[:, None]


@lru_cache(maxsize=64)
def column_taps(size: int, target: int, channels: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions in a line of interleaved pixels, int64 [2 * C * target], first all left neighbours plane by plane,
    then all right ones; and the weight of the right ones, float32 [C * target]."""
    first, second, weight = taps(size, target)
    planes = np.arange(channels)[:, None]
    where = [(channels * column + planes).reshape(-1) for column in (first, second)]
    return np.concatenate(where), np.tile(weight, channels)


def taps(size: int, target: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each target pixel its two source pixels and the weight of the second, along one axis."""
    scale = np.float32(size / target)
    source = np.maximum(scale * (np.arange(target, dtype=np.float32) + np.float32(0.5)) - np.float32(0.5), 0)
    first = np.minimum(source.astype(np.int64), size - 1)
    second = np.minimum(first + 1, size - 1)
    return first, second, np.clip(source - first.astype(np.float32), 0, 1)
