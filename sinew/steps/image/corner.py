"""A step that places a camera's picture in the top left corner of the size that all cameras share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from sinew.core.fields import Side, within
from sinew.steps.image.base import ImageStep


@dataclass(frozen=True)
class Corner(ImageStep):
    """Place a picture of ``own_height`` x ``own_width`` in ``height`` x ``width``, with black at the right and the
    bottom.

    A picture of another size is not changed. :func:`sinew.processing.image.check_frame` rejects it before this step.

    Attributes:
        floats: True if the recipe's other steps work with floats.
    """

    height: Side
    width: Side
    own_height: Side
    own_width: Side
    floats: bool = False
    kind: Literal["corner"] = field(default="corner", kw_only=True, repr=False)

    def problems(self) -> Iterator[str]:
        yield from within(1, self.height).problems("own_height", self.own_height)
        yield from within(1, self.width).problems("own_width", self.own_width)

    @property
    def takes(self) -> Literal["bytes", "floats"]:
        return "floats" if self.floats else "bytes"

    @property
    def only(self) -> tuple[int, int]:
        return self.own_height, self.own_width

    def size(self, height: int, width: int) -> tuple[int, int]:
        own = (height, width) == (self.own_height, self.own_width)
        return (self.height, self.width) if own else (height, width)

    def forward(self, frame: np.ndarray) -> np.ndarray:
        if self.size(*frame.shape[:2]) == frame.shape[:2]:
            return frame
        whole = np.zeros((self.height, self.width, 3), frame.dtype)
        whole[: self.own_height, : self.own_width] = frame
        return whole

    def __str__(self) -> str:
        return f"{self.own_height}x{self.own_width} in the corner of {self.height}x{self.width}"
