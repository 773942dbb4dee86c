"""A weight with a LoRA adapter (Hu et al. 2021): the product of the base weight plus a product of low rank.

    y = x W^T + (x A^T) B^T        A float32 [r, width], B float32 [rows, r] including the adapter's scale

The base weight is not copied. The second product and the sum are float32, and the result has the dtype of the first
product. PEFT computes in the same way (``tuners/lora/layer.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from sinew.layers.stores.store import Held, Store


class Factored(NamedTuple):
    """The tensors of a weight matrix with a LoRA adapter, for code that has these tensors without a module."""

    weight: Tensor
    scale: Tensor | None
    lora_a: Tensor
    lora_b: Tensor


@dataclass(frozen=True)
class LowRank(Store):
    """A store for a weight [rows, width] with a LoRA adapter: another store has the weight, and two more
    tensors are the factors of the adapter.

    Engines must not scale or join such a weight, because the factors would have to change too.

    Attributes:
        stored: The store of the base weight.
        rank: Rank of the adapter.
        width: Length of a row.
    """

    stored: Store
    rank: int
    width: int

    @property
    def kind(self) -> str:
        return f"{self.stored.kind} with an adapter"

    @property
    def coded(self) -> bool:  # type: ignore[override]
        return self.stored.coded

    def size(self, held: Held) -> tuple[int, int]:
        return self.stored.size(held)

    def dtype(self, held: Held) -> torch.dtype:
        return self.stored.dtype(held)

    def product(self, held: Held, x: Tensor, bias: Tensor | None = None) -> Tensor:
        down, up = _factors(held)
        whole = self.stored.product(held, x, bias)
        return (whole.float() + F.linear(F.linear(x.float(), down), up)).to(whole.dtype)

    def take(self, held: Held, ids: Tensor | tuple[int, ...]) -> Tensor:
        down, up = _factors(held)
        own = self.stored.take(held, ids)
        rows = torch.stack([up[i] for i in ids]) if isinstance(ids, tuple) else F.embedding(ids, up)
        return (own.float() + rows @ down).to(own.dtype)

    def widened(self, held: Held) -> Tensor:
        down, up = _factors(held)
        return self.stored.widened(held) + up @ down

    def form(self, rows: int, device: torch.device) -> dict[str, Tensor]:
        return self.stored.form(rows, device) | {
            "lora_a": torch.empty(self.rank, self.width, device=device),
            "lora_b": torch.empty(rows, self.rank, device=device),
        }

    def precision(self, part: str, dtype: str) -> str | None:
        return dtype if part.startswith("lora_") else self.stored.precision(part, dtype)


def _factors(held: Held) -> tuple[Tensor, Tensor]:
    tensors = cast(Factored, held)
    return tensors.lora_a, tensors.lora_b
