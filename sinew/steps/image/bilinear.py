"""Bilinear resize of a frame into channel planes: ``torch.nn.functional.interpolate`` without torch.

The resize has half-pixel centres and no antialiasing. It reads only the source rows and columns that a target pixel
needs. Bytes are selected first and converted to floats later, which needs a quarter of the memory traffic. Columns are
interpolated first, then rows, with torch's weights in torch's order, so that the result differs from torch's at most in
the last bits of float32.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from sinew.steps.image import compiled
from sinew.steps.image.base import to_unit
from sinew.steps.image.compiled import Mixing, scratch


def to_planes(frame: np.ndarray) -> np.ndarray:
    """Convert a frame, uint8 or float32 [h, w, C], to float32 [C, h, w] in [0, 1]."""
    return to_unit(np.ascontiguousarray(frame.transpose(2, 0, 1)))


def resize_bilinear(frame: np.ndarray, height: int, width: int, out: np.ndarray | None = None) -> np.ndarray:
    """Resize a frame to float32 [C, height, width] in [0, 1].

    Args:
        frame: uint8 or float32 [h, w, C].
        height: Height of the result.
        width: Width of the result.
        out: Memory for the result, or None.
    """
    size, channels = frame.shape[:2], frame.shape[2]
    if out is None:
        out = np.empty((channels, height, width), np.float32)
    if compiled.in_use and _fit(frame, out, (3, height, width)):
        compiled.in_use[0].resize(frame, mixing(size, (height, width)), out)
        return out
    rows, first_row, second_row, upper_weight, weight = row_taps(size[0], height)
    columns, left_weight, column_weight = column_taps(size[1], width, channels)
    lines, wide = frame.reshape(size[0], -1), channels * width
    if len(rows) < len(lines):
        buffer = scratch("lines", (len(rows), lines.shape[1]), frame.dtype)
        # All indices are valid, and "clip" is faster than "raise", which needs a buffer.
        lines = lines.take(rows, axis=0, out=buffer, mode="clip")
    taken = scratch("taken", (len(lines), 2 * wide), frame.dtype)  # left neighbours, then right neighbours
    pairs = lines.take(columns, axis=1, out=taken, mode="clip")
    if frame.dtype == np.uint8:
        pairs = np.divide(pairs, np.float32(255), out=scratch("pairs", pairs.shape, np.float32))
    left, right = pairs[:, :wide], pairs[:, wide:]
    left *= left_weight
    right *= column_weight
    # Write the sum to a contiguous buffer, because take would copy an array with gaps.
    mixed = np.add(left, right, out=scratch("mixed", left.shape, np.float32))
    upper, lower = (
        mixed.take(which, axis=0, out=scratch(name, (height, wide), np.float32), mode="clip")
        for name, which in (("upper", first_row), ("lower", second_row))
    )
    upper *= upper_weight
    lower *= weight
    planes = out.transpose(1, 0, 2)
    np.add(upper.reshape(planes.shape), lower.reshape(planes.shape), out=planes)
    return out


def _fit(frame: np.ndarray, out: np.ndarray, shape: tuple[int, ...]) -> bool:
    """Return True if compiled kernels support the memory layouts of this uint8 frame and of ``out``."""
    lies = (frame.dtype, out.dtype, out.shape, out.strides[2], out.flags.behaved)
    return lies == (np.uint8, np.float32, shape, 4, True) and compiled.pixels_lie_together(frame)


@lru_cache(maxsize=64)
def row_taps(size: int, target: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Compute the source rows that a resize reads.

    Returns:
        All source rows that the resize reads. For each target row, the indices of two of these rows, and the
        weights of the two rows, float32 [target, 1].
    """
    first, second, weight = taps(size, target)
    rows = np.unique(np.concatenate([first, second]))
    one, two = np.searchsorted(rows, first), np.searchsorted(rows, second)
    return rows, one, two, 1 - weight[:, None], weight[:, None]


@lru_cache(maxsize=64)
def column_taps(size: int, target: int, channels: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute the positions and weights of the source values for each target value in a line of interleaved
    pixels.

    Returns:
        The positions, int64 [2 * C * target]: all left neighbours, plane by plane, then all right neighbours.
        The weights, one array for the left and one for the right neighbours, float32 [C * target].
    """
    first, second, weight = taps(size, target)
    planes = np.arange(channels)[:, None]
    where = [(channels * column + planes).reshape(-1) for column in (first, second)]
    weights = np.tile(weight, channels)
    return np.concatenate(where), 1 - weights, weights


@lru_cache(maxsize=64)
def mixing(size: tuple[int, int], target: tuple[int, int]) -> Mixing:
    """Return the index and weight arrays for a bilinear resize from ``size`` to ``target``, both (height, width)."""
    (*lines, row_weights), (*columns, weight) = (taps(*each) for each in zip(size, target, strict=True))
    return Mixing.of(
        size[1], lines, row_weights, columns, np.stack([1 - weight, weight]) * np.float32(2**-24)
    )


def taps(size: int, target: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return for each target pixel along one axis its two source pixels, and the weight of the second source pixel."""
    scale = np.float32(size / target)
    source = scale * (np.arange(target, dtype=np.float32) + np.float32(0.5)) - np.float32(0.5)
    first = source.astype(np.int64)  # positions in the first half pixel become 0
    second = np.minimum(first + 1, size - 1)
    return first, second, np.maximum(source - first.astype(np.float32), 0)
