"""Convert raw camera frames on the GPU to the vision tower's input: one row of pixel values for each patch."""

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
    """Consecutive camera views with the same frame size. One kernel launch converts all of them.

    Attributes:
        first: Index of the first view.
        views: Number of views.
        size: Height and width in pixels.
    """

    first: int
    views: int
    size: Size

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (self.views, *self.size, 3)


def runs(sizes: Sequence[Size]) -> list[FrameGroup]:
    """Split the views into groups of consecutive views with the same frame size."""
    groups, first = [], 0
    for size, members in groupby(sizes):
        views = len(list(members))
        groups.append(FrameGroup(first, views, size))
        first += views
    return groups


def fits(recipe: ImageRecipe, model: Any) -> bool:
    """Return True if the device can resize raw frames.

    The kernel must support the recipe, the image must be a whole number of patches, and the model's image tokens must
    depend on one tower's features alone (``connect``).
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
    """The resize tables for one set of frame sizes, and the memory for the rows of patches.

    Args:
        sizes: Height and width of each view's frame.
        recipe: The image recipe.
        patch: Side of a patch in pixels.
        values: Length of a row, at least 3 * patch^2. The values after 3 * patch^2 stay zero.
        dtype: Dtype of the rows.
        device: The device.
    """

    def __init__(
        self,
        sizes: Sequence[Size],
        recipe: ImageRecipe,
        patch: int,
        values: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        """The parameter ``values`` is the length of a row, at least 3 * patch^2.

        The values after 3 * patch^2 stay zero.
        """
        self.patch, self.grid = patch, (recipe.height // patch, recipe.width // patch)
        self.runs = runs(sizes)
        self.tables = [ResizeTables.of(*run.size, recipe, device) for run in self.runs]
        shape = len(sizes), self.grid[0] * self.grid[1], values
        self.rows = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def places(self) -> list[tuple[str, int]]:
        """Find the place of each view in the input memory.

        Returns:
            For each view, the name of a field (``frames.`` and the group's number), and a row of this field.
        """
        return [(f"frames.{i}", row) for i, run in enumerate(self.runs) for row in range(run.views)]

    def write(self, frames: Sequence[Tensor], ops: Ops) -> Tensor:
        """Write the rows of patches, and return them, [V, patches, values]. The memory is the same for every call.

        Args:
            frames: For each group, uint8 [views, h, w, 3].
            ops: The operations.
        """
        for run, table, tensor in zip(self.runs, self.tables, frames, strict=True):
            ops.preprocess(tensor, table, self.patch, self.rows[run.first : run.first + run.views])
        return self.rows
