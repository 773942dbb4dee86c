"""Camera frames by rule: the same bytes on every machine, and none of them stored."""

from __future__ import annotations

import numpy as np

NOISE_BITS = 6


def wave(height: int, width: int, level: float, x_period: float, y_period: float) -> np.ndarray:
    """Return waves from 0 to twice ``level``, float64 [height, width]; the periods are pixels of a radian."""
    y, x = np.ogrid[:height, :width]
    return level * (1 + np.sin(x / x_period) * np.cos(y / y_period))


def with_noise(picture: np.ndarray, seed: int, skip: int, word: int) -> np.ndarray:
    """Return a picture (float64 [height, width, 3], from 0 to 192, rounded down) under noise from 0 to 63, as uint8.

    The noise is the upper six bits of words of ``word`` bits (8 or 32) that PCG64 gives for ``seed``, after ``skip``
    such words: what ``integers(0, 64)`` of ``numpy.random.default_rng(seed)`` gave to those who recorded the golden
    cases. Numpy promises the words to be the same for ever; of ``integers`` it promises nothing.
    """
    raw = np.random.PCG64(seed).random_raw(-(-(skip + picture.size) * word // 64)).astype("<u8")
    noise = raw.view(f"<u{word // 8}")[skip : skip + picture.size] >> (word - NOISE_BITS)
    return np.floor(picture).astype(np.uint8) + noise.astype(np.uint8).reshape(picture.shape)


def grey_frame(camera: int, seed: int, skip: int, word: int) -> np.ndarray:
    """Draw the frame of a camera (0, 1, 2) as the cases of SmolVLA and pi have it, uint8 [480, 640, 3].

    ``skip`` counts from before the first camera's noise, which the others' follow.
    """
    grey = wave(480, 640, 96, 37 + 11 * camera, 53)
    picture = np.repeat(grey[..., None], 3, axis=2)
    return with_noise(picture, seed, skip + camera * picture.size, word)
