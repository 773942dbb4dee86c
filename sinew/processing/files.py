"""An observation from files and texts: frames of pictures, numbers of a list."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from sinew_client.untrusted import open_regular

from sinew.core import ObservationError, PolicySpec


def read_images(arguments: Sequence[str], spec: PolicySpec) -> dict[str, np.ndarray]:
    """Return camera -> uint8 [height, width, 3] of ``CAMERA=FILE``, each once, or of a bare file where the policy has a
    single camera. Raises :class:`ObservationError`."""
    images = {}
    for argument in arguments:
        camera, separator, name = argument.partition("=")
        if not separator:
            if len(spec.cameras) != 1:
                cameras = ", ".join(slot.name for slot in spec.cameras)
                raise ObservationError("--image", f"CAMERA=FILE with a camera of {cameras}", repr(argument))
            camera, name = spec.cameras[0].name, argument
        if camera in images:
            raise ObservationError("--image", "each camera once", f"{camera!r} twice")
        images[camera] = read_image(Path(name), f"images.{camera}")
    return images


def read_image(path: Path, field: str) -> np.ndarray:
    """Return a picture as uint8 RGB [height, width, 3], turned upright by its EXIF data.

    Raises :class:`ObservationError` for a file that is not an image.
    """
    from PIL import Image, ImageOps

    try:
        with open_regular(path) as file, Image.open(file) as picture:
            return np.asarray(ImageOps.exif_transpose(picture).convert("RGB"))
    except FileNotFoundError:
        raise ObservationError(field, "an image file", f"{path}, which does not exist") from None
    # Pillow's decoders raise more than OSError for damaged files.
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ObservationError(field, "an image file", f"{path}, which does not decode: {error}") from None


def parse_vector(field: str, text: str) -> np.ndarray:
    """Return float32 [n] of numbers with commas or spaces in between. Raises :class:`ObservationError`."""
    # Brackets are what copying a list from Python or JSON brings along.
    parts = text.strip().removeprefix("[").removesuffix("]").replace(",", " ").split()
    for part in parts:
        try:
            float(part)
        except ValueError:
            raise ObservationError(field, "numbers separated by commas, as 0,-45,60", repr(part)) from None
    return np.array([float(part) for part in parts], dtype=np.float32)
