"""Tables of a resize: the source pixels of every target pixel and their weights, equal to ``sinew.processing.image``.

Along one axis, every target pixel is a weighted sum of neighbouring source pixels. Both interpolations have this form,
so one kernel reads either table. The tables depend on the sizes alone and are made once per frame size.

* "bilinear": two pixels, float32 weights, no antialiasing (``torch.nn.functional.interpolate``).
* "pil_bilinear": Pillow's triangle filter, as wide as the reduction, with integer weights of 22 binary places. Rows are
  reduced first and rounded to 8 bits, then columns. Source: Pillow's ``Resample.c``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    # A GPU machine with torch and triton alone can import the kernels, so this import is for type checkers only.
    from sinew.steps.image.base import ImageRecipe

PLACES = 22  # a 32-bit integer has room for 8 bits of a pixel, 2 bits of headroom and this many binary places


@dataclass(frozen=True, slots=True)
class Axis:
    """The table of one axis.

    Attributes:
        first: The leftmost source pixel of each target pixel, int32 [target].
        weights: int32 or float32 [target, taps].
    """

    first: Tensor
    weights: Tensor

    def to(self, device: torch.device | str) -> Axis:
        return Axis(self.first.to(device), self.weights.to(device))


@dataclass(frozen=True, slots=True)
class ResizeTables:
    """The tables that resize one frame size by one recipe.

    Attributes:
        source: Height and width of the frame.
        target: Height and width of the result.
        inner: Height and width of the picture between the bars.
        top: First row of the picture.
        left: First column of the picture.
        rows: The table for rows.
        columns: The table for columns.
        affine: float32 [3, 3]. For each channel, the factor and the offset from a resized to a normalised value, and
            the normalised value of the bars.
        exact: True for integer weights.
    """

    source: tuple[int, int]
    target: tuple[int, int]
    inner: tuple[int, int]
    top: int
    left: int
    rows: Axis
    columns: Axis
    affine: Tensor
    exact: bool

    @staticmethod
    def why_not(recipe: ImageRecipe) -> str:
        """Return the reason why tables cannot express a recipe, or "". The host resizes the frames then."""
        if recipe.channels != 3:
            return f"{recipe.channels // 3} normalisations of each picture"
        if recipe.cameras:
            return "statistics of each camera"
        if recipe.sizes:
            return "a size of each camera"
        if len(recipe.steps) > 1:
            return f"{len(recipe.steps)} steps"
        return next((f"{step}: {why}" for step in recipe.steps if (why := step.on_host)), "")

    @classmethod
    def of(
        cls, height: int, width: int, recipe: ImageRecipe, device: torch.device | str = "cpu"
    ) -> ResizeTables:
        from sinew.steps.image.letterbox import Letterbox

        if why := cls.why_not(recipe):
            raise ValueError(f"recipe: expected only a letterbox step, got {why}; resize on the host")
        box = recipe.steps[0] if recipe.steps else Letterbox(recipe.height, recipe.width)
        assert isinstance(box, Letterbox)  # the only step that a device supports
        if not recipe.steps and (height, width) != box.fixed:
            raise ValueError(f"frame: expected {recipe.height} x {recipe.width}, got {height} x {width}")
        exact = box.interpolation == "pil_bilinear"
        inner = box.inner(height, width)
        top, left = box.corner(inner)
        make = pillow_axis if exact else linear_axis
        mean, std = np.asarray(recipe.mean, np.float64), np.asarray(recipe.std, np.float64)
        affine = np.stack([1 / (255 * std), -mean / std, (box.bars - mean) / std], axis=1)
        return cls(
            (height, width),
            (recipe.height, recipe.width),
            inner,
            top,
            left,
            make(height, inner[0]).to(device),
            make(width, inner[1]).to(device),
            torch.from_numpy(affine.astype(np.float32)).to(device),
            exact,
        )


def linear_axis(size: int, target: int) -> Axis:
    scale = np.float32(size / target)
    at = np.maximum(scale * (np.arange(target, dtype=np.float32) + np.float32(0.5)) - np.float32(0.5), 0)
    first = np.minimum(at.astype(np.int64), size - 1)
    second = np.clip(at - first.astype(np.float32), 0, 1)
    weights = np.stack([1 - second, second], axis=1)
    return Axis(torch.from_numpy(first.astype(np.int32)), torch.from_numpy(weights))


def pillow_axis(size: int, target: int) -> Axis:
    scale = size / target
    reach = max(scale, 1.0)  # half the width of the triangle in source pixels
    centres = (np.arange(target) + 0.5) * scale
    first = np.maximum((centres - reach + 0.5).astype(np.int64), 0)
    end = np.minimum((centres + reach + 0.5).astype(np.int64), size)
    taps = int((end - first).max())
    offsets = np.arange(taps)
    distance = (offsets + first[:, None] - centres[:, None] + 0.5) * (1.0 / reach)
    triangle = np.maximum(1.0 - np.abs(distance), 0.0)
    triangle[offsets >= (end - first)[:, None]] = 0.0
    total = np.zeros(target)
    # Add in Pillow's order, because the last bit of the sum can change an integer weight.
    for tap in range(taps):
        total += triangle[:, tap]
    weights = np.floor(triangle / total[:, None] * (1 << PLACES) + 0.5)
    assert math.ceil(reach) * 2 + 1 >= taps
    return Axis(torch.from_numpy(first.astype(np.int32)), torch.from_numpy(weights.astype(np.int32)))
