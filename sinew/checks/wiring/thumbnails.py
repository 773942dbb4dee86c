"""A camera's frame as eight by eight colours, and how far two of these are apart."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from sinew.bundle.schema import SIDE, Seen, SeenCamera, SeenState, cells

SAMPLES = 64  # rows and columns of a frame that are looked at, whatever its size
FLOOR = 4.0  # difference of cells, out of 255, that noise, compression and rounding explain
UNLIKE_FLOOR = 8.0  # the same, where frames are compared with all of the training data

# RGB to lightness, red less blue, and green less the mean of the two: BGR turns the second's sign, and nothing else.
OPPONENT = np.array([[1 / 3, 1 / 3, 1 / 3], [1.0, 0.0, -1.0], [-0.5, 1.0, -0.5]], np.float32)
_LIGHTNESS = np.array([1.0, 0.0, 0.0], np.float32)


def is_frame(frame: np.ndarray) -> bool:
    """Return True for numbers [height, width, 3] of a kind that a policy takes."""
    return frame.ndim == 3 and frame.shape[2] == 3 and frame.size > 0 and frame.dtype.kind in "uf"


def sample(frame: np.ndarray) -> np.ndarray:
    """Return float32 [64, 64, 3], 0 to 255, pixels of a frame of any size. frame: uint8, or floats in [0, 1]."""
    height, width = frame.shape[:2]
    middles = 2 * np.arange(SAMPLES) + 1
    rows, columns = middles * height // (2 * SAMPLES), middles * width // (2 * SAMPLES)
    found = frame[rows[:, None], columns].astype(np.float32)
    return found * np.float32(255) if frame.dtype.kind == "f" else found


def thumbnail(frame: np.ndarray) -> np.ndarray:
    """Return float32 [8, 8, 3] RGB, 0 to 255: the mean of each cell of a frame [height, width, 3]."""
    return _cells(sample(frame))


def _cells(pixels: np.ndarray) -> np.ndarray:
    of = SAMPLES // SIDE
    return pixels.reshape(SIDE, of, SIDE, of, 3).mean((1, 3))


def imprint(frame: np.ndarray) -> int:
    """Return a number that changes with any bit of a frame, nearly always."""
    return zlib.crc32(np.ascontiguousarray(frame).data)


def opponent(rgb: np.ndarray) -> np.ndarray:
    """Return [..., 3] lightness, red less blue, green less the mean of the two, of [..., 3] RGB."""
    return rgb @ OPPONENT.T


def distance(found: np.ndarray, mean: np.ndarray, spread: np.ndarray) -> float:
    """Return the mean square of what differs from ``mean``, in units of ``spread`` and a floor; all opponent.

    Before that the mean lightness is taken off, and the contrast is made to fit within a factor of two: rooms and
    exposures differ.
    """
    weights = 1.0 / (spread**2 + UNLIKE_FLOOR**2)
    cells, wanted = level(found), level(mean)
    size = float((weights * cells**2).sum())
    gain = float((weights * cells * wanted).sum()) / size if size else 1.0
    return float(np.mean(weights * (np.clip(gain, 0.5, 2.0) * cells - wanted) ** 2))


def level(cells: np.ndarray) -> np.ndarray:
    """Return opponent colours [..., 8, 8, 3] without their mean lightness."""
    return cells - cells.mean((-3, -2), keepdims=True) * _LIGHTNESS


def unpacked(text: str) -> np.ndarray:
    """Return float32 [8, 8, 3] of a thumbnail's text. Raises ValueError for what is none."""
    return np.frombuffer(cells(text), np.uint8).reshape(SIDE, SIDE, 3).astype(np.float32)


def _packed(numbers: np.ndarray) -> str:
    return base64.b64encode(numbers.round().clip(0, 255).astype(np.uint8).tobytes()).decode()


class Gathering:
    """Collects frames and states of the right robot, from which the record of a bundle is made."""

    def __init__(self) -> None:
        self._thumbnails: dict[str, list[np.ndarray]] = {}
        self._sums: dict[str, np.ndarray] = {}  # [2, 3] of pixels and their squares
        self._states: list[np.ndarray] = []
        self._runs: dict[
            str, tuple[int | None, int, int]
        ] = {}  # print of the last frame, its run, the longest
        self.frames = 0

    def add(self, images: Mapping[str, Any], state: Any) -> None:
        """Add one observation: frames uint8, or floats in [0, 1], [height, width, 3], and the state."""
        for name, frame in images.items():
            found = np.asarray(frame)
            pixels, last = sample(found), imprint(found)
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
        """Return the record. source: which frames these were, in words. Raises ValueError where nothing was added."""
        if not self.frames:
            raise ValueError("expected at least one observation")
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
