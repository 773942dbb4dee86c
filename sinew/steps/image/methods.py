"""Resizes that equal the libraries which prepare training images, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import numpy as np

from sinew.steps.image.base import ImageStep
from sinew.steps.image.resample import (
    resize_antialias,
    resize_area,
    resize_cut,
    resize_floats,
    resize_linear,
    resize_pillow,
    resize_plain,
    resize_round,
)
from sinew.steps.image.tensorflow import resize_lanczos3, to_uint8

Method = Literal[
    "lanczos3",  # TensorFlow's resize with antialias=True
    "area",  # OpenCV's INTER_AREA
    "bilinear",  # torch's resize of uint8 with antialias=True
    "bicubic",
    "pil_bicubic",  # Pillow's BICUBIC
    "bilinear_cut",  # torch's resize of floats with antialias=True, then truncated to uint8
    "bilinear_round",  # torch's resize of floats with antialias=False, then rounded to uint8
    "bicubic_round",  # torch's resize of floats with antialias=True, then rounded to uint8
    "cv_bilinear",  # OpenCV's INTER_LINEAR
    "area_float",  # torch's interpolate of floats with mode="area"
    "bilinear_float",  # torch's resize of floats with antialias=True
    "bicubic_float",  # torch's resize of floats with antialias=True; results may be outside [0, 1]
]


class MethodStep(ImageStep):
    """A step that resizes a frame with the arithmetic of one library, which ``method`` names."""

    method: Method

    @property
    def takes(self) -> Literal["bytes", "floats"]:
        return "floats" if self.method.endswith("_float") else "bytes"

    def forward(self, frame: np.ndarray) -> np.ndarray:
        return resize(frame, *self.size(*frame.shape[:2]), self.method)


def resize(frame: np.ndarray, height: int, width: int, method: Method) -> np.ndarray:
    """Resize a frame, [h, w, 3], to [height, width, 3] of the same dtype: float32 for the methods of floats, else
    uint8."""
    if method.endswith("_float"):
        return resize_floats(frame, height, width, method.removesuffix("_float"))
    return _OF_BYTES[method](frame, height, width)


_OF_BYTES: dict[str, Callable[[np.ndarray, int, int], np.ndarray]] = {
    "lanczos3": lambda *given: to_uint8(resize_lanczos3(*given)),
    "area": resize_area,
    "bilinear": partial(resize_antialias, method="bilinear"),
    "bicubic": partial(resize_antialias, method="bicubic"),
    "pil_bicubic": partial(resize_pillow, method="bicubic"),
    "bilinear_cut": resize_cut,
    "bilinear_round": resize_plain,
    "bicubic_round": resize_round,
    "cv_bilinear": resize_linear,
}
