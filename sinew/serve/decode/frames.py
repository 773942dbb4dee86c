"""Camera frames from untrusted bytes: raw pixels, or a JPEG or PNG file.

Every size is checked before memory is allocated for it. Errors are :class:`ObservationError`, which name the frame, the
expected value and the received value.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable

import numpy as np
from PIL import Image

from sinew.core import MAX_SIZE, ObservationError, PolicySpec, SinewError

MAX_IMAGES = 16
# All frames of one request together may have this many pixels, even for a policy with small cameras.
MIN_BUDGET = 16 << 20
# Largest number of pixels of a request, relative to the pixels of the policy's cameras. A robot's frames may be
# four times as wide and high as the policy's frames.
BUDGET_FACTOR = 16
# Largest number of scans of a JPEG file, because each scan takes work for every pixel. Progressive files have
# about ten scans.
MAX_SCANS = 32
BLOCK = 1 << 14  # bytes of a file that are decoded between two checks for a disconnected client

# Pillow's modes of 8-bit JPEG and PNG files. 16-bit modes are not allowed, because their conversion
# would clip values.
_MODES = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr"})


def pixel_limit(spec: PolicySpec) -> int:
    """Return the largest number of pixels of all frames of one request together, for a policy."""
    return max(MIN_BUDGET, BUDGET_FACTOR * sum(camera.height * camera.width for camera in spec.cameras))


def _always() -> None: ...


class PixelBudget:
    """The count of the pixels of one request, so that many small files cannot decode to gigabytes.

    Args:
        limit: Largest number of pixels.
        check: Raises an error once no client waits for the pixels. Decoders call this function repeatedly.

    Attributes:
        borrowed: Raises an error if frames in shared memory were changed; None without such frames.
    """

    def __init__(self, limit: int = MIN_BUDGET, check: Callable[[], None] = _always):
        self._limit = self._left = limit
        self.check = check
        self.borrowed: Callable[[], None] | None = None

    def again(self) -> PixelBudget:
        """Return a new budget with the same limit, to count the same frames a second time."""
        return PixelBudget(self._limit, self.check)

    def take(self, name: str, height: int, width: int) -> None:
        """Check and count the size of a frame, before its pixels are read.

        Args:
            name: Name of the frame, for errors.
            height: Height in pixels.
            width: Width in pixels.

        Raises:
            ObservationError: The size is not valid, or all frames together exceed the budget.
        """
        self.check()
        if not (1 <= height <= MAX_SIZE and 1 <= width <= MAX_SIZE):
            raise ObservationError(
                name, f"height and width from 1 to {MAX_SIZE}", f"height {height}, width {width}"
            )
        self._left -= height * width
        if self._left < 0:
            raise ObservationError(
                "images",
                f"at most {self._limit} pixels in all frames together",
                f"more, counted up to {name}; send smaller frames",
            )


def raw_frame(
    name: str, data: bytes | memoryview, height: int, width: int, dtype: str, budget: PixelBudget
) -> np.ndarray:
    """Return raw pixels as a read-only view, [height, width, 3].

    Args:
        name: Name of the frame, for errors.
        data: The pixels.
        height: Height in pixels.
        width: Width in pixels.
        dtype: "u1" for bytes, or "<f4" for floats in [0, 1].
        budget: Budget of pixels.

    Raises:
        ObservationError: The number of bytes does not fit, or the budget is exceeded.
    """
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
    """Decode a JPEG or PNG file to uint8 [height, width, 3] RGB. Orientation tags are not applied.

    Args:
        name: Name of the frame, for errors.
        data: The file.
        budget: Budget of pixels.
        size: Height and width that the file must have, in RGB; None allows any size and mode.

    Raises:
        ObservationError: The file does not decode, has another size, or exceeds the budget.
    """
    scans = _scans(data)
    if scans > MAX_SCANS:
        raise ObservationError(name, f"a JPEG file of at most {MAX_SCANS} scans", f"{scans}")
    try:
        # Disable Pillow's warning about large images, because the budget limits their size.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            # Image.open() reads only the header.
            image = Image.open(_Watched(data, budget.check), formats=("JPEG", "PNG"))
        width, height = image.size
        if size is not None and (height, width, image.mode) != (*size, "RGB"):
            got = f"{height} x {width}, {image.mode}"
            raise ObservationError(name, f"a file of {size[0]} x {size[1]} pixels in RGB", got)
        budget.take(name, height, width)
        if image.mode not in _MODES:
            raise ObservationError(name, "an 8-bit image", f"an image of Pillow's mode {image.mode}")
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
    """A file in memory that checks at each read whether a client still waits for the result, and raises an error if no
    client waits.
    """

    def __init__(self, data: bytes | memoryview, check: Callable[[], None]):
        super().__init__(data)
        self._check = check

    def read(self, size: int | None = -1, /) -> bytes:
        self._check()
        return super().read(size)


def _scans(data: bytes | memoryview) -> int:
    """Return the number of SOS markers ("start of scan") in a JPEG file; 0 for other files. The number is at least the
    number of the file's scans.
    """
    if bytes(data[:2]) != b"\xff\xd8":
        return 0
    count = at = 0
    content = bytes(data)
    while count <= MAX_SCANS and (at := content.find(b"\xff\xda", at)) >= 0:
        count, at = count + 1, at + 2
    return count
