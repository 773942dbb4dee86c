"""How a camera's frame becomes pixels, as data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

MAX_SIZE = 8192  # bounds every length that a manifest may ask for: pixels, tokens, actions, dimensions


Method = Literal[
    "lanczos3",
    "area",
    "bilinear",
    "bicubic",
    "pil_bicubic",
    "bilinear_cut",
    "bicubic_round",
    "cv_bilinear",
    "area_float",
    "bicubic_float",
]


@dataclass(frozen=True)
class ImageStep:
    """One change of a whole frame, as the library that prepared the training images rounds it: uint8 to uint8, or
    float32 in [0, 1] where the method says so.

    resize       to ``height`` x ``width`` whatever the aspect ratio, by ``method``
    centre_crop  the middle part of this ``area``, resized to ``height`` x ``width`` (TensorFlow's crop_and_resize)
    jpeg         written as JPEG of this ``quality`` and read again, as TensorFlow does it
    square       black bars around the picture, which stays in the middle, until it is square
    short_side   the shorter side becomes ``edge`` and the other keeps the aspect ratio, by ``method``
    crop         the middle: this ``fraction`` of both sides, cut to whole pixels, or ``height`` x ``width``;
                 rounded: its place is rounded (torchvision's), not cut (albumentations')
    grid         both sides become the nearest multiples of ``unit``, with ``min_pixels`` to ``max_pixels`` in all
                 (Qwen's image processors), by ``method``

    method: "lanczos3" (TensorFlow's, antialiased), "area" and "cv_bilinear" (OpenCV's INTER_AREA and INTER_LINEAR),
    "bilinear" or "bicubic" (torch's antialiased uint8 kernels), "pil_bicubic" (Pillow's), "bilinear_cut" and
    "bicubic_round" (torch's antialiased on floats, then cut or rounded to uint8), "area_float" (torch's adaptive mean
    of floats), "bicubic_float" (torch's antialiased on floats; it may leave [0, 1]). other_sizes: only for frames that
    do not have the recipe's size as they come.
    """

    kind: Literal["resize", "centre_crop", "jpeg", "square", "short_side", "crop", "grid"]
    height: int = 0
    width: int = 0
    method: Method = "lanczos3"
    area: float = 1.0
    quality: int = 95
    other_sizes: bool = False
    edge: int = 0
    fraction: float = 0.0
    rounded: bool = False
    unit: int = 0
    min_pixels: int = 0
    max_pixels: int = 0

    @property
    def in_floats(self) -> bool:
        """Return True for a step of floats."""
        return self.kind in ("resize", "grid", "short_side") and self.method.endswith("_float")

    @property
    def is_believable(self) -> bool:
        """Return True if every number that the kind reads is one that a picture can have."""
        sized = 1 <= self.height <= MAX_SIZE and 1 <= self.width <= MAX_SIZE
        return {
            "resize": sized,
            "centre_crop": sized and 0 < self.area <= 1,
            "jpeg": 1 <= self.quality <= 100,
            "square": True,
            "short_side": 1 <= self.edge <= MAX_SIZE,
            "crop": 0 < self.fraction <= 1 or (self.fraction == 0 and sized),
            "grid": 1 <= self.unit <= MAX_SIZE and 1 <= self.min_pixels <= self.max_pixels <= MAX_SIZE**2,
        }[self.kind]


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
    fixed = [step for step in image.steps if step.kind != "jpeg"][-1:]
    fixed = [step for step in fixed if step.kind in ("resize", "centre_crop")]  # the others follow the frame
    return {
        "processing.image: sides out of range": 1 <= image.height <= MAX_SIZE
        and 1 <= image.width <= MAX_SIZE,
        "processing.image: numbers that are not finite, or a std that is not above 0": all(
            map(math.isfinite, (image.pad_value, *image.mean, *image.std))
        )
        and all(std > 0 for std in image.std),
        "processing.image: mean and std are not three numbers per group": len(image.mean) in (3, 6, 9, 12)
        and len(image.mean) == len(image.std),
        "processing.image: a step's size, area or quality is out of range": all(
            step.is_believable for step in image.steps
        ),
        "processing.image: expected steps that are all of uint8 or all of floats": len(
            {step.in_floats for step in image.steps}
        )
        <= 1,
        "processing.image: the steps end in another size": image.resize == "letterbox"
        or all((step.height, step.width) == (image.height, image.width) for step in fixed),
    }
