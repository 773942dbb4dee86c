"""Positions: rotary tables, masks and rows of the vision tower's position table, not computed per step."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sinew.engine.plan.rewrite import Rewrite, Status, become, exactly
from sinew.layers.vit import VisionTransformer


class FullGridPositions(VisionTransformer):
    """When the patches fill the table's grid, row i belongs to patch i: the table itself is added."""

    def positions(self, rows: int, cols: int) -> Tensor:
        if rows == cols == self.config.side:
            return self.position_embedding.weight
        return super().positions(rows, cols)


def _hoist(model: Any) -> tuple[Status, str, tuple[str, ...]]:
    where = ["frame"]
    if exactly(model.vision, VisionTransformer):
        become(model.vision, FullGridPositions)
        where.append("vision.position_embedding")
    return "applied", "they depend on the prefix's length and on the image size alone", tuple(where)


HOIST_POSITIONS = Rewrite(
    "hoist-positions", "rotary tables, masks and position rows are made once per observation", _hoist
)
