"""Resizing of uint8 images exactly as OpenCV's INTER_AREA and torch's antialiased kernels round it.

Policies see the rounding of the library that prepared their training images. Both libraries compute in fixed point
or in a stated order of float32 sums, so a handful of numpy operations gives every value; tables are cached.
Images are [h, w, C] throughout.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

LINEAR_BITS = 11  # of OpenCV's fixed-point weights
MAX_WEIGHT_BITS = 22  # torch keeps as many bits of a weight as int16 has room for, up to this


# ----------------------------------------------------------------------------- OpenCV


def resize_area(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """uint8 [h, w, C] -> uint8 [height, width, C] as cv2.resize(..., interpolation=INTER_AREA).

    Shrinking averages the pixels under each target pixel, weighted by overlap; where an axis grows, OpenCV
    interpolates linearly between neighbours instead, with weights of its own. Source: OpenCV imgproc ``resize.cpp``.
    """
    h, w = image.shape[:2]
    if (h, w) == (height, width):
        return image
    if height > h or width > w:
        return _resize_linear_area(image, height, width)
    if h % height == 0 and w % width == 0:
        return _block_means(image, h // height, w // width)
    return _weighted_means(image, height, width)


def _block_means(image: np.ndarray, down: int, across: int) -> np.ndarray:
    h, w, channels = image.shape
    blocks = image.reshape(h // down, down, w // across, across, channels)
    total = blocks.sum(axis=(1, 3), dtype=np.int32)
    if (down, across) == (2, 2):
        return ((total + 2) >> 2).astype(np.uint8)
    return np.rint(total.astype(np.float32) * np.float32(1.0 / (down * across))).astype(np.uint8)


def _weighted_means(image: np.ndarray, height: int, width: int) -> np.ndarray:
    h, w = image.shape[:2]
    columns = np.zeros((h, width, image.shape[2]), np.float32)
    for source, weight in _overlaps(w, width):
        columns += image[:, source] * weight[None, :, None]
    out = np.zeros((height, width, image.shape[2]), np.float32)
    for source, weight in _overlaps(h, height):
        out += columns[source] * weight[:, None, None]
    return np.rint(out).astype(np.uint8)


@lru_cache(maxsize=64)
def _overlaps(size: int, target: int) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """Return, tap by tap, the source index of every target pixel and its float32 weight, in OpenCV's order.

    An overlap of less than a thousandth of a pixel is left out, as there.
    """
    scale = size / target
    taps: list[list[tuple[int, float]]] = []
    for at in range(target):
        start, end = at * scale, at * scale + scale
        low, high = math.ceil(start), math.floor(end)
        found = [(low - 1, (low - start) / scale)] if low - start > 1e-3 else []
        found += [(source, 1.0 / scale) for source in range(low, high)]
        if end - high > 1e-3:
            found.append((high, (end - high) / scale))
        taps.append(found)
    deepest = max(map(len, taps))
    padded = [found + [(0, 0.0)] * (deepest - len(found)) for found in taps]
    return tuple(
        (np.array([row[tap][0] for row in padded]), np.array([row[tap][1] for row in padded], np.float32))
        for tap in range(deepest)
    )


def resize_linear(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """uint8 [h, w, C] -> uint8 [height, width, C] as cv2.resize(..., interpolation=INTER_LINEAR), its default.

    No antialiasing: two neighbours on each axis. Source: OpenCV imgproc ``resize.cpp``.
    """
    if image.shape[:2] == (height, width):
        return image
    return _interpolate(image, _linear_taps(image.shape[0], height), _linear_taps(image.shape[1], width))


def _resize_linear_area(image: np.ndarray, height: int, width: int) -> np.ndarray:
    return _interpolate(
        image, _linear_area_taps(image.shape[0], height), _linear_area_taps(image.shape[1], width)
    )


Taps = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # of an axis: both neighbours, both weights


def _interpolate(image: np.ndarray, down: Taps, across: Taps) -> np.ndarray:
    (y0, y1, wy0, wy1), (x0, x1, wx0, wx1) = down, across
    wide = image.astype(np.int32)
    columns = wide[:, x0] * wx0[None, :, None] + wide[:, x1] * wx1[None, :, None]
    columns >>= 4  # OpenCV's vertical pass works on 16-bit halves
    rows = ((columns[y0] * wy0[:, None, None]) >> 16) + ((columns[y1] * wy1[:, None, None]) >> 16)
    return ((rows + 2) >> 2).astype(np.uint8)


@lru_cache(maxsize=64)
def _linear_taps(size: int, target: int) -> Taps:
    """Return both neighbours of every target pixel's centre and their weights in units of 2^-11, int32."""
    at = ((np.arange(target) + 0.5) * (1.0 / (target / size)) - 0.5).astype(np.float32)
    low = np.floor(at).astype(np.int64)
    return _fixed_point(low, at - low.astype(np.float32), size)


def _fixed_point(low: np.ndarray, part: np.ndarray, size: int) -> Taps:
    one = np.float32(1 << LINEAR_BITS)
    weights = [np.rint(each * one).astype(np.int32) for each in (np.float32(1) - part, part)]
    first, second = (np.clip(index, 0, size - 1) for index in (low, low + 1))
    return first, second, weights[0], weights[1]


@lru_cache(maxsize=64)
def _linear_area_taps(size: int, target: int) -> Taps:
    """Return both neighbours of every target pixel and their weights in units of 2^-11, int32."""
    inverse = target / size
    scale = 1.0 / inverse
    at = np.arange(target)
    low = np.floor(at * scale).astype(np.int64)
    part = ((at + 1) - (low + 1) * inverse).astype(np.float32)
    return _fixed_point(low, np.maximum(part, np.float32(0)) % np.float32(1), size)


# ----------------------------------------------------------------------------- torch


def resize_antialias(image: np.ndarray, height: int, width: int, method: str) -> np.ndarray:
    """uint8 [h, w, C] -> uint8 [height, width, C] as torch's antialiased ``interpolate`` on uint8 tensors.

    method: "bilinear" or "bicubic" (a = -0.5). Columns first, then rows, each rounded to uint8; weights are int16
    with as many bits as fit. Source: ATen ``UpSampleKernel.cpp``.
    """
    out = image
    for axis, target in ((1, width), (0, height)):
        if out.shape[axis] == target:
            continue
        sources, weights, bits = _antialias_taps(out.shape[axis], target, method)
        shape = [1, 1, 1]
        shape[axis] = target
        total: np.ndarray | int = 1 << (bits - 1)
        for source, weight in zip(sources, weights, strict=True):
            total = total + np.take(out, source, axis=axis) * weight.reshape(shape)
        out = np.clip(total >> bits, 0, 255).astype(np.uint8)
    return out


@lru_cache(maxsize=64)
def _antialias_taps(size: int, target: int, method: str) -> tuple[np.ndarray, np.ndarray, int]:
    """Return source indices and int32 weights, both [taps, target], and the number of bits behind the point."""
    scale = size / target
    kernel, reach = (_cubic, 2.0) if method == "bicubic" else (lambda x: max(1.0 - abs(x), 0.0), 1.0)
    support, inverse = (reach * scale, 1.0 / scale) if scale >= 1.0 else (reach, 1.0)
    taps = math.ceil(support) * 2 + 1
    sources, weights = np.zeros((taps, target), np.int64), np.zeros((taps, target))
    for at in range(target):
        center = scale * (at + 0.5)
        low = max(int(center - support + 0.5), 0)
        count = min(int(center + support + 0.5), size) - low
        values = [kernel((low + tap - center + 0.5) * inverse) for tap in range(count)]
        total = sum(values)
        weights[:count, at] = [value / total for value in values] if total else values
        sources[:count, at] = range(low, low + count)
    largest, bits = weights.max(), 0
    while bits < MAX_WEIGHT_BITS and int(0.5 + largest * (1 << (bits + 1))) < 1 << 15:
        bits += 1
    scaled = weights * (1 << bits)
    return sources, np.trunc(scaled + np.where(weights < 0, -0.5, 0.5)).astype(np.int32), bits


def resize_cut(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """uint8 [h, w, C] -> uint8 [height, width, C]: torch's antialiased bilinear resize of x / 255, then cut to uint8.

    So GR00T N1.5's video transforms do it. The cut makes the last bit of every float32 sum matter: weights and sums
    are those of ATen's kernel for floats, in its order.
    """
    out = resize_floats(image.astype(np.float32) / np.float32(255), height, width, "bilinear")
    return (out * np.float32(255)).astype(np.uint8)


def resize_round(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """uint8 [h, w, C] -> uint8 [height, width, C]: torch's antialiased bicubic resize of floats, rounded to uint8.

    So torchvision's functional ``resize`` of a uint8 tensor does it (LeRobot's Evo-1).
    """
    out = resize_floats(image.astype(np.float32), height, width, "bicubic")
    return np.rint(np.clip(out, 0, 255)).astype(np.uint8)


def resize_floats(image: np.ndarray, height: int, width: int, method: str) -> np.ndarray:
    """float32 [h, w, C] -> float32 [height, width, C], columns first, then rows; nothing is rounded or clipped.

    method: "area" (torch's ``interpolate(mode="area")``), "bilinear" or "bicubic" (its antialiased ones, a = -0.5).
    """
    out = image
    for axis, target in ((1, width), (0, height)):
        if out.shape[axis] == target:
            continue
        shape = [1, 1, 1]
        shape[axis] = target
        total: np.ndarray | np.float32 = np.float32(0)
        for source, weight in zip(*_float_taps(out.shape[axis], target, method), strict=True):
            total = total + np.take(out, source, axis=axis) * weight.reshape(shape)
        out = np.asarray(total)
    return out


@lru_cache(maxsize=64)
def _float_taps(size: int, target: int, method: str) -> tuple[np.ndarray, np.ndarray]:
    """Return source indices and float32 weights, both [taps, target], computed in float32 as ATen computes them."""
    if method == "area":
        return _mean_taps(size, target)
    one, half = np.float32(1), np.float32(0.5)
    linear = (lambda x: np.maximum(one - x, np.float32(0)), one)
    kernel, reach = (_cubics, np.float32(2)) if method == "bicubic" else linear
    scale = np.float32(size) / np.float32(target)
    stretch = max(scale, one)
    support, inverse = reach * stretch, one / stretch
    taps = math.ceil(float(support)) * 2 + 1
    sources, weights = np.zeros((taps, target), np.int64), np.zeros((taps, target), np.float32)
    for at in range(target):
        center = scale * (np.float32(at) + half)
        low = max(int(center - support + half), 0)
        count = min(int(center + support + half), size) - low
        distance = np.arange(low, low + count, dtype=np.float32) - center
        values = kernel(np.abs((distance + np.float64(0.5)) * np.float64(inverse)).astype(np.float32))
        total = np.add.accumulate(values)[-1]  # one after the other, as there
        weights[:count, at] = values / total
        sources[:count, at] = range(low, low + count)
    return sources, weights


def _mean_taps(size: int, target: int) -> tuple[np.ndarray, np.ndarray]:
    spans = [(at * size // target, -((at + 1) * size // -target)) for at in range(target)]
    taps = max(end - start for start, end in spans)
    sources, weights = np.zeros((taps, target), np.int64), np.zeros((taps, target), np.float32)
    for at, (start, end) in enumerate(spans):
        sources[: end - start, at] = range(start, end)
        weights[: end - start, at] = 1 / (end - start)
    return sources, weights


def _cubics(x: np.ndarray) -> np.ndarray:
    """Return the kernel of a = -0.5, each product and sum rounded once, as fused instructions do it."""
    square = _fused(1.5, x, -2.5) * x
    near = _fused(square, x, 1.0)
    far = _fused(_fused(_fused(-0.5, x, 2.5), x, -4.0), x, 2.0)
    return np.where(x < 1, near, np.where(x < 2, far, np.float32(0)))


def _fused(a: np.ndarray | float, b: np.ndarray, c: float) -> np.ndarray:
    return (np.asarray(a, np.float64) * b + c).astype(np.float32)


def _cubic(x: float) -> float:
    a, x = -0.5, abs(x)
    if x < 1.0:
        return ((a + 2.0) * x - (a + 3.0)) * x * x + 1
    if x < 2.0:
        return (((x - 5) * x + 8) * x - 4) * a
    return 0.0
