"""Camera frames from untrusted bytes: raw pixels, or a JPEG or PNG file.

Every size is checked before memory is taken for it. Errors are :class:`ObservationError` and name the
frame, what was expected and what came.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable

import numpy as np
from PIL import Image

from sinew.core import MAX_SIZE, ObservationError, PolicySpec, SinewError

MAX_IMAGES = 16
MIN_BUDGET = 16 << 20  # pixels of one request, all frames together, for any cameras;
# and so many times as many as the policy's cameras have: a robot may send four times as wide
BUDGET_FACTOR = 16
MAX_SCANS = 32  # most scans of a JPEG file; progressive ones have about ten, each with work for every pixel
BLOCK = 1 << 14  # bytes of a file that are decoded between two checks whether a client still waits

# What 8-bit JPEG and PNG files decode to. 16-bit modes are not here: converting them clips.
_MODES = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr"})


def pixel_limit(spec: PolicySpec) -> int:
    """How many pixels one request for this policy may have, all frames together."""
    return max(MIN_BUDGET, BUDGET_FACTOR * sum(camera.height * camera.width for camera in spec.cameras))


def _always() -> None: ...


class PixelBudget:
    """Counts the pixels of one request, so that many small files cannot decode to gigabytes.

    Args:
        limit: Largest number of pixels.
        check: Raises an error once no client waits for the pixels. Decoders call it now and then.

    Attributes:
        borrowed: Raises an error if frames in shared memory were changed; None without such frames.
    """

    def __init__(self, limit: int = MIN_BUDGET, check: Callable[[], None] = _always):
        self._limit = self._left = limit
        self.check = check
        self.borrowed: Callable[[], None] | None = None

    def again(self) -> PixelBudget:
        """The same limit for a second look at the same frames."""
        return PixelBudget(self._limit, self.check)

    def take(self, name: str, height: int, width: int) -> None:
        """Check one frame's size, before its pixels are read."""
        self.check()
        if not (1 <= height <= MAX_SIZE and 1 <= width <= MAX_SIZE):
            raise ObservationError(
                name, f"height and width from 1 to {MAX_SIZE}", f"height {height}, width {width}"
            )
        self._left -= height * width
        if self._left < 0:
            raise ObservationError(
                "images", f"at most {self._limit} pixels in all frames together", f"more, up to {name}"
            )


def raw_frame(
    name: str, data: bytes | memoryview, height: int, width: int, dtype: str, budget: PixelBudget
) -> np.ndarray:
    """``data`` as [height, width, 3] of ``dtype`` ("u1", or "<f4" in [0, 1]); no copy, read-only."""
    budget.take(name, height, width)
    item = np.dtype(dtype)
    expected = height * width * 3 * item.itemsize
    if len(data) != expected:
        raise ObservationError(
            name, f"{expected} bytes ({height} x {width} x 3 {item.name})", f"{len(data)} bytes"
        )
    return np.frombuffer(data, item).reshape(height, width, 3)


def compressed_frame(
    name: str, data: bytes | memoryview, budget: PixelBudget, size: tuple[int, int] | None = None
) -> np.ndarray:
    """A JPEG or PNG file as uint8 [height, width, 3] RGB. Orientation tags are not applied. size: the height and width
    that its header has to state, and three colours with them; None: any."""
    scans = _scans(data)
    if scans > MAX_SCANS:
        raise ObservationError(name, f"a JPEG file of at most {MAX_SCANS} scans", f"{scans}")
    try:
        with warnings.catch_warnings():  # Pillow warns of large images; the budget decides here
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            # reads the header only
            image = Image.open(_Watched(data, budget.check), formats=("JPEG", "PNG"))
        width, height = image.size
        if size is not None and (height, width, image.mode) != (*size, "RGB"):
            got = f"{height} x {width}, {image.mode}"
            raise ObservationError(name, f"a file of {size[0]} x {size[1]} pixels in RGB", got)
        budget.take(name, height, width)
        if image.mode not in _MODES:
            raise ObservationError(name, "an 8-bit image", f"one of Pillow's mode {image.mode}")
        image.decodermaxblock = BLOCK
        return np.asarray(image.convert("RGB"))
    except SinewError:
        raise
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise ObservationError(
            name, "a JPEG or PNG file", f"{len(data)} bytes that do not decode ({reason})"
        ) from error


class _Watched(io.BytesIO):
    """A file whose reading raises an error once no client waits for it."""

    def __init__(self, data: bytes | memoryview, check: Callable[[], None]):
        super().__init__(data)
        self._check = check

    def read(self, size: int | None = -1, /) -> bytes:
        self._check()
        return super().read(size)


def _scans(data: bytes | memoryview) -> int:
    """At least as many as a JPEG file's scans: its markers SOS. 0 for other files."""
    if bytes(data[:2]) != b"\xff\xd8":
        return 0
    found = at = 0
    content = bytes(data)
    while found <= MAX_SCANS and (at := content.find(b"\xff\xda", at)) >= 0:
        found, at = found + 1, at + 2
    return found
