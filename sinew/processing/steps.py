"""Steps of an image recipe: what each does to a frame. Formulas: ``schema.ImageStep`` and the modules named here."""

from __future__ import annotations

import math

import numpy as np

from sinew.bundle.image_recipe import ImageRecipe, ImageStep
from sinew.steps.image.bilinear import to_unit
from sinew.steps.image.jpeg import jpeg_round_trip
from sinew.steps.image.resample import (
    resize_antialias,
    resize_area,
    resize_cut,
    resize_floats,
    resize_linear,
    resize_round,
)
from sinew.steps.image.tensorflow import centre_crop, resize_lanczos3, to_uint8


def apply_image_steps(frame: np.ndarray, recipe: ImageRecipe) -> np.ndarray:
    """uint8 or float32 [h, w, 3] -> uint8 or, where steps are of floats, float32 [H, W, 3], each step in order."""
    if recipe.steps[0].in_floats:
        frame = to_unit(frame)
    elif frame.dtype != np.uint8:
        frame = np.rint(frame * np.float32(255)).astype(np.uint8)
    fits = frame.shape[:2] == (recipe.height, recipe.width)
    for step in recipe.steps:
        if not (fits and step.other_sizes):
            frame = apply_step(frame, step)
    return frame


def apply_step(frame: np.ndarray, step: ImageStep) -> np.ndarray:
    """uint8 (or float32) [h, w, 3] -> the same dtype [H, W, 3]."""
    if step.kind == "jpeg":
        return jpeg_round_trip(frame, step.quality)
    if step.kind == "centre_crop":
        return centre_crop(frame, step.area, step.height, step.width)
    height, width = frame.shape[:2]
    to_height, to_width = step_size(step, height, width)
    if step.kind == "square":
        out = np.zeros((to_height, to_width, 3), np.uint8)
        top, left = (to_height - height) // 2, (to_width - width) // 2
        out[top : top + height, left : left + width] = frame
        return out
    if step.kind == "crop":
        spare = height - to_height, width - to_width
        top, left = (round(n / 2) if step.rounded else n // 2 for n in spare)
        return frame[top : top + to_height, left : left + to_width]
    return resize(frame, to_height, to_width, step.method)


def resize(frame: np.ndarray, height: int, width: int, method: str) -> np.ndarray:
    """uint8 (or float32) [h, w, 3] -> the same dtype [height, width, 3] by a method of ``schema.ImageStep``."""
    if method.endswith("_float"):
        return resize_floats(frame, height, width, method.removesuffix("_float"))
    if method == "pil_bicubic":
        from PIL import Image  # here: not every policy resizes with it

        return np.asarray(Image.fromarray(frame).resize((width, height), Image.Resampling.BICUBIC))
    if method == "lanczos3":
        return to_uint8(resize_lanczos3(frame, height, width))
    if method == "area":
        return resize_area(frame, height, width)
    if method == "bilinear_cut":
        return resize_cut(frame, height, width)
    if method == "bicubic_round":
        return resize_round(frame, height, width)
    if method == "cv_bilinear":
        return resize_linear(frame, height, width)
    return resize_antialias(frame, height, width, method)


def size_after(recipe: ImageRecipe, height: int, width: int) -> tuple[int, int]:
    """Return height and width of a frame of this size after the recipe's steps."""
    fits = (height, width) == (recipe.height, recipe.width)
    for step in recipe.steps:
        if not (fits and step.other_sizes):
            height, width = step_size(step, height, width)
    return height, width


def step_size(step: ImageStep, height: int, width: int) -> tuple[int, int]:
    """Return height and width of a frame of this size after one step."""
    if step.kind == "jpeg":
        return height, width
    if step.kind == "square":
        return (max(height, width),) * 2
    if step.kind == "short_side":
        scale = step.edge / min(height, width)
        return max(round(height * scale), 1), max(round(width * scale), 1)
    if step.kind == "crop" and step.fraction:
        return max(int(height * step.fraction), 1), max(int(width * step.fraction), 1)
    if step.kind == "crop":
        return min(step.height, height), min(step.width, width)
    if step.kind == "grid":
        return grid_size(step, height, width)
    return step.height, step.width


def grid_size(step: ImageStep, height: int, width: int) -> tuple[int, int]:
    """Return the sides that Qwen's ``smart_resize`` chooses."""
    unit = step.unit
    rows, cols = max(round(height / unit), 1) * unit, max(round(width / unit), 1) * unit
    if rows * cols > step.max_pixels:
        ratio = math.sqrt(height * width / step.max_pixels)
        rows, cols = (max(math.floor(side / ratio / unit), 1) * unit for side in (height, width))
    elif rows * cols < step.min_pixels:
        ratio = math.sqrt(step.min_pixels / (height * width))
        rows, cols = (math.ceil(side * ratio / unit) * unit for side in (height, width))
    return rows, cols
