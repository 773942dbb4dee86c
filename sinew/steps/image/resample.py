"""Resize uint8 images with exactly the rounding of OpenCV's INTER_AREA and torch's antialiased kernels.

A policy's training images have the rounding of the library that prepared them. Both libraries compute in fixed point,
or add float32 numbers in a defined order. A few numpy operations therefore give exactly the same values. Tables are
cached. Images are [h, w, C] in the whole module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import numpy as np

from sinew.steps.image import compiled
from sinew.steps.image.compiled import Mixing, ResizeWeights, Size, scratch

LINEAR_BITS = 11  # binary places of OpenCV's fixed-point weights
MAX_WEIGHT_BITS = 22  # largest number of binary places of torch's int16 weights
# Binary places of Pillow's weights. Its 32-bit sums also need 8 bits for a pixel and 2 bits of headroom.
PILLOW_BITS = 22

# Both source pixels of each target pixel along one axis, and the weights of both pixels.
Neighbours = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
Table = Callable[[int, int], Neighbours]  # arguments: number of source pixels, number of target pixels


def resample(image: np.ndarray, passes: Iterable[tuple[int, ResizeWeights]]) -> np.ndarray:
    """Resize an image, uint8 or float32 [h, w, C], along each axis in ``passes``, one axis after the other.

    Args:
        image: The image.
        passes: (axis, weights) of each pass.
    """
    steps = list(passes)
    for step, (axis, taps) in enumerate(steps, 1):
        if not (compiled.in_use and _fit(image, axis, taps)):
            image = by_numpy(image, axis, taps)
            continue
        shape = tuple(len(taps.first) if each == axis else side for each, side in enumerate(image.shape))
        dtype = np.uint8 if taps.bits else np.float32
        out = np.empty(shape, dtype) if step == len(steps) else scratch(f"pass {step}", shape, dtype)
        compiled.in_use[0].resample(image, axis, taps, out)
        image = out
    return image


def _fit(image: np.ndarray, axis: int, taps: ResizeWeights) -> bool:
    """Return True if compiled kernels support this image and these weights along an axis."""
    dtypes = (np.uint8,) if taps.bits else (np.uint8, np.float32)
    return image.dtype in dtypes and image.shape[axis] == taps.size and compiled.pixels_lie_together(image)


def by_numpy(image: np.ndarray, axis: int, taps: ResizeWeights) -> np.ndarray:
    """Resize an image along one axis with numpy. Compiled kernels give the same bits."""
    # Reading whole rows is faster than reading columns. For many weights per pixel, transpose the image first.
    if axis == 1 and taps.weights.shape[1] > 6:
        turned = by_numpy(np.ascontiguousarray(image.transpose(1, 0, 2)), 0, taps)
        return np.ascontiguousarray(turned.transpose(1, 0, 2))
    shape = tuple(-1 if each == axis else 1 for each in range(3))
    total = np.asarray((1 << taps.bits) >> 1, taps.weights.dtype)
    for tap, weight in enumerate(taps.weights.T):
        total = total + image.take(taps.first + tap, axis=axis) * weight.reshape(shape)
    return np.clip(total >> taps.bits, 0, 255).astype(np.uint8) if taps.bits else total


def resize_area(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize uint8 [h, w, C] to uint8 [height, width, C] as cv2.resize(..., interpolation=INTER_AREA).

    Shrinking averages the pixels under each target pixel, weighted by overlap. If an axis grows, OpenCV interpolates
    linearly between neighbours instead, with special weights. Source: OpenCV imgproc ``resize.cpp``.
    """
    h, w = image.shape[:2]
    if (h, w) == (height, width):
        return image
    if height > h or width > w:
        return _interpolate(image, (height, width), _linear_area_taps)
    if h % height == 0 and w % width == 0:
        return _block_means(image, h // height, w // width)
    return np.rint(_resized(image, height, width, _overlaps)).astype(np.uint8)


def _block_means(image: np.ndarray, down: int, across: int) -> np.ndarray:
    # The sums are exact below 2^24.
    total = _resized(image, image.shape[0] // down, image.shape[1] // across, _sums)
    if (down, across) == (2, 2):
        return ((total + np.float32(2)) / np.float32(4)).astype(np.uint8)
    return np.rint(total * np.float32(1.0 / (down * across))).astype(np.uint8)


@lru_cache(maxsize=64)
def _sums(size: int, target: int) -> ResizeWeights:
    return ResizeWeights.of(size, ((at, [1.0] * (size // target)) for at in range(0, size, size // target)))


@lru_cache(maxsize=64)
def _overlaps(size: int, target: int) -> ResizeWeights:
    """Return the weights of a resize in which each source pixel counts by its overlap with the target pixel.

    As in OpenCV, an overlap of less than a thousandth of a pixel is left out.
    """
    scale = size / target
    spans: list[tuple[int, list[float]]] = []
    for at in range(target):
        start, end = at * scale, at * scale + scale
        low, high = math.ceil(start), math.floor(end)
        before = [(low - start) / scale] if low - start > 1e-3 else []
        behind = [(end - high) / scale] if end - high > 1e-3 else []
        spans.append((low - len(before), [*before, *[1.0 / scale] * (high - low), *behind]))
    return ResizeWeights.of(size, spans)


def resize_linear(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize uint8 [h, w, C] to uint8 [height, width, C] as cv2.resize(..., interpolation=INTER_LINEAR), its default.

    The resize uses two neighbours on each axis, without antialiasing. Source: OpenCV imgproc ``resize.cpp``.
    """
    if image.shape[:2] == (height, width):
        return image
    return _interpolate(image, (height, width), linear_taps)


def _interpolate(image: np.ndarray, target: Size, table: Table) -> np.ndarray:
    if not compiled.take_bytes(image):
        return linear_by_numpy(image, target, table)
    mixing, out = linear_mixing(image.shape[:2], target, table), np.empty((*target, 3), np.uint8)
    compiled.in_use[0].resize(image, mixing, out)
    return out


@lru_cache(maxsize=64)
def linear_mixing(size: Size, target: Size, table: Table) -> Mixing:
    (*lines, upper, lower), (*columns, left, right) = map(table, size, target)
    return Mixing.of(size[1], lines, np.stack([upper, lower]), columns, left | right << 16, 1)


def linear_by_numpy(image: np.ndarray, target: Size, table: Table) -> np.ndarray:
    """Compute OpenCV's linear resize with numpy. The compiled kernel gives the same bits."""
    (y0, y1, wy0, wy1), (x0, x1, wx0, wx1) = map(table, image.shape[:2], target)
    columns = image.take(x0, axis=1) * wx0[:, None] + image.take(x1, axis=1) * wx1[:, None]
    columns >>= 4  # OpenCV's vertical pass works on 16-bit halves
    rows = ((columns[y0] * wy0[:, None, None]) >> 16) + ((columns[y1] * wy1[:, None, None]) >> 16)
    return ((rows + 2) >> 2).astype(np.uint8)


@lru_cache(maxsize=64)
def linear_taps(size: int, target: int) -> Neighbours:
    """Return both neighbours of every target pixel's centre and their weights in units of 2^-11, int32."""
    at = ((np.arange(target) + 0.5) * (1.0 / (target / size)) - 0.5).astype(np.float32)
    low = np.floor(at).astype(np.int64)
    return _fixed_point(low, at - low.astype(np.float32), size)


def _fixed_point(low: np.ndarray, part: np.ndarray, size: int) -> Neighbours:
    one = np.float32(1 << LINEAR_BITS)
    weights = [np.rint(each * one).astype(np.int32) for each in (np.float32(1) - part, part)]
    first, second = (np.clip(index, 0, size - 1) for index in (low, low + 1))
    return first, second, weights[0], weights[1]


@lru_cache(maxsize=64)
def _linear_area_taps(size: int, target: int) -> Neighbours:
    """Return both neighbours of every target pixel and their weights for INTER_AREA, in units of 2^-11, int32."""
    inverse = target / size
    scale = 1.0 / inverse
    at = np.arange(target)
    low = np.floor(at * scale).astype(np.int64)
    part = ((at + 1) - (low + 1) * inverse).astype(np.float32)
    return _fixed_point(low, np.maximum(part, np.float32(0)) % np.float32(1), size)


def resize_antialias(image: np.ndarray, height: int, width: int, method: str) -> np.ndarray:
    """Resize uint8 [h, w, C] to uint8 [height, width, C] as torch's antialiased ``interpolate`` on uint8 tensors.

    Columns are resized first, then rows, each rounded to uint8. Weights are int16 with as many binary places as fit.
    Source: ATen ``UpSampleKernel.cpp``.

    Args:
        image: The image.
        height: Height of the result.
        width: Width of the result.
        method: "bilinear" or "bicubic" (a = -0.5).
    """
    return _resized(image, height, width, antialias_taps, method)


def resize_pillow(image: np.ndarray, height: int, width: int, method: str) -> np.ndarray:
    """Resize uint8 [h, w, 3] to uint8 [height, width, 3] as Pillow before version 13, with its filter ``method``.

    The arithmetic equals that of torch's kernel, which was derived from Pillow, except for weights with
    ``PILLOW_BITS`` binary places. Without compiled kernels, Pillow itself computes. The training images of policies
    were resized by columns first. Pillow 13 begins with rows if rows shrink much more. Source: Pillow ``Resample.c``.
    """
    if compiled.in_use:
        return _resized(image, height, width, antialias_taps, method, PILLOW_BITS)
    from PIL import Image  # imported here, because only some policies resize with Pillow

    by, picture = Image.Resampling[method.upper()], Image.fromarray(image)
    return np.asarray(picture.resize((width, picture.height), by).resize((width, height), by))


def _resized(
    image: np.ndarray, height: int, width: int, table: Callable[..., ResizeWeights], *given: Any
) -> np.ndarray:
    """Resize [h, w, C] to [height, width, C]: columns first, then rows. An axis that keeps its size is skipped."""
    axes = [(axis, target) for axis, target in ((1, width), (0, height)) if image.shape[axis] != target]
    return resample(image, ((axis, table(image.shape[axis], target, *given)) for axis, target in axes))


@lru_cache(maxsize=64)
def antialias_taps(size: int, target: int, method: str, bits: int = 0) -> ResizeWeights:
    """Return the int32 weights of an antialiased resize along one axis.

    Args:
        size: Number of source pixels.
        target: Number of target pixels.
        method: "bilinear" or "bicubic".
        bits: Binary places of the weights. 0 chooses as many as int16 has room for, up to ``MAX_WEIGHT_BITS``.
    """
    kernel, reach = (_cubic, 2.0) if method == "bicubic" else (_triangle, 1.0)
    spans = _spans(size, target, kernel, np.float64(reach))
    largest = max(weights.max() for _, weights in spans)
    bits = bits or sum(int(0.5 + largest * (1 << more)) < 1 << 15 for more in range(1, MAX_WEIGHT_BITS + 1))
    return ResizeWeights.of(
        size, ((low, np.trunc(w * (1 << bits) + np.copysign(0.5, w))) for low, w in spans), bits
    )


def _spans(size: int, target: int, kernel: Callable[..., np.ndarray], reach: np.floating) -> list[Any]:
    """Return for each target pixel the first source pixel under its kernel and the weights from there on.

    Args:
        size: Number of source pixels.
        target: Number of target pixels.
        kernel: The kernel.
        reach: Number of pixels that the kernel covers on each side. Its dtype is the dtype of the arithmetic.
    """
    real, one, half = type(reach), type(reach)(1), type(reach)(0.5)
    scale = real(size) / real(target)
    stretch = max(scale, one)
    support, inverse = reach * stretch, one / stretch
    spans = []
    for at in range(target):
        center = scale * (real(at) + half)
        low = max(int(center - support + half), 0)
        distance = np.arange(low, min(int(center + support + half), size), dtype=real) - center
        values = kernel(np.abs((distance + np.float64(0.5)) * np.float64(inverse)).astype(real))
        spans.append((low, values / np.add.accumulate(values)[-1]))  # add the values one by one, as ATen does
    return spans


def resize_cut(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize uint8 [h, w, C] by torch's antialiased bilinear resize of x / 255, then cut to uint8 [height, width, C].

    GR00T N1.5's video transforms do the same. The cut makes the last bit of every float32 sum important, so weights and
    sums are those of ATen's kernel for floats, in its order.
    """
    out = resize_floats(image.astype(np.float32) / np.float32(255), height, width, "bilinear")
    return (out * np.float32(255)).astype(np.uint8)


def resize_round(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize uint8 [h, w, C] by torch's antialiased bicubic resize of floats, rounded to uint8 [height, width, C].

    torchvision's functional ``resize`` of a uint8 tensor does the same (LeRobot's Evo-1).
    """
    whole = scratch("whole", (height, width, image.shape[2]), np.float32)
    np.rint(_resized(image, height, width, float_taps, "bicubic"), out=whole)
    return np.clip(whole, 0, 255, out=whole).astype(np.uint8)


def resize_plain(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize uint8 [h, w, C] by torch's bilinear resize of floats without antialias, rounded to uint8 [height, width,
    C].

    torchvision's ``Resize`` of a uint8 tensor with ``antialias=False`` does the same (MolmoAct2). torch rounds each sum
    of a product and the sum before it once (a fused multiply-add). float64 contains the products of bytes and float32
    weights exactly.
    """
    rows, columns = plain_taps(image.shape[0], height), plain_taps(image.shape[1], width)
    total = np.float32(0)
    for down, across in ((0, 1), (0, 0), (1, 0), (1, 1)):  # torch's order of the four neighbours
        (which_row, high), (which_column, wide) = rows[down], columns[across]
        weight = (high[:, None] * wide)[..., None].astype(np.float64)
        neighbours = image.take(which_row, axis=0).take(which_column, axis=1)
        total = (neighbours * weight + total).astype(np.float32)
    return np.rint(total).astype(np.uint8)


@lru_cache(maxsize=64)
def plain_taps(size: int, target: int) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Return for each target pixel along one axis its two source pixels, each with its float32 weight."""
    centre = np.arange(target, dtype=np.float32) + np.float32(0.5)
    source = np.maximum(_fused(float(np.float32(size) / np.float32(target)), centre, -0.5), 0)
    first = np.minimum(source.astype(np.int64), size - 1)
    weight = source - first.astype(np.float32)
    return (first, 1 - weight), (np.minimum(first + 1, size - 1), weight)


def resize_floats(image: np.ndarray, height: int, width: int, method: str) -> np.ndarray:
    """Resize float32 [h, w, C] to [height, width, C], columns first, then rows, without rounding or clipping.

    Args:
        image: The image.
        height: Height of the result.
        width: Width of the result.
        method: "area" (torch's ``interpolate(mode="area")``), or torch's antialiased "bilinear" or "bicubic" (a =
            -0.5).
    """
    return _resized(image, height, width, float_taps, method)


@lru_cache(maxsize=64)
def float_taps(size: int, target: int, method: str) -> ResizeWeights:
    """Return the float32 weights of a resize along one axis, computed in float32 as in ATen."""
    if method == "area":
        ends = [(at * size // target, -((at + 1) * size // -target)) for at in range(target)]
        return ResizeWeights.of(size, ((start, [1 / (end - start)] * (end - start)) for start, end in ends))
    kernel, reach = (_fused_cubic, 2) if method == "bicubic" else (_triangle, 1)
    return ResizeWeights.of(size, _spans(size, target, kernel, np.float32(reach)))


def _triangle(x: np.ndarray) -> np.ndarray:
    return np.maximum(1 - x, 0)


def _cubic(x: np.ndarray) -> np.ndarray:
    a = -0.5
    near, far = ((a + 2.0) * x - (a + 3.0)) * x * x + 1, (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


def _fused_cubic(x: np.ndarray) -> np.ndarray:
    """Return the cubic kernel in float32.

    Each product and the following sum are rounded together, as in fused instructions.
    """
    square = _fused(1.5, x, -2.5) * x
    near = _fused(square, x, 1.0)
    far = _fused(_fused(_fused(-0.5, x, 2.5), x, -4.0), x, 2.0)
    return np.where(x < 1, near, np.where(x < 2, far, np.float32(0)))


def _fused(a: np.ndarray | float, b: np.ndarray, c: float) -> np.ndarray:
    return (np.asarray(a, np.float64) * b + c).astype(np.float32)
