"""Resizes by the libraries that prepare training images, each to its last bit."""

from __future__ import annotations

from typing import Literal

import numpy as np

from sinew.steps.image.base import ImageStep
from sinew.steps.image.resample import (
    resize_antialias,
    resize_area,
    resize_cut,
    resize_floats,
    resize_linear,
    resize_round,
)
from sinew.steps.image.tensorflow import resize_lanczos3, to_uint8

Method = Literal[
    "lanczos3",  # TensorFlow's, antialiased
    "area",  # OpenCV's INTER_AREA
    "bilinear",  # torch's antialiased kernels of uint8
    "bicubic",
    "pil_bicubic",  # Pillow's
    "bilinear_cut",  # torch's antialiased on floats, then cut to uint8
    "bicubic_round",  # the same, rounded to uint8
    "cv_bilinear",  # OpenCV's INTER_LINEAR
    "area_float",  # torch's adaptive mean of floats
    "bilinear_float",  # torch's antialiased on floats
    "bicubic_float",  # the same; it may leave [0, 1]
]


class MethodStep(ImageStep):
    """A step that resizes by a method."""

    method: Method

    @property
    def takes(self) -> Literal["bytes", "floats"]:
        return "floats" if self.method.endswith("_float") else "bytes"


def resize(frame: np.ndarray, height: int, width: int, method: Method) -> np.ndarray:
    """uint8 (or float32, where the method takes floats) [h, w, 3] -> the same dtype [height, width, 3]."""
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
