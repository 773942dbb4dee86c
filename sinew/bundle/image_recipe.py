"""How a camera's frame becomes pixels, as data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

MAX_SIZE = 8192  # bounds every length that a manifest may ask for: pixels, tokens, actions, dimensions


@dataclass(frozen=True)
class ImageStep:
    """One change of a whole frame, uint8 to uint8, as the library that prepared the training images rounds it.

    resize       to ``height`` x ``width`` whatever the aspect ratio, by ``method``
    centre_crop  the middle part of this ``area``, resized to ``height`` x ``width`` (TensorFlow's crop_and_resize)
    jpeg         written as JPEG of this ``quality`` and read again, as TensorFlow does it

    method: "lanczos3" (TensorFlow's, antialiased), "area" (OpenCV's INTER_AREA), "bilinear" or "bicubic" (torch's
    antialiased uint8 kernels). other_sizes: only for frames that do not have the recipe's size as they come.
    """

    kind: Literal["resize", "centre_crop", "jpeg"]
    height: int = 0
    width: int = 0
    method: Literal["lanczos3", "area", "bilinear", "bicubic"] = "lanczos3"
    area: float = 1.0
    quality: int = 95
    other_sizes: bool = False


@dataclass(frozen=True)
class ImageRecipe:
    """Frame to pixels: ``steps``, scale to [0, 1], resize, pad, then ``(x - mean) / std`` per channel.

    resize: "letterbox" keeps the aspect ratio and pads; "none" wants frames of exactly this size, after the steps.
    mean, std: three numbers per group of channels; each group is the same picture in another normalisation.
    interpolation: "bilinear" has half-pixel centres, no antialiasing and float results (torch's default);
            "pil_bilinear" is Pillow's on uint8, antialiased when it shrinks (openpi's clients and server).
    pad:    where the bars go: "top_left" (LeRobot SmolVLA) or "center" (openpi).
    pad_value: value of the bars before ``mean`` and ``std`` are applied.
    """

    height: int
    width: int
    resize: Literal["letterbox", "none"] = "letterbox"
    interpolation: Literal["bilinear", "pil_bilinear"] = "bilinear"
    pad: Literal["top_left", "center"] = "top_left"
    pad_value: float = 0.0
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    steps: tuple[ImageStep, ...] = ()

    @property
    def channels(self) -> int:
        """Return the number of channels of the pixels, three per group."""
        return len(self.mean)


def image_rules(image: ImageRecipe) -> dict[str, bool]:
    """Return what must hold of a recipe from a file: the message of each rule, and whether it is kept."""
    sized = [(step.height, step.width) for step in image.steps if step.kind != "jpeg"]
    return {
        "processing.image: sides out of range": 1 <= image.height <= MAX_SIZE
        and 1 <= image.width <= MAX_SIZE,
        "processing.image: numbers that are not finite, or a zero std": all(
            map(math.isfinite, (image.pad_value, *image.mean, *image.std))
        )
        and all(image.std),
        "processing.image: mean and std are not three numbers per group": len(image.mean) in (3, 6, 9, 12)
        and len(image.mean) == len(image.std),
        "processing.image: a step's size, area or quality is out of range": all(
            1 <= side <= MAX_SIZE for size in sized for side in size
        )
        and all(0 < step.area <= 1 and 1 <= step.quality <= 100 for step in image.steps),
        "processing.image: the steps end in another size": image.resize == "letterbox"
        or not image.steps
        or sized[-1:] == [(image.height, image.width)],
    }
