"""Action tokens in which each token is a bin of one number (RT-2, Brohan et al. 2023; OpenVLA, Kim et al. 2024)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np

from sinew.core import MAX_SIZE
from sinew.core.fields import Side, within
from sinew.steps.action_tokens.base import ActionTokens

Array = TypeVar("Array")  # a tensor or an array of integers


@dataclass(frozen=True)
class BinTokens(ActionTokens):
    """Action tokens that are bins of [-1, 1]. A sequence has one token for each number of the chunk, action
    by action.

    The token ``below - 1`` is the lowest bin, and each smaller token id is the next higher bin.

    Attributes:
        rows: Number of actions of a chunk.
        dims: Number of values of an action.
        points: Number of points in [-1, 1]. The intervals between them are the bins.
        below: The first token id after the ids of the bins. The bins have lower ids.
    """

    rows: Side
    dims: Side
    points: int
    below: int
    kind: Literal["bins"] = field(default="bins", kw_only=True, repr=False)
    end = -1

    def problems(self) -> Iterator[str]:
        yield from within(1, MAX_SIZE).problems("most", self.most)
        if not 1 < self.points <= self.below:
            yield f"points: expected 2 to {self.below}, got {self.points}"

    @property
    def most(self) -> int:  # type: ignore[override]
        return self.rows * self.dims

    @property
    def ids(self) -> tuple[int, int]:
        """Return the smallest and the largest token id that is a bin."""
        return self.below - self.points + 1, self.below - 1

    def chunk(self, said: np.ndarray) -> np.ndarray:
        return bin_centres(said, self.points, self.below).reshape(self.rows, self.dims).astype(np.float32)

    def __str__(self) -> str:
        return f"{self.points - 1} bins below token {self.below}"


def bin_centres(ids: Array, points: int, below: int) -> Array:
    """Return the centre of each token's bin, in [-1, 1]. An id outside of the bins counts as the nearest bin.

    Args:
        ids: Token ids, int64.
        points: Number of points in [-1, 1]. The intervals between the points are the bins.
        below: The first token id after the ids of the bins.
    """
    tokens: Any = ids
    intervals = points - 1
    bins = (below - 1 - tokens).clip(0, intervals - 1)
    centres: Array = (2 * bins + 1 - intervals) / intervals
    return centres
