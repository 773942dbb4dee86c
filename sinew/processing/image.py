"""Convert camera frames to pixels for the model: the steps of the recipe, then normalisation."""

from __future__ import annotations

import math

import numpy as np

from sinew.core import MAX_SIZE, ObservationError
from sinew.steps.image.base import ImageRecipe
from sinew.steps.image.bilinear import to_planes

# If frames have at least this many times the pixels that the policy uses, the client is advised to send smaller frames.
# The number 4 means twice the height and twice the width.
LARGER = 4


def check_frame(frame: object, name: str, recipe: ImageRecipe) -> None:
    """Raise :class:`ObservationError` unless ``frame`` is an RGB image that the recipe accepts."""
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
    if not (1 <= height <= MAX_SIZE and 1 <= width <= MAX_SIZE):
        raise ObservationError(name, f"sides of 1 to {MAX_SIZE} pixels", f"{height} x {width}")
    if (end := recipe.size_after(height, width)) != (own := recipe.picture):
        if not recipe.to_picture:
            remedy = (
                "this policy does not resize: set the camera to this size, or resize as for its training data"
            )
            got = f"{height} x {width} ({remedy})"
            raise ObservationError(name, f"exactly {own[0]} x {own[1]}", got)
        expected = f"a frame that becomes {own[0]} x {own[1]}"
        raise ObservationError(name, expected, f"{height} x {width}, which becomes {end[0]} x {end[1]}")
    if frame.dtype == np.float32:
        # If any pixel is NaN, min and max are NaN, and NaN fails both comparisons.
        low, high = float(frame.min()), float(frame.max())
        if not (low >= 0.0 and high <= 1.0):
            raise ObservationError(name, "finite float pixels in [0, 1]", f"values from {low} to {high}")


def apply_image_steps(frame: np.ndarray, recipe: ImageRecipe) -> np.ndarray:
    """Apply all steps of the image recipe in order. Input: uint8 or float32 [h, w, 3]. Output: uint8 or float32
    [recipe.height, recipe.width, 3]."""
    fits = frame.shape[:2] == (recipe.height, recipe.width)
    for step in recipe.steps:
        if frame.dtype != np.uint8 or step.takes == "floats":
            frame = step.taken(frame)  # convert the frame first, even if the step itself is then skipped
        if not (fits and step.other_sizes):
            frame = step.forward(frame)
    return frame


def prepare_frame(frame: np.ndarray, recipe: ImageRecipe) -> np.ndarray:
    """Return a frame, uint8 or float32 [height, width, 3], as normalised float32 [channels, recipe.height,
    recipe.width]."""
    stepped = apply_image_steps(frame, recipe)
    return _pixels(stepped, recipe, fresh=not np.may_share_memory(stepped, frame))


def larger(frame: np.ndarray, recipe: ImageRecipe, trained: tuple[int, int]) -> str:
    """Return the advice to send smaller frames if a frame has ``LARGER`` times the pixels that the policy uses; else
    "".

    Args:
        frame: A frame.
        recipe: The image recipe.
        trained: Height and width of the training frames.
    """
    height, width = frame.shape[:2]
    enough = recipe.enough(height, width)
    if height * width < LARGER * math.prod(enough):
        return ""
    small = np.zeros((*enough, 3), frame.dtype)
    text = (
        f"frames are {height}x{width} but the policy resizes them to {enough[0]}x{enough[1]}; send"
        f" {enough[0]}x{enough[1]} to save bandwidth ({small.nbytes / 1e3:,.0f} kB instead of"
        f" {frame.nbytes / 1e3:,.0f} kB per frame)"
    )
    return text + (f" (training frames were {height}x{width} too)" if trained == (height, width) else "")


def empty_frame(recipe: ImageRecipe) -> np.ndarray:
    """Return the model's input for a missing camera: a black frame, normalised."""
    return _pixels(np.zeros((recipe.height, recipe.width, 3), np.float32), recipe, fresh=True)


def _pixels(frame: np.ndarray, recipe: ImageRecipe, fresh: bool) -> np.ndarray:
    """Return the normalised colour channels of a frame. ``fresh`` is True if the frame's memory may be overwritten."""
    if frame.dtype == np.uint8:
        planes, fresh = to_planes(frame), True
    else:
        planes = frame.transpose(2, 0, 1)
    mean, std = (np.asarray(values, np.float32)[:, None, None] for values in (recipe.mean, recipe.std))
    if len(mean) == 3:
        return _normalized(planes, mean, std, planes if fresh and planes.flags.c_contiguous else None)
    pixels = np.empty((len(mean), *planes.shape[1:]), np.float32)
    for i in range(0, len(mean), 3):
        _normalized(planes, mean[i : i + 3], std[i : i + 3], pixels[i : i + 3])
    return pixels


def _normalized(
    planes: np.ndarray, mean: np.ndarray, std: np.ndarray, out: np.ndarray | None = None
) -> np.ndarray:
    """Return (planes - mean) / std, float32 [3, h, w]; mean and std are [3, 1, 1]. The result is written to ``out`` if
    it is not None."""
    normalized = np.subtract(planes, mean, out=out, order="C")
    normalized /= std
    return normalized
