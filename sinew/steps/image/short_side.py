"""A step that resizes a frame so that its shorter side has a fixed length."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from sinew.core.fields import Side
from sinew.steps.image.methods import Method, MethodStep


@dataclass(frozen=True)
class ShortSide(MethodStep):
    """Resize the shorter side to ``edge`` by ``method``. The other side keeps the aspect ratio."""

    edge: Side
    method: Method = "lanczos3"
    kind: Literal["short_side"] = field(default="short_side", kw_only=True, repr=False)

    def size(self, height: int, width: int) -> tuple[int, int]:
        scale = self.edge / min(height, width)
        return max(round(height * scale), 1), max(round(width * scale), 1)

    def resized(self, height: int, width: int) -> tuple[int, int]:
        return self.size(height, width)

    def __str__(self) -> str:
        return f"{self.method} to a short side of {self.edge}"
