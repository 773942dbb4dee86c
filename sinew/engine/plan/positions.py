"""Add the position table of the vision tower to the patches without a lookup, if the patches use all rows of the
table in order.

Rotary tables and masks need no rewrite, because a model's context contains them once per observation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sinew.engine.plan.rewrite import Rewrite, Status, become, exactly, foreign, verdict
from sinew.layers.qwen_vit import QwenViT
from sinew.layers.rope import Rotation
from sinew.layers.vit import ResizedPositions, VisionTransformer


class FullGridPositions(VisionTransformer):
    """A vision tower that adds the whole position table to the patches, without a lookup, if both have the same grid.

    Row i then belongs to patch i.
    """

    def positions(self, rows: int, cols: int) -> Tensor:
        if rows == cols == self.config.side:
            return self.position_embedding.weight
        return super().positions(rows, cols)


class GridTable(ResizedPositions):
    """A vision tower for views that all have the same grid of patches. The position table is resized only once."""

    table: Tensor  # [rows * cols, C]

    def positions(self, rows: int, cols: int) -> Tensor:
        return self.table


class QwenGridTable(QwenViT):
    """Qwen's vision tower with rotary positions, for views that all have the same grid of patches.

    Positions and rotation are computed only once.
    """

    table: Tensor  # [rows * cols, C]
    cos: Tensor  # [1, rows * cols, 1, D / 2]
    sin: Tensor

    def positions(self, rows: int, cols: int) -> Tensor:
        return self.table

    def rotation(self, rows: int, cols: int) -> Rotation:
        return Rotation(self.cos, self.sin)


@torch.no_grad()
def _fix(tower: Any, grid: tuple[int, int]) -> None:
    """Store the tables of ``grid`` in the tower."""
    tables = {"table": tower.positions(*grid)}
    if isinstance(tower, QwenViT):
        tables |= tower.rotation(*grid)._asdict()
    for name, table in tables.items():
        tower.register_buffer(name, table, persistent=False)
    become(tower, QwenGridTable if isinstance(tower, QwenViT) else GridTable)


def _hoist(model: Any) -> tuple[Status, str, tuple[str, ...]]:
    names, skipped = [], {}
    for name, module in list(model.named_modules()):
        if exactly(module, ResizedPositions, QwenViT):
            if model.grid is None:
                skipped[name] = "views of any size"
                continue
            _fix(module, model.grid)
        elif unknown := foreign(module, VisionTransformer) or foreign(module, QwenViT):
            skipped[name] = unknown
            continue
        elif isinstance(module, VisionTransformer):
            become(module, FullGridPositions)
        else:
            continue
        names.append(f"{name}.position_embedding")
    reason = (
        "patches with the grid of the position table use the whole table without a lookup; if the bundle fixes the"
        " grid, a table of that grid is computed once"
    )
    status, reason, _ = verdict(names, skipped, reason, "no vision transformer with a table of positions")
    return status, reason, tuple(names)


HOIST_POSITIONS = Rewrite(
    "hoist-positions", "the vision tower's position table is added without a lookup", _hoist
)
