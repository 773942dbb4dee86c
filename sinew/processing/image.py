"""Camera frame to pixels: the resize of the training pipeline, reproduced to float32 rounding."""

from __future__ import annotations

import numpy as np

from sinew.bundle.schema import ImageRecipe
from sinew.core import ObservationError

MAX_SIDE = 8192


def check_frame(frame: object, name: str, recipe: ImageRecipe) -> None:
    """Raise :class:`ObservationError` unless ``frame`` is an RGB image that the recipe can take."""
    if not isinstance(frame, np.ndarray):
        raise ObservationError(name, "a numpy array [height, width, 3]", type(frame).__name__)
    if frame.dtype not in (np.uint8, np.float32):
        raise ObservationError(name, "uint8 (or float32 in [0, 1])", f"dtype {frame.dtype}")
    if frame.ndim != 3 or frame.shape[2] != 3:
        hint = ""
        if frame.ndim == 3 and frame.shape[0] == 3:
            hint = " (channels first? transpose it to channels last)"
        raise ObservationError(name, "an RGB image [height, width, 3]", f"shape {list(frame.shape)}{hint}")
    height, width = frame.shape[:2]
    if not (1 <= height <= MAX_SIDE and 1 <= width <= MAX_SIDE):
        raise ObservationError(name, f"sides of 1 to {MAX_SIDE} pixels", f"{height} x {width}")
    if recipe.resize == "none" and (height, width) != (recipe.height, recipe.width):
        raise ObservationError(name, f"exactly {recipe.height} x {recipe.width}", f"{height} x {width}")
    if frame.dtype == np.float32:
        # min and max are NaN when any pixel is, and NaN fails both comparisons.
        low, high = float(frame.min()), float(frame.max())
        if not (low >= 0.0 and high <= 1.0):
            raise ObservationError(name, "finite float pixels in [0, 1]", f"values from {low} to {high}")


def prepare_frame(frame: np.ndarray, recipe: ImageRecipe) -> np.ndarray:
    """uint8 or float32 [height, width, 3] -> float32 [3, recipe.height, recipe.width], normalised."""
    if recipe.resize == "letterbox" and recipe.interpolation == "pil_bilinear":
        frame = letterbox_pil(frame if frame.dtype == np.uint8 else (frame * 255).astype(np.uint8), recipe)
    image = frame.astype(np.float32) / np.float32(255) if frame.dtype == np.uint8 else frame
    if recipe.resize == "letterbox":
        image = letterbox(image, recipe)
    mean, std = np.asarray(recipe.mean, np.float32), np.asarray(recipe.std, np.float32)
    return np.ascontiguousarray(((image - mean) / std).transpose(2, 0, 1))


def empty_frame(recipe: ImageRecipe) -> np.ndarray:
    """What the model sees for a camera that is not there: black before normalisation."""
    return prepare_frame(np.zeros((recipe.height, recipe.width, 3), np.float32), recipe)


def letterbox(image: np.ndarray, recipe: ImageRecipe) -> np.ndarray:
    """Resize keeping the aspect ratio, then pad. float32 [h, w, 3] -> float32 [H, W, 3].

    Rounding of the inner size is LeRobot's and openpi's ``resize_with_pad``: the size divided by the
    larger ratio, truncated.
    """
    height, width = image.shape[:2]
    inner_h, inner_w = inner_size(height, width, recipe)
    if (inner_h, inner_w) != (height, width):
        image = resize_bilinear(image, inner_h, inner_w)
    if (inner_h, inner_w) == (recipe.height, recipe.width):
        return image
    spare_h, spare_w = recipe.height - inner_h, recipe.width - inner_w
    top, left = (spare_h, spare_w) if recipe.pad == "top_left" else (spare_h // 2, spare_w // 2)
    out = np.full((recipe.height, recipe.width, 3), recipe.pad_value, np.float32)
    out[top : top + inner_h, left : left + inner_w] = image
    return out


def inner_size(height: int, width: int, recipe: ImageRecipe) -> tuple[int, int]:
    """Size of the picture inside the bars."""
    ratio = max(width / recipe.width, height / recipe.height)
    return max(int(height / ratio), 1), max(int(width / ratio), 1)


def letterbox_pil(frame: np.ndarray, recipe: ImageRecipe) -> np.ndarray:
    """uint8 [h, w, 3] -> uint8 [H, W, 3] by Pillow, black bars, centred."""
    from PIL import Image  # here: the CUDA engine resizes on the device

    height, width = frame.shape[:2]
    if (height, width) == (recipe.height, recipe.width):
        return frame
    inner_h, inner_w = inner_size(height, width, recipe)
    resized = Image.fromarray(frame).resize((inner_w, inner_h), Image.Resampling.BILINEAR)
    out = Image.new("RGB", (recipe.width, recipe.height))
    out.paste(resized, ((recipe.width - inner_w) // 2, (recipe.height - inner_h) // 2))
    return np.asarray(out)


def resize_bilinear(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Bilinear, half-pixel centres, no antialiasing: ``torch.nn.functional.interpolate`` without torch.

    image: float32 [h, w, C] -> float32 [height, width, C]. Columns first, then rows, in the order of
    torch's own weights, so that the two agree to the last bits of float32.
    """
    x0, x1, wx = _taps(image.shape[1], width)
    y0, y1, wy = _taps(image.shape[0], height)
    wx, wy = wx[None, :, None], wy[:, None, None]
    columns = np.take(image, x0, axis=1) * (1 - wx) + np.take(image, x1, axis=1) * wx
    return columns[y0] * (1 - wy) + columns[y1] * wy


def _taps(size: int, target: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each target pixel its two source pixels and the weight of the second, along one axis."""
    scale = np.float32(size / target)
    source = np.maximum(scale * (np.arange(target, dtype=np.float32) + np.float32(0.5)) - np.float32(0.5), 0)
    first = np.minimum(source.astype(np.int64), size - 1)
    second = np.minimum(first + 1, size - 1)
    return first, second, np.clip(source - first.astype(np.float32), 0, 1)
