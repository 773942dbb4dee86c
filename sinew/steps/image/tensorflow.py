"""Resize and crop frames as TensorFlow does, in numpy, with equal float32 values.

Policies that were trained on RLDS data (OpenVLA and its descendants) use frames from ``tf.image.resize`` and
``tf.image.crop_and_resize``, at training and at inference.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from sinew.steps.image import compiled
from sinew.steps.image.compiled import Mixing, ResizeWeights, Size
from sinew.steps.image.resample import resample

F32 = np.float32
RADIUS = F32(3)
PI = F32(3.14159265359)


def resize_lanczos3(frame: np.ndarray, height: int, width: int) -> np.ndarray:
    """Compute ``tf.image.resize(frame, lanczos3, antialias)``: uint8 [h, w, 3] -> float32 [height, width, 3].

    Rows are resized first, then columns. Taps are added one after another in float32, without fused operations, because
    the last bit decides the rounding of a value. Source: TensorFlow, scale_and_translate_op.cc.
    """
    taps = ((axis, _taps(frame.shape[axis], target)) for axis, target in ((0, height), (1, width)))
    return resample(frame, taps)


def to_uint8(image: np.ndarray) -> np.ndarray:
    """Round floats in 0 .. 255 to the nearest uint8, halves to even, and clip them."""
    return np.clip(whole := np.rint(image), 0, 255, out=whole).astype(np.uint8)


@lru_cache(maxsize=64)
def _taps(size: int, target: int) -> ResizeWeights:
    scale = F32(target) / F32(size)
    inverse = F32(1) / scale
    kernel_scale = max(inverse, F32(1))
    shrink = F32(1) / kernel_scale
    centre = (np.arange(target, dtype=F32) + F32(0.5)) * inverse
    reach = RADIUS * kernel_scale
    first = np.clip(np.ceil(centre - reach - F32(0.5)), 0, size - 1).astype(np.int64)
    last = np.clip(np.floor(centre + reach - F32(0.5)), 0, size - 1).astype(np.int64)
    index = first[:, None] + np.arange((last - first).max() + 1)
    distance = np.abs((index.astype(F32) + F32(0.5) - centre[:, None]) * shrink)
    weights = np.where(index <= last[:, None], lanczos3(distance), F32(0))
    # Add the weights in order, as TensorFlow does.
    weights *= F32(1) / np.add.accumulate(weights, axis=1)[:, -1:]
    return ResizeWeights.of(
        size, ((low, row[: end - low + 1]) for low, end, row in zip(first, last, weights, strict=True))
    )


def lanczos3(x: np.ndarray) -> np.ndarray:
    """Return 3 sin(pi x) sin(pi x / 3) / (pi x)^2 for float32 x >= 0, and 0 for x > 3. Each operation is float32."""
    safe = np.maximum(x, F32(1e-3))
    angle = PI * safe
    value = RADIUS * sinf(angle) * sinf(angle / RADIUS) / (PI * PI * safe * safe)
    value = np.where(x <= F32(1e-3), F32(1), value)
    return np.where(x > RADIUS, F32(0), value)


def sinf(x: np.ndarray) -> np.ndarray:
    """Return the sine with the rounding of glibc's ``sinf``, float32, for float32 x in [0, 120).

    glibc's value can differ from the correctly rounded sine, and also from numpy's value. Source: ARM optimized
    routines, sincosf, whose double-precision polynomials glibc has used since 2.28. Whole quarter turns are subtracted,
    then sine or cosine is computed.
    """
    wide = x.astype(np.float64)
    turns = np.where(x < F32(np.pi / 4), 0, np.rint(wide * (2 / np.pi))).astype(np.int64)
    rest = wide - turns * float.fromhex("0x1.921FB54442D18p0")
    s1, s2, s3 = map(
        float.fromhex, ("-0x1.555545995a603p-3", "0x1.1107605230bc4p-7", "-0x1.994eb3774cf24p-13")
    )
    c1, c2 = map(float.fromhex, ("-0x1.ffffffd0c621cp-2", "0x1.55553e1068f19p-5"))
    c3, c4 = map(float.fromhex, ("-0x1.6c087e89a359dp-10", "0x1.99343027bf8c3p-16"))
    y = rest * rest
    cube, fourth = rest * y, y * y
    sine = (rest + cube * s1) + cube * y * (s2 + y * s3)
    cosine = ((1.0 + y * c1) + fourth * c2) + fourth * y * (c3 + y * c4)
    value = np.where(turns % 2 == 0, sine, cosine)
    return np.where(turns % 4 < 2, value, -value).astype(F32)


def centre_crop(frame: np.ndarray, area: float, height: int, width: int) -> np.ndarray:
    """Crop the middle of a frame and resize it: uint8 [h, w, 3] -> uint8 [height, width, 3].

    OpenVLA's ``crop_and_resize`` keeps the aspect ratio: each side of the box is the square root of ``area``, as a
    share of the frame's side.

    Args:
        frame: The frame.
        area: The area of the box, as a share of the frame's area, such as 0.9.
        height: Height of the result in pixels.
        width: Width of the result in pixels.
    """
    # The kernel does not support an axis with one target pixel, which has no distance between positions.
    if not compiled.take_bytes(frame) or 1 in (height, width):
        return crop_by_numpy(frame, area, height, width)
    mixing, past_y, past_x = crop_mixing(frame.shape[:2], area, (height, width))
    compiled.in_use[0].resize(frame, mixing, out := np.empty((height, width, 3), np.uint8))
    out[past_y], out[:, past_x] = 0, 0
    return out


@lru_cache(maxsize=64)
def crop_mixing(size: Size, area: float, target: Size) -> tuple[Mixing, np.ndarray, np.ndarray]:
    """Return the index and weight arrays for the kernel, and the target rows and columns outside of the frame."""
    (*rows, fy, past_y), (*columns, fx, past_x) = map(_corners, size, target, (area, area))
    return Mixing.of(size[1], rows, fy, columns, fx, 2), past_y, past_x


def crop_by_numpy(frame: np.ndarray, area: float, height: int, width: int) -> np.ndarray:
    """Compute :func:`centre_crop` with numpy. The compiled kernel gives the same bits."""
    # TensorFlow's ``tf.image.convert_image_dtype(image, uint8, saturate=True)`` is x * 255.5, truncated.
    return np.clip(crop_and_resize(frame, area, height, width) * F32(255.5), 0, 255).astype(np.uint8)


def crop_and_resize(frame: np.ndarray, area: float, height: int, width: int) -> np.ndarray:
    """Crop and resize to float32 [height, width, 3] in [0, 1], before rounding.

    The interpolation is bilinear between corner pixels, without antialiasing. Positions outside the frame are black,
    even if only rounding moves the last row of an uncropped frame outside. Source: TensorFlow, crop_and_resize_op.cc.
    """
    image = frame.astype(F32) * F32(1 / 255)
    y0, y1, fy, past_y = _corners(image.shape[0], height, area)
    x0, x1, fx, past_x = _corners(image.shape[1], width, area)
    fy, fx = fy[:, None, None], fx[None, :, None]
    left = image.take(x0, axis=1)
    across = left + (image.take(x1, axis=1) - left) * fx
    top, bottom = across.take(y0, axis=0), across.take(y1, axis=0)
    result = np.clip(top + (bottom - top) * fy, F32(0), F32(1))
    result[past_y], result[:, past_x] = F32(0), F32(0)
    return result


def _corners(size: int, target: int, area: float) -> tuple[np.ndarray, ...]:
    """Return the source pixels and weights of each target position along one axis.

    Returns:
        The lower and the upper neighbour, int64 [target], the weight of the upper neighbour, float32 [target], and
            whether the position is outside the frame, bool [target].
    """
    side = np.sqrt(F32(area))
    start = (F32(1) - side) / F32(2)
    scale = (start + side - start) * F32(size - 1) / F32(target - 1)
    position = start * F32(size - 1) + np.arange(target, dtype=F32) * scale
    past = (position < 0) | (position > F32(size - 1))
    position = np.clip(position, F32(0), F32(size - 1))
    low = np.floor(position)
    return low.astype(np.int64), np.ceil(position).astype(np.int64), position - low, past
