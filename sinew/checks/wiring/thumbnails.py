"""Reduce a camera's frame to a thumbnail of 8 x 8 colours, and measure the distance of two thumbnails."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from sinew.bundle.schema import SIDE, Seen, SeenCamera, SeenState, cells

SAMPLES = 64  # a frame of any size is sampled at this many rows and columns
FLOOR = 4.0  # noise, compression and rounding may change a cell by this much, out of 255
UNLIKE_FLOOR = 8.0  # like FLOOR, but for the comparison of a frame with all training frames

# Converts RGB to three numbers: lightness, red minus blue, and green minus the mean of red and blue. For BGR frames
# only the sign of the second number changes.
OPPONENT = np.array([[1 / 3, 1 / 3, 1 / 3], [1.0, 0.0, -1.0], [-0.5, 1.0, -0.5]], np.float32)
_LIGHTNESS = np.array([1.0, 0.0, 0.0], np.float32)


def is_frame(frame: np.ndarray) -> bool:
    """Return True for an array [height, width, 3] of a number type that a policy accepts."""
    return frame.ndim == 3 and frame.shape[2] == 3 and frame.size > 0 and frame.dtype.kind in "uf"


def sample(frame: np.ndarray) -> np.ndarray:
    """Sample a frame of any size at 64 x 64 pixels.

    Args:
        frame: uint8, or floats in [0, 1], [height, width, 3].

    Returns:
        The pixels, float32 [64, 64, 3], 0 to 255.
    """
    height, width = frame.shape[:2]
    middles = 2 * np.arange(SAMPLES) + 1
    rows, columns = middles * height // (2 * SAMPLES), middles * width // (2 * SAMPLES)
    pixels = frame[rows[:, None], columns].astype(np.float32)
    return pixels * np.float32(255) if frame.dtype.kind == "f" else pixels


def thumbnail(frame: np.ndarray) -> np.ndarray:
    """Return the mean of each cell of a frame [height, width, 3], RGB, float32 [8, 8, 3], 0 to 255."""
    return _cells(sample(frame))


def _cells(pixels: np.ndarray) -> np.ndarray:
    of = SAMPLES // SIDE
    return pixels.reshape(SIDE, of, SIDE, of, 3).mean((1, 3))


def imprint(frame: np.ndarray) -> int:
    """Return a checksum of a frame, to detect that any bit has changed."""
    return zlib.crc32(np.ascontiguousarray(frame).data)


def opponent(rgb: np.ndarray) -> np.ndarray:
    """Convert RGB [..., 3] to opponent colours [..., 3]: lightness, red minus blue, and green minus the mean of red and
    blue.
    """
    return rgb @ OPPONENT.T


def distance(frame: np.ndarray, mean: np.ndarray, spread: np.ndarray) -> float:
    """Return the mean squared difference of a thumbnail from the training data. The squared difference of each cell is
    divided by the cell's variance in training plus the square of UNLIKE_FLOOR.

    Rooms and exposures differ. Before the comparison, the mean lightness is removed, and the contrast is adapted within
    a factor of two.

    Args:
        frame: The thumbnail in opponent colours, [8, 8, 3].
        mean: Mean of the training data, [8, 8, 3].
        spread: Standard deviation of the training data, [8, 8, 3].
    """
    weights = 1.0 / (spread**2 + UNLIKE_FLOOR**2)
    cells, expected = level(frame), level(mean)
    size = float((weights * cells**2).sum())
    gain = float((weights * cells * expected).sum()) / size if size else 1.0
    return float(np.mean(weights * (np.clip(gain, 0.5, 2.0) * cells - expected) ** 2))


def level(cells: np.ndarray) -> np.ndarray:
    """Subtract the mean lightness of a thumbnail from opponent colours [..., 8, 8, 3], and return the result."""
    return cells - cells.mean((-3, -2), keepdims=True) * _LIGHTNESS


def unpacked(text: str) -> np.ndarray:
    """Decode a thumbnail that a bundle stores as text, to float32 [8, 8, 3].

    Raises:
        ValueError: The text is not a thumbnail.
    """
    return np.frombuffer(cells(text), np.uint8).reshape(SIDE, SIDE, 3).astype(np.float32)


def _packed(numbers: np.ndarray) -> str:
    return base64.b64encode(numbers.round().clip(0, 255).astype(np.uint8).tobytes()).decode()


class Gathering:
    """Collects frames and states of the right robot, from which the record of a bundle is made."""

    def __init__(self) -> None:
        self._thumbnails: dict[str, list[np.ndarray]] = {}
        # Key: camera. Value: sums over all frames, [2, 3]: the mean of each colour, and the mean of its square.
        self._sums: dict[str, np.ndarray] = {}
        self._states: list[np.ndarray] = []
        # Key: camera. Value: checksum of the last frame, number of equal frames in a row up to this frame, and the
        # largest such number so far.
        self._runs: dict[str, tuple[int | None, int, int]] = {}
        self.frames = 0

    def add(self, images: Mapping[str, Any], state: Any) -> None:
        """Add one observation: frames [height, width, 3], uint8 or floats in [0, 1], and the state."""
        for name, frame in images.items():
            array = np.asarray(frame)
            pixels, last = sample(array), imprint(array)
            before, run, longest = self._runs.get(name, (None, 0, 0))
            run = run + 1 if last == before else 1
            self._runs[name] = last, run, max(run, longest)
            flat = pixels.reshape(-1, 3).astype(np.float64)
            sums = np.stack([flat.mean(0), (flat**2).mean(0)])
            self._sums[name] = self._sums.get(name, 0) + sums
            self._thumbnails.setdefault(name, []).append(_cells(pixels).round().astype(np.uint8))
        self._states.append(np.asarray(state, np.float64).reshape(-1))
        self.frames += 1

    def seen(self, source: str) -> Seen:
        """Return the record of the collected frames and states.

        Args:
            source: Description of the origin of the frames.

        Raises:
            ValueError: No observation was added.
        """
        if not self.frames:
            raise ValueError("expected at least one observation; call `add` first")
        states = np.stack(self._states)
        rows = (states.mean(0), states.std(0), states.min(0), states.max(0))
        mean, std, low, high = (tuple(float(f"{x:.6g}") for x in row) for row in rows)
        cameras = {name: self._camera(name) for name in self._thumbnails}
        return Seen(source, self.frames, cameras, SeenState(mean, std, low, high))

    def _camera(self, name: str) -> SeenCamera:
        frames = np.stack(self._thumbnails[name]).astype(np.float32)  # [n, 8, 8, 3]
        mean, squares = self._sums[name] / len(frames)
        std = np.sqrt(np.maximum(squares - mean**2, 0.0))
        thumb, turned = frames.mean(0), opponent(frames)
        spread = turned.std(0)
        farthest = max(distance(frame, turned.mean(0), spread) for frame in turned)
        first, second = (tuple(float(f"{x:.5g}") for x in row) for row in (mean, std))
        return SeenCamera(
            first,  # type: ignore[arg-type]
            second,  # type: ignore[arg-type]
            _packed(thumb),
            _packed(spread),
            float(f"{farthest:.4g}"),
            self._runs[name][2],
        )
