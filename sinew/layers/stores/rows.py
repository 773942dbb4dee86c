"""Tables that stay as a bundle stores them, in the file's memory map: only rows that are read are converted.

A table of 128,264 rows of 2,560 numbers is 1.3 GB in float32, and a prompt reads some fifty of its rows. A row that is
converted alone has the same bits as in a table that is converted whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sinew.layers.stores.store import Held, Store

BLOCK = 1024  # rows that are converted at once where all of them are read


@dataclass(frozen=True)
class Rows(Store):
    """Rows of a table in ``stored``, given in one dtype on one device."""

    stored: Store
    of: torch.dtype
    device: torch.device

    @property
    def kind(self) -> str:
        return self.stored.kind

    @property
    def coded(self) -> bool:  # type: ignore[override]
        return self.stored.coded

    def size(self, held: Held) -> tuple[int, int]:
        return self.stored.size(held)

    def dtype(self, held: Held) -> torch.dtype:
        return self.of

    def product(self, held: Held, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the product with the rows as they are given, a block of them at a time."""
        count, x = self.size(held)[0], x.to(self.of)
        blocks = (torch.arange(i, min(i + BLOCK, count), device=x.device) for i in range(0, count, BLOCK))
        made = torch.cat([F.linear(x, self.take(held, block)) for block in blocks], dim=-1)
        return made if bias is None else made + bias.to(self.of)

    def take(self, held: Held, ids: Tensor | tuple[int, ...]) -> Tensor:
        return self._given(
            self.stored.take(held, ids if isinstance(ids, tuple) else ids.to(held.weight.device))
        )

    def widened(self, held: Held) -> Tensor:
        return self._given(self.stored.widened(held)).float()

    def form(self, rows: int, device: torch.device) -> dict[str, Tensor]:
        return self.stored.form(rows, device)

    def precision(self, part: str, word: str) -> None:
        return None

    def _given(self, rows: Tensor) -> Tensor:
        """Return stored rows as a model computes on them; without memory they stay on the meta device."""
        return rows.to(device=rows.device if rows.is_meta else self.device, dtype=self.of)
