"""A step that resizes a frame to a fixed size, keeps its aspect ratio, and fills the rest with bars."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from sinew.core.fields import Finite
from sinew.steps.image.base import SizedStep
from sinew.steps.image.bilinear import resize_bilinear, to_planes
from sinew.steps.image.resample import resize_pillow


@dataclass(frozen=True)
class Letterbox(SizedStep):
    """Resize a frame to ``height`` x ``width`` with its aspect ratio, and add bars.

    Attributes:
        interpolation: "bilinear" has half-pixel centres, no antialiasing and float results (torch's default).
            "pil_bilinear" is Pillow's resize of uint8, antialiased when it shrinks, with black bars on both sides
            (openpi's clients and server).
        pad: Position of the bars. "top_left": all bars are above or left of the picture (LeRobot SmolVLA). "center":
            bars are on both sides (openpi).
        pad_value: Value of the bars for pixels in [0, 1], one number or one per colour.
    """

    interpolation: Literal["bilinear", "pil_bilinear"] = "bilinear"
    pad: Literal["top_left", "center"] = "top_left"
    pad_value: Finite | tuple[Finite, Finite, Finite] = 0.0
    kind: Literal["letterbox"] = field(default="letterbox", kw_only=True, repr=False)
    takes = "either"
    on_host = ""

    @property
    def centred(self) -> bool:
        """Return True if the bars are on both sides of the picture."""
        return self.pad == "center" or self.interpolation == "pil_bilinear"

    @property
    def colour(self) -> tuple[float, float, float]:
        """Return ``pad_value`` as three numbers, one for each colour."""
        return self.pad_value if isinstance(self.pad_value, tuple) else (self.pad_value,) * 3

    @property
    def bars(self) -> tuple[float, float, float]:
        """Return the colour of the bars for pixels in [0, 1]."""
        return (0.0,) * 3 if self.interpolation == "pil_bilinear" else self.colour

    def inner(self, height: int, width: int) -> tuple[int, int]:
        """Return the size of the picture between the bars: the frame's size divided by one ratio, cut to whole pixels.

        The ratio is the larger of the two ratios of frame size to target size.

        LeRobot's and openpi's ``resize_with_pad`` round in the same way.
        """
        ratio = max(width / self.width, height / self.height)
        return max(int(height / ratio), 1), max(int(width / ratio), 1)

    def resized(self, height: int, width: int) -> tuple[int, int]:
        return self.inner(height, width)

    def corner(self, inner: tuple[int, int]) -> tuple[int, int]:
        """Return the first row and column of a picture of this size."""
        spare = self.height - inner[0], self.width - inner[1]
        return (spare[0] // 2, spare[1] // 2) if self.centred else spare

    def forward(self, frame: np.ndarray) -> np.ndarray:
        """Return float32 [height, width, 3] for a frame, uint8 or float32 in [0, 1], [h, w, 3]. With Pillow, return
        uint8."""
        if self.interpolation == "pil_bilinear":
            return self._pillow(frame if frame.dtype == np.uint8 else (frame * 255).astype(np.uint8))
        height, width = frame.shape[:2]
        inner = self.inner(height, width)
        out = np.empty((3, self.height, self.width), np.float32)
        picture = out
        if inner != (self.height, self.width):
            top, left = self.corner(inner)
            bottom, right = top + inner[0], left + inner[1]
            picture = out[:, top:bottom, left:right]
            for bar in (out[:, :top], out[:, bottom:], out[..., :left], out[..., right:]):
                bar[:] = np.asarray(self.colour, np.float32)[:, None, None]
        if inner == (height, width):
            picture[:] = to_planes(frame)
        else:
            resize_bilinear(frame, *inner, out=picture)
        return out.transpose(1, 2, 0)

    def _pillow(self, frame: np.ndarray) -> np.ndarray:
        if frame.shape[:2] == self.fixed:
            return frame
        inner = self.inner(*frame.shape[:2])
        top, left = self.corner(inner)
        out = np.zeros((*self.fixed, 3), np.uint8)
        out[top : top + inner[0], left : left + inner[1]] = resize_pillow(frame, *inner, "bilinear")
        return out

    def __str__(self) -> str:
        side = "center" if self.centred else self.pad
        shown = "/".join(f"{value:g}" for value in dict.fromkeys(self.bars))
        return f"letterbox to {self.height}x{self.width}, {self.interpolation}, bars {side} = {shown}"
