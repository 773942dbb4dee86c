"""Generate artificial camera frames from a formula. They have the same bytes on every machine, so no frame has to be
stored."""

from __future__ import annotations

import numpy as np

NOISE_BITS = 6


def wave(height: int, width: int, level: float, x_period: float, y_period: float) -> np.ndarray:
    """Return a picture of sine waves with values from 0 to twice ``level``, float64 [height, width].

    Args:
        height: Height in pixels.
        width: Width in pixels.
        level: Mean value.
        x_period: Pixels per radian along a row.
        y_period: Pixels per radian along a column.
    """
    y, x = np.ogrid[:height, :width]
    return level * (1 + np.sin(x / x_period) * np.cos(y / y_period))


def with_noise(picture: np.ndarray, seed: int, skip: int, word: int) -> np.ndarray:
    """Add noise from 0 to 63 to a picture.

    The noise is the upper six bits of each random word, as ``numpy.random.default_rng(seed).integers(0, 64)`` computed
    it when the golden cases were recorded. NumPy guarantees that PCG64 always gives the same random words, but does not
    guarantee the results of ``integers``.

    Args:
        picture: float64 [height, width, 3], values from 0 to 192. They are rounded down.
        seed: Seed of PCG64.
        skip: Number of random words to skip.
        word: Bits of a random word, 8 or 32.

    Returns:
        uint8 [height, width, 3].
    """
    raw = np.random.PCG64(seed).random_raw(-(-(skip + picture.size) * word // 64)).astype("<u8")
    noise = raw.view(f"<u{word // 8}")[skip : skip + picture.size] >> (word - NOISE_BITS)
    return np.floor(picture).astype(np.uint8) + noise.astype(np.uint8).reshape(picture.shape)


def grey_frame(camera: int, seed: int, skip: int, word: int) -> np.ndarray:
    """Generate the frame of a camera, as in the golden cases of SmolVLA and pi, uint8 [480, 640, 3].

    Args:
        camera: Index of the camera (0, 1 or 2).
        seed: Seed of the noise.
        skip: Number of random words before the noise of camera 0. The noise of the other cameras follows.
        word: Bits of a random word, 8 or 32.
    """
    grey = wave(480, 640, 96, 37 + 11 * camera, 53)
    picture = np.repeat(grey[..., None], 3, axis=2)
    return with_noise(picture, seed, skip + camera * picture.size, word)
