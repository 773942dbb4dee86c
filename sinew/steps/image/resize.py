"""A step that resizes a frame to a fixed size, without its aspect ratio."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from sinew.steps.image.base import SizedStep
from sinew.steps.image.methods import Method, MethodStep


@dataclass(frozen=True)
class Resize(MethodStep, SizedStep):
    """Resize a frame to ``height`` x ``width`` by ``method``."""

    method: Method = "lanczos3"
    other_sizes: bool = False
    kind: Literal["resize"] = field(default="resize", kw_only=True, repr=False)

    def resized(self, height: int, width: int) -> tuple[int, int]:
        return self.fixed

    def __str__(self) -> str:
        return f"{self.method} to {self.height}x{self.width}"
