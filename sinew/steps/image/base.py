"""The interface of one processing step for camera frames, and the recipe: a list of such steps and a normalisation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np

from sinew.core.fields import Finite, Positive, Side, Tagged
from sinew.steps import registry


class ImageStep(Tagged):
    """One change of a whole frame, with the rounding of the library that prepared the training images.

    Attributes:
        other_sizes: True if the step is only for frames whose original size is not the recipe's size.
        keeps_size: True if the step does not change the size of any frame.
    """

    registry = registry.IMAGE
    other_sizes: bool = False
    keeps_size: ClassVar[bool] = False

    @property
    def takes(self) -> Literal["bytes", "floats", "either"]:
        """The frames that the step accepts: uint8 ("bytes"), float32 in [0, 1] ("floats"), or both ("either")."""
        return "bytes"

    @property
    def on_host(self) -> str:
        """Return the reason why numpy must compute recipes with this step on the CPU; "" if a GPU can compute
        the step.
        """
        return "Sinew computes its library's order of sums and roundings in numpy only"

    @property
    def fixed(self) -> tuple[int, int] | None:
        """Return the height and width of every frame after the step; None if they depend on the size before
        the step.
        """
        return None

    @property
    def only(self) -> tuple[int, int] | None:
        """Return the only height and width of frames that the step accepts; None if it accepts any size."""
        return None

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width of a frame of this size after the step."""
        return self.fixed or (height, width)

    def resized(self, height: int, width: int) -> tuple[int, int] | None:
        """Return the height and width of the resized picture without bars; None if the step does not resize."""
        return None

    def taken(self, frame: np.ndarray) -> np.ndarray:
        """Convert a frame to the form that the step accepts, uint8 or float32 [h, w, 3].

        If the step accepts only uint8, a float frame is converted to uint8.
        """
        if self.takes == "floats":
            return to_unit(frame)
        if self.takes == "bytes" and frame.dtype != np.uint8:
            return np.rint(frame * np.float32(255)).astype(np.uint8)
        return frame

    def forward(self, frame: np.ndarray) -> np.ndarray:
        """Apply the step to a frame [h, w, 3] in the accepted form, and return the new frame [H, W, 3]."""
        raise NotImplementedError


@dataclass(frozen=True)
class SizedStep(ImageStep):
    """A step whose resulting frames all have the size ``height`` x ``width``."""

    height: Side
    width: Side

    @property
    def fixed(self) -> tuple[int, int]:
        return self.height, self.width


@dataclass(frozen=True)
class CameraScale:
    """The normalisation ``(x - mean) / std`` for the pixels of one camera in [0, 1], per colour."""

    mean: tuple[Finite, Finite, Finite]
    std: tuple[Positive, Positive, Positive]


@dataclass(frozen=True)
class ImageRecipe:
    """The conversion of a frame to pixels: the steps, a scale to [0, 1], then ``(x - mean) / std``.

    Attributes:
        height: Height of the pixels after the steps.
        width: Width of the pixels after the steps.
        steps: The steps.
        mean: Three numbers per group of channels. Each group is the same picture with another normalisation.
        std: Three numbers per group of channels.
        cameras: Normalisation of each camera of the policy, if the cameras differ. It replaces ``mean`` and ``std``.
        sizes: Height and width of each camera's picture after the steps, if the cameras differ. A picture is then in
            the top left corner of ``height`` x ``width``, and the model does not read the rest.
    """

    height: Side
    width: Side
    steps: tuple[ImageStep, ...] = ()
    mean: tuple[Finite, ...] = (0.5, 0.5, 0.5)
    std: tuple[Positive, ...] = (0.5, 0.5, 0.5)
    cameras: tuple[CameraScale, ...] = ()
    sizes: tuple[tuple[Side, Side], ...] = ()

    @property
    def channels(self) -> int:
        """Return the number of channels of the pixels, three per group."""
        return len(self.mean)

    def of_camera(self, index: int) -> ImageRecipe:
        """Return the recipe for one camera, by the camera's index in the policy.

        The resulting recipe has no fields that differ between cameras.
        """
        own = self
        if self.cameras:
            own = replace(own, mean=self.cameras[index].mean, std=self.cameras[index].std, cameras=())
        if self.sizes:
            floats = all(step.takes != "bytes" for step in self.steps)
            kind: Any = ImageStep.registered("corner")
            corner: ImageStep = kind(self.height, self.width, *self.sizes[index], floats)
            own = replace(own, steps=(*own.steps, corner), sizes=())
        return own

    @property
    def picture(self) -> tuple[int, int]:
        """Return the height and width of the picture, without the black area that the step ``Corner`` adds."""
        return (self.steps[-1].only if self.steps else None) or (self.height, self.width)

    @property
    def to_picture(self) -> tuple[ImageStep, ...]:
        """Return the steps that convert a frame to the size :attr:`picture`.

        Without such steps, frames must have this size.
        """
        return self.steps[:-1] if self.steps and self.steps[-1].only else self.steps

    def size_after(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width of the picture after the steps, for a frame of this size.

        The result is :attr:`picture` if the frame's size fits the recipe.
        """
        fits = (height, width) == (self.height, self.width)
        for step in self.to_picture:
            if not (fits and step.other_sizes):
                height, width = step.size(height, width)
        return height, width

    def enough(self, height: int, width: int) -> tuple[int, int]:
        """Return the smallest useful size of a frame with this aspect ratio. The recipe would enlarge a
        smaller frame.

        The result depends on the first step that changes the frame's size. If that step does not shrink the
        frame, or crops it, the result is the frame's own size.
        """
        first = next((step for step in self.steps if not step.keeps_size), None)
        picture = None if first is None else first.resized(height, width)
        if picture is None:
            return height, width
        scale = max(picture[0] / height, picture[1] / width)
        return min(height, math.ceil(height * scale - 1e-6)), min(width, math.ceil(width * scale - 1e-6))

    def problems(self) -> Iterator[str]:
        """Yield a message for each contradiction between the recipe's fields."""
        if len(self.mean) not in (3, 6, 9, 12) or len(self.mean) != len(self.std):
            yield f"mean, std: expected three numbers for each of 1 to 4 groups, got {len(self.mean)}, {len(self.std)}"
        taken, end = set(), None
        for step in self.steps:
            taken.add(step.takes)
            end = end if step.keeps_size else step.fixed
        if {"bytes", "floats"} <= taken:
            yield "steps: expected steps for uint8 frames or steps for float frames, got both"
        for height, width in self.sizes:
            if height > self.height or width > self.width:
                yield f"sizes: expected at most {self.height}x{self.width}, got {height}x{width}"
        if end not in (None, (self.height, self.width)):
            yield f"steps: expected steps that end in {self.height}x{self.width}, got {end[0]}x{end[1]}"

    def __str__(self) -> str:
        steps = [f"{step}{' (other sizes)' if step.other_sizes else ''}" for step in self.steps]
        groups = range(0, self.channels, 3)
        scales = [f"(x - {self.mean[i]:g}) / {self.std[i]:g}" for i in groups]
        if self.cameras:
            scales = ["statistics of each camera"]
        whole = "each camera's own size" if self.sizes else f"{self.height}x{self.width}"
        return ", ".join([*(steps or [f"{whole} as they come"]), *scales])


def to_unit(array: np.ndarray) -> np.ndarray:
    """Convert uint8 0 .. 255 to float32 in [0, 1]. float32 arrays are returned unchanged."""
    if array.dtype != np.uint8:
        return array
    out = array.astype(np.float32)
    out /= np.float32(255)
    return out
