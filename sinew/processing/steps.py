"""Steps of an image recipe: what each does to a frame. Formulas: ``schema.ImageStep`` and the modules named here."""

from __future__ import annotations

import numpy as np

from sinew.bundle.image_recipe import ImageRecipe, ImageStep
from sinew.processing.jpeg import jpeg_round_trip
from sinew.processing.resample import resize_antialias, resize_area
from sinew.processing.tensorflow_image import centre_crop, resize_lanczos3, to_uint8


def apply_image_steps(frame: np.ndarray, recipe: ImageRecipe) -> np.ndarray:
    """uint8 or float32 [h, w, 3] -> uint8 [H, W, 3], each step of the recipe in order."""
    if frame.dtype != np.uint8:
        frame = np.rint(frame * np.float32(255)).astype(np.uint8)
    fits = frame.shape[:2] == (recipe.height, recipe.width)
    for step in recipe.steps:
        if not (fits and step.other_sizes):
            frame = apply_step(frame, step)
    return frame


def apply_step(frame: np.ndarray, step: ImageStep) -> np.ndarray:
    """uint8 [h, w, 3] -> uint8 [H, W, 3]."""
    if step.kind == "jpeg":
        return jpeg_round_trip(frame, step.quality)
    if step.kind == "centre_crop":
        return centre_crop(frame, step.area, step.height, step.width)
    if step.method == "lanczos3":
        return to_uint8(resize_lanczos3(frame, step.height, step.width))
    if step.method == "area":
        return resize_area(frame, step.height, step.width)
    return resize_antialias(frame, step.height, step.width, step.method)
