"""The interface of compiled kernels for the steps that change a frame, and the variable with the kernels in
use.

The results of kernels and numpy have the same bits. Kernels do not check their arguments. So frames with a
memory layout that the kernels do not support are resized by numpy.
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
        addresses: The addresses of the arrays. They are stored because reading an address takes microseconds.
        reach: Number of bytes that a kernel loads at once for four values: 16 or 8. It is 0 if lines are too short for
            this.
        mixed: The form of the result: 0 for float planes, 1 for uint8 with OpenCV's weights, 2 for uint8 as in
            TensorFlow's crop.
    """

    arrays: tuple[np.ndarray, ...]
    addresses: tuple[int, ...]
    reach: int
    mixed: int

    @classmethod
    def of(cls, size: int, rows: Any, row_weights: Any, columns: Any, weights: Any, mixed: int = 0) -> Mixing:
        """Return the arrays for a resize of lines of ``size`` pixels.

        Args:
            size: Number of pixels in a source line.
            rows: Both source rows of each target row.
            row_weights: Weights of the rows.
            columns: Both source columns of each target column.
            weights: Weights of the columns.
            mixed: The form of the result, as in the attribute ``mixed``.
        """
        line, wide = 3 * size, 3 * len(columns[0])
        pixel, colour = np.divmod(np.minimum(np.arange(-(-wide // 8) * 8), wide - 1), 3)
        sources = 3 * np.stack(columns)[:, pixel] + colour  # the byte of a line that each value reads
        starts = np.minimum(sources[0].reshape(-1, 4)[:, [0, 3]] // 3 * 3, max(line - 8, 0))
        reach = 8 if line >= 8 else 0
        if line >= 16 and (sources[1, 3::4] - starts[:, 0]).max() < 16:
            reach, starts = 16, np.minimum(starts[:, :1], line - 16) + np.array([0, 8])
        first, second = np.repeat(starts, 4, axis=0).T
        picks = np.full((*sources.shape, 4), 128, np.uint8)
        behind = sources - first >= 8
        picks[..., :3] = (sources - np.where(behind, second - 8, first))[..., None]
        both, starts = np.stack(rows).astype(np.int32), np.ascontiguousarray(starts, np.int32)
        arrays = both, row_weights, starts, picks, np.ascontiguousarray(weights[..., pixel])
        return cls(arrays, tuple(array.ctypes.data for array in arrays), reach, mixed)


class ResizeWeights(NamedTuple):
    """The weights of a resize along one axis of ``size`` pixels.

    Target pixel i is the sum of the source pixels from first[i] on, times weights[i].

    Attributes:
        size: Number of source pixels.
        first: First source pixel of each target pixel, int32 [target].
        weights: [target, taps].
        bits: Binary places of int32 weights, for rounded bytes. 0 for float32 weights and results.
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
        """Return the weights of a resize along one axis from a list of spans (runs of source pixels with weights).

        Args:
            size: Number of source pixels.
            spans: For each target pixel, its first source pixel and the weights from there on.
            bits: Binary places of int32 weights, or 0 for float32 weights.
        """
        entries = list(spans)
        taps = max(len(weights) for _, weights in entries)
        # Every source pixel that a weight refers to is inside the image.
        first = np.array([min(low, size - taps) for low, _ in entries], np.int32)
        table = np.zeros((len(entries), taps), np.int32 if bits else np.float32)
        for row, begin, (low, weights) in zip(table, first, entries, strict=True):
            row[low - begin :][: len(weights)] = weights
        return cls(size, first, table, bits, (first.ctypes.data, table.ctypes.data))


class FrameKernels(NamedTuple):
    """The compiled kernels that resize and compress frames.

    Attributes:
        resize: Resizes a frame, uint8 [h, w, 3], to float32 planes [3, height, width], or to contiguous uint8
            [height, width, 3].
        resample: Resizes a frame, uint8 or float32 [h, w, 3], along one axis, with contiguous results.
        jpeg: Computes a JPEG round trip of a frame, uint8 [h, w, 3]. The other arguments are float32 inverses
            of the quantiser's steps and int32 steps of the dequantiser, luma and chroma [2, 8, 8].
    """

    resize: Callable[[np.ndarray, Mixing, np.ndarray], None]
    resample: Callable[[np.ndarray, int, ResizeWeights, np.ndarray], None]
    jpeg: Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], None]


in_use: list[FrameKernels] = []  # the kernels in use, as one entry; empty if numpy computes frames


def install(kernels: FrameKernels | None) -> None:
    """Set the kernels for frames. Their results must have the same bits as numpy's results. None uses numpy again."""
    in_use[:] = [] if kernels is None else [kernels]


def take_bytes(frame: np.ndarray) -> bool:
    """Return True if compiled kernels are in use and can read this frame, [h, w, 3], as bytes of pixels."""
    return bool(in_use) and frame.dtype == np.uint8 and pixels_lie_together(frame)


def pixels_lie_together(frame: np.ndarray) -> bool:
    """Return True if a frame [h, w, 3] is not empty and the pixels of each line are adjacent in memory."""
    lies = (frame.shape[2], *frame.strides[1:])
    return lies == (3, 3 * frame.itemsize, frame.itemsize) and frame.size > 0 and frame.flags.aligned


MOST_KEPT = 16 << 20  # largest size in bytes of a buffer that is kept for the next call
_kept = threading.local()


def scratch(name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return a buffer of the calling thread. A later call with the same name may return the same memory.

    The buffer is kept, because new memory from the operating system would cost a page fault for each 4 KiB.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size > MOST_KEPT:
        return np.empty(shape, dtype)
    buffer: np.ndarray | None = getattr(_kept, name, None)
    if buffer is None or len(buffer) < size:
        buffer = np.empty(size, np.uint8)
        setattr(_kept, name, buffer)
    return buffer[:size].view(dtype).reshape(shape)
