"""A store for tables of tokens that stay in the memory map of the bundle's file. Only the rows that a request
reads are converted.

A table of 128,264 rows of 2,560 numbers takes 1.3 GB in float32, and a prompt reads about fifty of its rows.
A row that is converted alone has the same bits as a row of a table that is converted completely.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sinew.layers.stores.store import Held, Store

# Number of rows that are converted together if a product reads all rows.
BLOCK = 1024


@dataclass(frozen=True)
class Rows(Store):
    """A store that wraps the store of a table. Only selected rows are converted to one dtype and copied to
    one device.

    Attributes:
        stored: The store of the table.
        of: dtype of the converted rows.
        device: Device of the converted rows.
    """

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
        """Return x W^T + bias. The rows of W are converted and multiplied block by block."""
        count, x = self.size(held)[0], x.to(self.of)
        blocks = (torch.arange(i, min(i + BLOCK, count), device=x.device) for i in range(0, count, BLOCK))
        product = torch.cat([F.linear(x, self.take(held, block)) for block in blocks], dim=-1)
        return product if bias is None else product + bias.to(self.of)

    def take(self, held: Held, ids: Tensor | tuple[int, ...]) -> Tensor:
        return self._given(
            self.stored.take(held, ids if isinstance(ids, tuple) else ids.to(held.weight.device))
        )

    def widened(self, held: Held) -> Tensor:
        return self._given(self.stored.widened(held)).float()

    def form(self, rows: int, device: torch.device) -> dict[str, Tensor]:
        return self.stored.form(rows, device)

    def precision(self, part: str, dtype: str) -> None:
        return None

    def _given(self, rows: Tensor) -> Tensor:
        """Convert selected rows to the dtype of the model and copy them to its device. Rows on the meta
        device, which only has shapes, stay on it.
        """
        return rows.to(device=rows.device if rows.is_meta else self.device, dtype=self.of)
