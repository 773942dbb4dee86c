"""Read the parts of an observation that a user passes on the command line: frames from image files, and vectors from
a text with numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from sinew_client.untrusted import open_regular

from sinew.core import ObservationError, PolicySpec


def read_images(arguments: Sequence[str], spec: PolicySpec) -> dict[str, np.ndarray]:
    """Read image files. Return a dict: name of the camera -> frame, uint8 [height, width, 3].

    Args:
        arguments: ``CAMERA=FILE``, each camera once. For a policy with one camera, a file name alone is enough.
        spec: The policy's specification.

    Raises:
        ObservationError: An argument does not name a camera, or a file is not a picture.
    """
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
    """Read a picture as uint8 RGB [height, width, 3], turned upright by its EXIF data.

    Raises:
        ObservationError: The file is not an image.
    """
    from PIL import Image, ImageOps

    try:
        with open_regular(path) as file, Image.open(file) as picture:
            return np.asarray(ImageOps.exif_transpose(picture).convert("RGB"))
    except FileNotFoundError:
        raise ObservationError(field, "an image file", f"{path}, which does not exist") from None
    # Pillow's decoders raise other errors than OSError too for damaged files.
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ObservationError(field, "an image file", f"{path}, which does not decode: {error}") from None


def parse_vector(field: str, text: str) -> np.ndarray:
    """Parse numbers that are separated by commas or spaces, float32 [n].

    Raises:
        ObservationError: A part of the text is not a number.
    """
    # Remove brackets, because users copy lists from Python or JSON.
    parts = text.strip().removeprefix("[").removesuffix("]").replace(",", " ").split()
    for part in parts:
        try:
            float(part)
        except ValueError:
            raise ObservationError(
                field, "numbers separated by commas, such as 0,-45,60", repr(part)
            ) from None
    return np.array([float(part) for part in parts], dtype=np.float32)
