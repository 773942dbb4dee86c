"""What a step of a camera's frame has to say and to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from sinew.core.fields import Side, Tagged
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
        """Return what frames the step changes: uint8, float32 in [0, 1], or each as it comes."""
        return "bytes"

    @property
    def on_host(self) -> str:
        """Return why engines leave a recipe with this step to numpy on the host; "" where a device computes it."""
        return "its library's order of sums and roundings is written in numpy alone"

    @property
    def fixed(self) -> tuple[int, int] | None:
        """Return the height and width that every frame gets; None where they follow from the frame's."""
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


def to_unit(array: np.ndarray) -> np.ndarray:
    """uint8 0 .. 255 -> float32 in [0, 1]; float32 as it is."""
    if array.dtype != np.uint8:
        return array
    out = array.astype(np.float32)
    out /= np.float32(255)
    return out
