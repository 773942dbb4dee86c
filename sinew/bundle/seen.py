"""What the cameras and joints of the training data looked like, by which a wrongly wired robot is found.

Small on purpose: eight by eight cells of a camera tell its place, which way up it is and the order of its colours, and
nothing of what was in the room.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated

from sinew_client.given import named

from sinew.core.fields import Finite, Must, NotBelowZero, printable, within

if TYPE_CHECKING:
    from sinew.core import PolicySpec

SIDE = 8  # cells of a thumbnail, in both directions
CELLS = SIDE * SIDE * 3
MAX_SOURCE = 256  # characters
Colour = Annotated[float, Must("a number from 0 to 255", lambda value: 0 <= value <= 255)]


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


def _no_thumbnail(text: str) -> str:
    """Return why a text is no thumbnail; "" where it is one, or empty."""
    try:
        return "" if not text or cells(text) else "nothing"
    except ValueError as error:
        return str(error)


Thumbnail = Annotated[
    str, Must(f"base64 of {CELLS} bytes", lambda text: not _no_thumbnail(text), _no_thumbnail)
]


@dataclass(frozen=True)
class SeenCamera:
    """One camera over all frames. mean, std: of its pixels, three channels RGB, 0 to 255.

    thumbnail: base64 of uint8 [8, 8, 3], the mean of each cell over the frames, RGB. spread: base64 of uint8 [8, 8, 3],
    the standard deviation of each cell from frame to frame, in lightness, red less blue, and green less the mean of the
    two. Both are empty where only the pixels' statistics are known. farthest: the largest distance of a frame from the
    mean, in units of the spread (:func:`sinew.processing.thumbnails.distance`). still: the longest run of frames
    that were the same to the bit, as those of a simulator are; a real camera's noise makes it 1. 0: not known.
    """

    mean: tuple[Colour, Colour, Colour]
    std: tuple[Colour, Colour, Colour]
    thumbnail: Thumbnail = ""
    spread: Thumbnail = ""
    farthest: NotBelowZero = 0.0
    still: int = 0

    def problems(self) -> Iterator[str]:
        """Yield a picture without its other half."""
        if bool(self.thumbnail) != bool(self.spread):
            yield f"{'thumbnail' if self.spread else 'spread'}: expected both thumbnail and spread, or neither, got ''"


@dataclass(frozen=True)
class SeenState:
    """The state as the robot gives it, D numbers each, in its own units."""

    mean: tuple[Finite, ...]
    std: tuple[NotBelowZero, ...]
    low: tuple[Finite, ...]
    high: tuple[Finite, ...]

    def problems(self) -> Iterator[str]:
        """Yield where a range is upside down."""
        if any(low > high for low, high in zip(self.low, self.high, strict=False)):
            yield "low: expected at most high, got more"


@dataclass(frozen=True)
class Seen:
    """source: which frames, in words. frames: how many. cameras: by the names of the bundle's cameras."""

    source: Annotated[str, printable(0, MAX_SOURCE)]
    frames: Annotated[int, within(1, 1 << 53)]
    cameras: dict[str, SeenCamera] = field(default_factory=dict)
    state: SeenState | None = None

    def problems(self) -> Iterator[str]:
        """Yield runs that are longer than all frames together."""
        for name, camera in self.cameras.items():
            if not 0 <= camera.still <= self.frames:
                yield f"cameras.{named(name)}.still: expected 0 to {self.frames}, got {camera.still}"


def renamed(seen: Seen | None, before: PolicySpec, after: PolicySpec) -> Seen | None:
    """Return the record with the cameras' names of ``after``, which has those of ``before`` in the same order."""
    if seen is None:
        return None
    names: Mapping[str, str] = {
        old.name: new.name for old, new in zip(before.cameras, after.cameras, strict=True)
    }
    return replace(seen, cameras={names[name]: camera for name, camera in seen.cameras.items()})
