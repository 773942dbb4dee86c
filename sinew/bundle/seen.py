"""What the cameras and joints of the training data looked like, by which a wrongly wired robot is found.

Small on purpose: eight by eight cells of a camera tell its place, which way up it is and the order of its colours, and
nothing of what was in the room.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sinew.core import PolicySpec

SIDE = 8  # cells of a thumbnail, in both directions
CELLS = SIDE * SIDE * 3
MAX_SOURCE = 256  # characters


@dataclass(frozen=True)
class SeenCamera:
    """One camera over all frames. mean, std: of its pixels, three channels RGB, 0 to 255.

    thumbnail: base64 of uint8 [8, 8, 3], the mean of each cell over the frames, RGB. spread: base64 of uint8 [8, 8, 3],
    the standard deviation of each cell from frame to frame, in lightness, red less blue, and green less the mean of the
    two. Both are empty where only the pixels' statistics are known. farthest: the largest distance of a frame from the
    mean, in units of the spread (:func:`sinew.processing.thumbnails.distance`). still: the longest run of frames
    that were the same to the bit, as those of a simulator are; a real camera's noise makes it 1. 0: not known.
    """

    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    thumbnail: str = ""
    spread: str = ""
    farthest: float = 0.0
    still: int = 0


@dataclass(frozen=True)
class SeenState:
    """The state as the robot gives it, D numbers each, in its own units."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True)
class Seen:
    """source: which frames, in words. frames: how many. cameras: by the names of the bundle's cameras."""

    source: str
    frames: int
    cameras: dict[str, SeenCamera] = field(default_factory=dict)
    state: SeenState | None = None


def cells(text: str) -> bytes:
    """Return the bytes of a thumbnail. Raises ValueError for what is none."""
    if len(text) > 2 * CELLS:
        raise ValueError(f"{len(text)} characters")
    try:
        found = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"not base64 ({error})") from None
    if len(found) != CELLS:
        raise ValueError(f"{len(found)} bytes")
    return found


def seen_problems(seen: Seen, spec: PolicySpec) -> Iterator[str]:
    """Yield what is wrong with the record, each with its field."""
    names = {camera.name for camera in spec.cameras}
    if not (len(seen.source) <= MAX_SOURCE and seen.source.isprintable()):
        yield f"seen.source: expected at most {MAX_SOURCE} printable characters"
    if not 1 <= seen.frames <= 1 << 53:
        yield f"seen.frames: expected at least 1, got {seen.frames}"
    for name, camera in seen.cameras.items():
        where = f"seen.cameras.{name}" if name in names else "seen.cameras"
        if name not in names:
            yield f"{where}: expected names of spec.cameras, got another one"
        if not all(math.isfinite(x) and 0 <= x <= 255 for x in (*camera.mean, *camera.std)):
            yield f"{where}: mean, std: expected numbers from 0 to 255"
        if not (math.isfinite(camera.farthest) and camera.farthest >= 0):
            yield f"{where}.farthest: expected a number of at least 0"
        if not 0 <= camera.still <= seen.frames:
            yield f"{where}.still: expected 0 to the number of frames"
        if bool(camera.thumbnail) != bool(camera.spread):
            yield f"{where}: expected thumbnail and spread, or neither"
        for part in ("thumbnail", "spread"):
            try:
                if text := getattr(camera, part):
                    cells(text)
            except ValueError as error:
                yield f"{where}.{part}: expected base64 of {CELLS} bytes, got {error}"
    if (state := seen.state) is not None:
        rows = (state.mean, state.std, state.low, state.high)
        if any(len(row) != spec.state.dim for row in rows):
            yield f"seen.state: expected {spec.state.dim} numbers each"
        elif not all(math.isfinite(x) for row in rows for x in row):
            yield "seen.state: expected finite numbers"
        elif any(
            std < 0 or low > high for std, low, high in zip(state.std, state.low, state.high, strict=True)
        ):
            yield "seen.state: expected std of at least 0, and low up to high"


def renamed(seen: Seen | None, before: PolicySpec, after: PolicySpec) -> Seen | None:
    """Return the record with the cameras' names of ``after``, which has those of ``before`` in the same order."""
    if seen is None:
        return None
    names: Mapping[str, str] = {
        old.name: new.name for old, new in zip(before.cameras, after.cameras, strict=True)
    }
    return replace(seen, cameras={names[name]: camera for name, camera in seen.cameras.items()})
