"""A step with TensorFlow's crop_and_resize of the middle of a frame."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np

from sinew.core.fields import share
from sinew.steps.image.base import SizedStep
from sinew.steps.image.tensorflow import centre_crop


@dataclass(frozen=True)
class CentreCrop(SizedStep):
    """Crop the middle part of a frame that has this ``area``, and resize it to ``height`` x ``width``."""

    area: Annotated[float, share("the frame")] = 1.0
    kind: Literal["centre_crop"] = field(default="centre_crop", kw_only=True, repr=False)

    def forward(self, frame: np.ndarray) -> np.ndarray:
        return centre_crop(frame, self.area, self.height, self.width)

    def __str__(self) -> str:
        return f"middle {self.area:.0%} to {self.height}x{self.width}"
