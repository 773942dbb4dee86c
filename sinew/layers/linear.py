"""A linear layer that computes in the precision of its weight.

Published checkpoints mix precisions (bfloat16 language model, float32 projections), so a layer's input
may arrive in another dtype. Casting here, and only here, keeps models free of dtype bookkeeping.
``quantized.py`` has the layers whose weights are stored in fewer bits.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rounded(value: float, dtype: torch.dtype) -> float:
    """``value`` as ``dtype`` holds it, to nearest, ties to even.

    A number, not a tensor: a tensor of a Python constant on a GPU is a copy from the host in every pass, which
    no CUDA graph can record.
    """
    step = torch.finfo(dtype).eps * 2.0 ** (math.frexp(value)[1] - 1)
    return round(value / step) * step


def linear_in_weight(layer: nn.Module) -> bool:
    """Return True if ``layer`` computes ``x W^T + b`` of its stored weight, so that rewrites may scale or join it.

    A class says so itself (``linear_in_weight = True`` in its own body). A subclass does not inherit it: one that
    quantises its weight on the fly (ternary layers) gives another result for a scaled or joined weight.
    """
    return vars(type(layer)).get("linear_in_weight", False)


class Linear(nn.Linear):
    linear_in_weight = True

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the result."""
        return self.weight.dtype

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(self.weight.dtype)  # some files keep biases wide
        return F.linear(x.to(self.weight.dtype), self.weight, bias)


class Embedding(nn.Embedding):
    """A table of rows. The indices are integers of the caller's making: never computed in low precision."""

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the rows."""
        return self.weight.dtype

    def rows(self, ids: tuple[int, ...]) -> Tensor:
        """Return rows [len(ids), C] of constant indices: no tensor of ids, which would be a copy from the host."""
        return torch.stack([self.weight[i] for i in ids])

    def logits(self, h: Tensor) -> Tensor:  # [..., C] -> [..., rows]
        """Return h W^T: a language head that is tied to its table."""
        return F.linear(h.to(self.weight.dtype), self.weight)

    def reset_parameters(self) -> None:
        # On meta tensors the normal distribution goes through torch._refs, which imports all of torch._dynamo
        # (seconds, 130 MB) to fill memory that is not there: weights of a bundle are assigned.
        if not self.weight.is_meta:
            super().reset_parameters()

    def forward(self, ids: Tensor) -> Tensor:
        if ids.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"row indices must be int64 or int32, got {ids.dtype}")
        return super().forward(ids)
