"""Positions: rows of the vision tower's position table, not looked up where they are the table itself.

Rotary tables and masks need no rewrite: a model's context holds them, once per observation.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sinew.engine.plan.rewrite import Rewrite, Status, become, foreign, left_out
from sinew.layers.vit import VisionTransformer


class FullGridPositions(VisionTransformer):
    """When the patches fill the table's grid, row i belongs to patch i: the table itself is added."""

    def positions(self, rows: int, cols: int) -> Tensor:
        if rows == cols == self.config.side:
            return self.position_embedding.weight
        return super().positions(rows, cols)


def _hoist(model: Any) -> tuple[Status, str, tuple[str, ...]]:
    names, left = [], {}
    for name, module in model.named_modules():
        if unknown := foreign(module, VisionTransformer):
            left[name] = unknown
        elif isinstance(module, VisionTransformer):
            become(module, FullGridPositions)
            names.append(f"{name}.position_embedding")
    reason = "patches that fill the table's grid read it as it is"
    return ("applied" if names else "not applicable"), reason + left_out(left), tuple(names)


HOIST_POSITIONS = Rewrite("hoist-positions", "position rows of a whole grid are not looked up", _hoist)
