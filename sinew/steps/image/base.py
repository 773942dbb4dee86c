"""The interface of a step that changes a camera frame, and the recipe that is a list of such steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np

from sinew.core.fields import Finite, Positive, Side, Tagged
from sinew.steps import registry


class ImageStep(Tagged):
    """One change of a whole frame, as the library that prepared the training images rounds it.

    other_sizes: a field of steps that may be only for frames that do not have the recipe's size as they come.
    keeps_size: after it every frame has the size that it had.
    """

    registry = registry.IMAGE
    other_sizes: bool = False
    keeps_size: ClassVar[bool] = False

    @property
    def takes(self) -> Literal["bytes", "floats", "either"]:
        """The frames that the step accepts: uint8, float32 in [0, 1], or either."""
        return "bytes"

    @property
    def on_host(self) -> str:
        """Return why engines leave a recipe with this step to numpy on the host; "" where a device computes it."""
        return "its library's order of sums and roundings is written in numpy alone"

    @property
    def fixed(self) -> tuple[int, int] | None:
        """Return the height and width that every frame gets; None where they follow from the frame's."""
        return None

    @property
    def only(self) -> tuple[int, int] | None:
        """Return the only height and width that the step takes; None where it takes any."""
        return None

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width of a frame of this size after the step."""
        return self.fixed or (height, width)

    def resized(self, height: int, width: int) -> tuple[int, int] | None:
        """Return height and width of the picture that a step which resizes makes of such a frame, without bars; None of
        a step that does something else."""
        return None

    def taken(self, frame: np.ndarray) -> np.ndarray:
        """Return uint8 or float32 [h, w, 3] as the step takes it; floats become the bytes that they came from."""
        if self.takes == "floats":
            return to_unit(frame)
        if self.takes == "bytes" and frame.dtype != np.uint8:
            return np.rint(frame * np.float32(255)).astype(np.uint8)
        return frame

    def forward(self, frame: np.ndarray) -> np.ndarray:
        """Return a frame that the step takes, [h, w, 3], as the step leaves it: [H, W, 3]."""
        raise NotImplementedError


@dataclass(frozen=True)
class SizedStep(ImageStep):
    """A step after which every frame is ``height`` x ``width``."""

    height: Side
    width: Side

    @property
    def fixed(self) -> tuple[int, int]:
        return self.height, self.width


@dataclass(frozen=True)
class CameraScale:
    """``(x - mean) / std`` of one camera's pixels in [0, 1], by colour."""

    mean: tuple[Finite, Finite, Finite]
    std: tuple[Positive, Positive, Positive]


@dataclass(frozen=True)
class ImageRecipe:
    """Frame to pixels: ``steps``, which end in ``height`` x ``width``, scale to [0, 1], then ``(x - mean) / std``.

    mean, std: three numbers per group of channels; each group is the same picture in another normalisation.
    cameras: in their place, one for each camera of the policy, where cameras differ in them.
    sizes: height and width of each camera's picture after the steps, where cameras differ in them. A picture is then in
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
        """Return the recipe of one camera, counted as the policy counts them, which is the same for all frames."""
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
        """Return height and width of the picture that frames become, without the black border of a corner."""
        return (self.steps[-1].only if self.steps else None) or (self.height, self.width)

    @property
    def to_picture(self) -> tuple[ImageStep, ...]:
        """Return the steps that make :attr:`picture` of a frame; () if frames must have its size."""
        return self.steps[:-1] if self.steps and self.steps[-1].only else self.steps

    def size_after(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width of the picture that a frame of this size becomes (:attr:`picture` if it fits)."""
        fits = (height, width) == (self.height, self.width)
        for step in self.to_picture:
            if not (fits and step.other_sizes):
                height, width = step.size(height, width)
        return height, width

    def enough(self, height: int, width: int) -> tuple[int, int]:
        """Return the least height and width of a frame in the shape of this one that the first step which changes sizes
        would not have to enlarge; the frame's own where that step does not shrink it, or cuts it."""
        first = next((step for step in self.steps if not step.keeps_size), None)
        picture = None if first is None else first.resized(height, width)
        if picture is None:
            return height, width
        scale = max(picture[0] / height, picture[1] / width)
        return min(height, math.ceil(height * scale - 1e-6)), min(width, math.ceil(width * scale - 1e-6))

    def problems(self) -> Iterator[str]:
        """Yield the contradictions between its fields."""
        if len(self.mean) not in (3, 6, 9, 12) or len(self.mean) != len(self.std):
            yield f"mean, std: expected three numbers per group, of 1 to 4, got {len(self.mean)}, {len(self.std)}"
        taken, end = set(), None
        for step in self.steps:
            taken.add(step.takes)
            end = end if step.keeps_size else step.fixed
        if {"bytes", "floats"} <= taken:
            yield "steps: expected all of uint8 or all of floats, got both"
        for height, width in self.sizes:
            if height > self.height or width > self.width:
                yield f"sizes: expected at most {self.height}x{self.width}, got {height}x{width}"
        if end not in (None, (self.height, self.width)):
            yield f"steps: expected an end of {self.height}x{self.width}, got {end[0]}x{end[1]}"

    def __str__(self) -> str:
        steps = [f"{step}{' (other sizes)' if step.other_sizes else ''}" for step in self.steps]
        groups = range(0, self.channels, 3)
        scales = [f"(x - {self.mean[i]:g}) / {self.std[i]:g}" for i in groups]
        if self.cameras:
            scales = ["statistics of each camera"]
        whole = "each camera's own size" if self.sizes else f"{self.height}x{self.width}"
        return ", ".join([*(steps or [f"{whole} as they come"]), *scales])


def to_unit(array: np.ndarray) -> np.ndarray:
    """uint8 0 .. 255 -> float32 in [0, 1]; float32 as it is."""
    if array.dtype != np.uint8:
        return array
    out = array.astype(np.float32)
    out /= np.float32(255)
    return out
