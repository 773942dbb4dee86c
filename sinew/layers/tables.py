"""Token tables that stay as a bundle stores them, in the file's memory map: only rows that are read are converted.

A table of 128,264 rows of 2,560 numbers is 1.3 GB in float32, and a prompt reads some fifty of its rows. A row that is
converted alone has the same bits as in a table that is converted whole.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinew.core import PROMPT_TABLE
from sinew.layers.linear import Embedding

BLOCK = 1024  # rows that are converted at once where all of them are read


class StoredRows(nn.Module):
    """A table that keeps its stored form, and gives rows of one dtype on one device."""

    weight: Tensor
    row_dtype = torch.float32
    row_device = torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the rows."""
        return self.row_dtype

    def converted(self, rows: Tensor) -> Tensor:
        """Return stored rows as a model computes on them; without memory they stay on the meta device."""
        device = rows.device if rows.is_meta else self.row_device
        return rows.to(device=device, dtype=self.row_dtype)

    def logits(self, h: Tensor) -> Tensor:  # [..., C] -> [..., rows]
        """Return what :meth:`Embedding.logits` does of the rows as they are given, a block of them at a time."""
        count, h = len(self.weight), h.to(self.row_dtype)
        blocks = (torch.arange(i, min(i + BLOCK, count), device=h.device) for i in range(0, count, BLOCK))
        return torch.cat([F.linear(h, self(block)) for block in blocks], dim=-1)


class StoredEmbedding(StoredRows, Embedding):
    """A table of floats of another precision than the rows that it gives, or in another memory."""

    def rows(self, ids: tuple[int, ...]) -> Tensor:
        """Return what :meth:`Embedding.rows` does."""
        return self.converted(super().rows(ids))

    def forward(self, ids: Tensor) -> Tensor:  # [...] -> [..., C]
        return self.converted(super().forward(ids.to(self.weight.device)))


def keep_stored(layer: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Let the token table ``layer`` keep its weights and give rows of ``dtype`` on ``device``; change it in place."""
    if not isinstance(layer, StoredRows):
        layer.__class__ = StoredEmbedding
    assert isinstance(layer, StoredRows)
    layer.row_dtype, layer.row_device = dtype, device


def is_token_table(name: str, layer: nn.Module) -> bool:
    """Return True for a language model's table of tokens. Other tables are added whole, or are positions."""
    return name.rpartition(".")[2] == PROMPT_TABLE and (
        type(layer) is Embedding or isinstance(layer, StoredRows)
    )
