"""Camera frame to pixels: the resize of the training pipeline, reproduced to float32 rounding."""

from __future__ import annotations

import numpy as np

from sinew.bundle.schema import ImageRecipe
from sinew.core import ObservationError
from sinew.processing.steps import apply_image_steps, size_after
from sinew.steps.image.bilinear import resize_bilinear, to_planes

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
    if recipe.resize == "none" and not recipe.steps and (height, width) != (recipe.height, recipe.width):
        raise ObservationError(name, f"exactly {recipe.height} x {recipe.width}", f"{height} x {width}")
    if recipe.resize == "none" and recipe.steps:
        end = size_after(recipe, height, width)
        if end != (recipe.height, recipe.width):
            expected = f"a frame that becomes {recipe.height} x {recipe.width}"
            raise ObservationError(name, expected, f"{height} x {width}, which becomes {end[0]} x {end[1]}")
    if frame.dtype == np.float32:
        # min and max are NaN when any pixel is, and NaN fails both comparisons.
        low, high = float(frame.min()), float(frame.max())
        if not (low >= 0.0 and high <= 1.0):
            raise ObservationError(name, "finite float pixels in [0, 1]", f"values from {low} to {high}")


def prepare_frame(frame: np.ndarray, recipe: ImageRecipe) -> np.ndarray:
    """uint8 or float32 [height, width, 3] -> float32 [channels, recipe.height, recipe.width], normalised."""
    return _pixels(apply_image_steps(frame, recipe) if recipe.steps else frame, recipe)


def _pixels(frame: np.ndarray, recipe: ImageRecipe) -> np.ndarray:
    groups = range(0, recipe.channels, 3)
    if len(groups) > 1:
        return np.concatenate([_group(frame, recipe, first) for first in groups])
    return _group(frame, recipe, 0)


def _group(frame: np.ndarray, recipe: ImageRecipe, first: int) -> np.ndarray:
    """The three channels from ``first`` on: float32 [3, recipe.height, recipe.width]."""
    if recipe.resize == "letterbox" and recipe.interpolation == "pil_bilinear":
        frame = letterbox_pil(frame if frame.dtype == np.uint8 else (frame * 255).astype(np.uint8), recipe)
    mean = np.asarray(recipe.mean[first : first + 3], np.float32)[:, None, None]
    std = np.asarray(recipe.std[first : first + 3], np.float32)[:, None, None]
    if recipe.resize == "letterbox":
        return letterbox(frame, recipe, mean, std)
    return normalized(to_planes(frame), mean, std)


def empty_frame(recipe: ImageRecipe) -> np.ndarray:
    """What the model sees for a camera that is not there: black before normalisation."""
    return _pixels(np.zeros((recipe.height, recipe.width, 3), np.float32), recipe)


def normalized(planes: np.ndarray, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """(planes - mean) / std; float32 [3, h, w], mean and std [3, 1, 1]."""
    out = np.subtract(planes, mean, order="C")
    out /= std
    return out


def letterbox(frame: np.ndarray, recipe: ImageRecipe, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """Resize keeping the aspect ratio, normalise, and pad: [h, w, 3] -> float32 [3, H, W].

    Rounding of the inner size is LeRobot's and openpi's ``resize_with_pad``: the size divided by the
    larger ratio, truncated.
    """
    height, width = frame.shape[:2]
    inner_h, inner_w = inner_size(height, width, recipe)
    same = (inner_h, inner_w) == (height, width)
    planes = to_planes(frame) if same else resize_bilinear(frame, inner_h, inner_w)
    if (inner_h, inner_w) == (recipe.height, recipe.width):
        return normalized(planes, mean, std)
    spare_h, spare_w = recipe.height - inner_h, recipe.width - inner_w
    top, left = (spare_h, spare_w) if recipe.pad == "top_left" else (spare_h // 2, spare_w // 2)
    out = np.empty((3, recipe.height, recipe.width), np.float32)
    out[:] = normalized(np.full((3, 1, 1), recipe.pad_value, np.float32), mean, std)
    inner = out[:, top : top + inner_h, left : left + inner_w]
    np.subtract(planes, mean, out=inner)
    inner /= std
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
