"""A step that resizes a frame so that its longer side has a fixed length."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from sinew.core.fields import Side
from sinew.steps.image.methods import Method, MethodStep


@dataclass(frozen=True)
class LongSide(MethodStep):
    """Resize the longer side to ``edge`` by ``method``. The other side keeps the aspect ratio, cut to whole pixels."""

    edge: Side
    method: Method = "lanczos3"
    kind: Literal["long_side"] = field(default="long_side", kw_only=True, repr=False)

    def size(self, height: int, width: int) -> tuple[int, int]:
        if width > height:
            return max(int(self.edge * height / width), 1), self.edge
        return self.edge, max(int(self.edge * width / height), 1)

    def resized(self, height: int, width: int) -> tuple[int, int]:
        return self.size(height, width)

    def __str__(self) -> str:
        return f"{self.method} to a long side of {self.edge}"
