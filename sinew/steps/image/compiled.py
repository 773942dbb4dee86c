"""The interface of compiled kernels for steps of a frame, and the kernels in use.

They equal numpy in every bit. They check nothing, so frames with another memory layout are left to numpy.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

Size = tuple[int, int]  # height and width in pixels


class Mixing(NamedTuple):
    """The arrays of a bilinear resize, as kernels read them (``Picture`` in ``kernels.h`` of engine ``cpu``).

    Attributes:
        arrays: lines int32 [2, height], row_weights float32 [height], starts int32 [values / 4, 2], picks uint8 [2,
            values, 4], column_weights float32 [2, values].
        addresses: Their addresses, stored because reading one takes microseconds.
        mixed: 0 for planes, 1 for bytes (OpenCV's weights), 2 for bytes (TensorFlow's crop).
    """

    arrays: tuple[np.ndarray, ...]
    addresses: tuple[int, ...]
    reach: int
    mixed: int

    @classmethod
    def of(cls, size: int, rows: Any, row_weights: Any, columns: Any, weights: Any, mixed: int = 0) -> Mixing:
        """Return that of lines of ``size`` pixels: both neighbours of each row and of each column, and the weights."""
        line, wide = 3 * size, 3 * len(columns[0])
        pixel, colour = np.divmod(np.minimum(np.arange(-(-wide // 8) * 8), wide - 1), 3)
        wanted = 3 * np.stack(columns)[:, pixel] + colour  # the byte of a line that each value reads
        starts = np.minimum(wanted[0].reshape(-1, 4)[:, [0, 3]] // 3 * 3, max(line - 8, 0))
        reach = 8 if line >= 8 else 0
        if line >= 16 and (wanted[1, 3::4] - starts[:, 0]).max() < 16:
            reach, starts = 16, np.minimum(starts[:, :1], line - 16) + np.array([0, 8])
        first, second = np.repeat(starts, 4, axis=0).T
        picks = np.full((*wanted.shape, 4), 128, np.uint8)
        behind = wanted - first >= 8
        picks[..., :3] = (wanted - np.where(behind, second - 8, first))[..., None]
        both, starts = np.stack(rows).astype(np.int32), np.ascontiguousarray(starts, np.int32)
        arrays = both, row_weights, starts, picks, np.ascontiguousarray(weights[..., pixel])
        return cls(arrays, tuple(array.ctypes.data for array in arrays), reach, mixed)


class ResizeWeights(NamedTuple):
    """The weights of a resize along one axis of ``size`` pixels.

    Pixel ``at`` of the target is the sum of the pixels from first[at] on, int32 [target], times weights [target,
    taps].

    Attributes:
        bits: Binary places of int32 weights, for rounded bytes; 0 for float32 weights and results.
        addresses: Addresses of the two arrays.
    """

    size: int
    first: np.ndarray
    weights: np.ndarray
    bits: int
    addresses: tuple[int, ...]

    @classmethod
    def of(
        cls, size: int, spans: Iterable[tuple[int, Sequence[Any] | np.ndarray]], bits: int = 0
    ) -> ResizeWeights:
        """Return those of spans: for each target pixel its first source pixel, and the weights from there on."""
        given = list(spans)
        taps = max(len(weights) for _, weights in given)
        # Every tap is inside the image.
        first = np.array([min(low, size - taps) for low, _ in given], np.int32)
        table = np.zeros((len(given), taps), np.int32 if bits else np.float32)
        for row, begin, (low, weights) in zip(table, first, given, strict=True):
            row[low - begin :][: len(weights)] = weights
        return cls(size, first, table, bits, (first.ctypes.data, table.ctypes.data))


class FrameKernels(NamedTuple):
    """resize: from a frame, uint8 [h, w, 3], to planes, float32 [3, height, width], or to uint8 [height, width, 3],
    dense. resample: from uint8 or float32 [h, w, 3], by the taps of an axis, to what they make, dense. jpeg:
    from uint8 [h, w, 3], by float32 inverses of the quantiser's steps and the dequantiser's int32 ones, luma and chroma
    [2, 8, 8], to as many bytes, dense."""

    resize: Callable[[np.ndarray, Mixing, np.ndarray], None]
    resample: Callable[[np.ndarray, int, ResizeWeights, np.ndarray], None]
    jpeg: Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], None]


in_use: list[FrameKernels] = []  # one entry, or none if numpy changes the frames


def install(kernels: FrameKernels | None) -> None:
    """Let ``kernels`` change frames; they have to equal numpy in every bit. None: numpy does."""
    in_use[:] = [] if kernels is None else [kernels]


def take_bytes(frame: np.ndarray) -> bool:
    """Return whether kernels are in use, and may read [h, w, 3] as bytes of pixels."""
    return bool(in_use) and frame.dtype == np.uint8 and pixels_lie_together(frame)


def pixels_lie_together(frame: np.ndarray) -> bool:
    """Return True if a frame [h, w, 3] is not empty and the pixels of each line are adjacent in memory."""
    lies = (frame.shape[2], *frame.strides[1:])
    return lies == (3, 3 * frame.itemsize, frame.itemsize) and frame.size > 0 and frame.flags.aligned


MOST_KEPT = 16 << 20  # bytes; a larger buffer is not kept for the next call
_kept = threading.local()


def scratch(name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return a buffer of this thread that the next call writes over: memory that the system has just given costs a page
    fault for each 4 KiB."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size > MOST_KEPT:
        return np.empty(shape, dtype)
    kept: np.ndarray | None = getattr(_kept, name, None)
    if kept is None or len(kept) < size:
        kept = np.empty(size, np.uint8)
        setattr(_kept, name, kept)
    return kept[:size].view(dtype).reshape(shape)
