"""The store of floating-point weights that are multiplied as they are, without a conversion."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sinew.layers.stores.store import Held, Store


@dataclass(frozen=True)
class Plain(Store):
    """A store of floating-point weights, whose products have the precision of the weight."""

    joins = True
    kind = "plain"

    def dtype(self, held: Held) -> torch.dtype:
        return held.weight.dtype

    def product(self, held: Held, x: Tensor, bias: Tensor | None = None) -> Tensor:
        weight = held.weight
        bias = None if bias is None else bias.to(weight.dtype)  # Some files store biases in a wider dtype.
        return F.linear(x.to(weight.dtype), weight, bias)

    def take(self, held: Held, ids: Tensor | tuple[int, ...]) -> Tensor:
        if isinstance(ids, tuple):
            return torch.stack([held.weight[i] for i in ids])
        return F.embedding(ids, held.weight)

    def widened(self, held: Held) -> Tensor:
        return held.weight.float()


PLAIN = Plain()
