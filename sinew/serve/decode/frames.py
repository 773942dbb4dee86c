"""Camera frames from untrusted bytes: raw pixels, or a JPEG or PNG file.

Every size is checked before memory is taken for it. Errors are :class:`ObservationError` and name the
frame, what was expected and what came.
"""

from __future__ import annotations

import io
import warnings

import numpy as np
from PIL import Image

from sinew.core import ObservationError

MAX_IMAGES = 16
MAX_SIDE = 8192  # pixels
MAX_PIXELS = MAX_SIDE * MAX_SIDE  # of one request, all frames together: 192 MiB of RGB

# What 8-bit JPEG and PNG files decode to. 16-bit modes are not here: converting them clips.
_MODES = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr"})


class PixelBudget:
    """Counts the pixels of one request, so that many small files cannot decode to gigabytes."""

    def __init__(self, limit: int = MAX_PIXELS):
        self._left = limit

    def take(self, name: str, height: int, width: int) -> None:
        """Check one frame's size, before its pixels are read."""
        if not (1 <= height <= MAX_SIDE and 1 <= width <= MAX_SIDE):
            raise ObservationError(
                name, f"height and width from 1 to {MAX_SIDE}", f"height {height}, width {width}"
            )
        self._left -= height * width
        if self._left < 0:
            raise ObservationError(
                "images", f"at most {MAX_PIXELS} pixels in all frames together", f"more, up to {name}"
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


def compressed_frame(name: str, data: bytes | memoryview, budget: PixelBudget) -> np.ndarray:
    """A JPEG or PNG file as uint8 [height, width, 3] RGB. Orientation tags are not applied."""
    try:
        with warnings.catch_warnings():  # Pillow warns of large images; the budget decides here
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data), formats=("JPEG", "PNG"))  # reads the header only
        width, height = image.size
        budget.take(name, height, width)
        if image.mode not in _MODES:
            raise ObservationError(name, "an 8-bit image", f"one of Pillow's mode {image.mode}")
        return np.asarray(image.convert("RGB"))
    except ObservationError:
        raise
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise ObservationError(
            name, "a JPEG or PNG file", f"{len(data)} bytes that do not decode ({reason})"
        ) from error
