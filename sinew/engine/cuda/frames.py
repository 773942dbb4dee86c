"""Raw camera frames to the rows of patches that the vision tower multiplies, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sinew.bundle.schema import ImageRecipe
from sinew.engine.cuda.fused.ends import PatchTower
from sinew.engine.cuda.fused.ops import Ops
from sinew.engine.cuda.kernels.resize_tables import ResizeTables

Size = tuple[int, int]  # height and width in pixels


class FrameGroup(NamedTuple):
    """Neighbouring views of one size: one launch."""

    first: int
    views: int
    size: Size

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (self.views, *self.size, 3)


def runs(sizes: Sequence[Size]) -> list[FrameGroup]:
    """Views in their order, neighbours of one size together."""
    found, first = [], 0
    for size, members in groupby(sizes):
        views = len(list(members))
        found.append(FrameGroup(first, views, size))
        first += views
    return found


def fits(recipe: ImageRecipe, model: Any) -> bool:
    """Return True if frames can be sent to the device raw: the kernel supports the recipe, the image is a whole
    number of patches, and the model's image tokens depend on one tower's features alone (``connect``).
    """
    if (
        ResizeTables.why_not(recipe)
        or not hasattr(model, "connect")
        or not isinstance(model.vision, PatchTower)
    ):
        return False
    patch = model.vision.config.patch_size
    return recipe.height % patch == 0 and recipe.width % patch == 0


class Patches:
    """The resize tables of one set of frame sizes, and the rows that are written for it."""

    def __init__(
        self,
        sizes: Sequence[Size],
        recipe: ImageRecipe,
        patch: int,
        values: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        """values: of a row, 3 * patch^2 or more; what is behind stays zero."""
        self.patch, self.grid = patch, (recipe.height // patch, recipe.width // patch)
        self.runs = runs(sizes)
        self.tables = [ResizeTables.of(*run.size, recipe, device) for run in self.runs]
        shape = len(sizes), self.grid[0] * self.grid[1], values
        self.rows = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def places(self) -> list[tuple[str, int]]:
        """The field of each view, ``frames.`` and the number of its run, and its row there."""
        return [(f"frames.{i}", row) for i, run in enumerate(self.runs) for row in range(run.views)]

    def write(self, frames: Sequence[Tensor], ops: Ops) -> Tensor:
        """frames: uint8 [views, h, w, 3] of each run -> rows [V, patches, values], the same memory every time."""
        for run, table, tensor in zip(self.runs, self.tables, frames, strict=True):
            ops.preprocess(tensor, table, self.patch, self.rows[run.first : run.first + run.views])
        return self.rows
