"""A linear layer and a table of rows. Their store (``store.py``) defines how the weight is in memory.

Published checkpoints mix precisions (bfloat16 language model, float32 projections), so a layer's input may have
another dtype. Casting in a store, and only there, keeps models free of dtype bookkeeping.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from sinew.layers.stores.codes import codes
from sinew.layers.stores.plain import PLAIN
from sinew.layers.stores.store import Store


def rounded(value: float, dtype: torch.dtype) -> float:
    """``value`` as ``dtype`` holds it, to nearest, ties to even.

    A number, not a tensor: a tensor of a Python constant on a GPU is a copy from the host in every pass, which
    no CUDA graph can record.
    """
    step = torch.finfo(dtype).eps * 2.0 ** (math.frexp(value)[1] - 1)
    return round(value / step) * step


def not_linear(layer: nn.Module) -> str | None:
    """Return why ``layer`` does not compute ``x W^T + b`` of its stored ``weight``, so that rewrites must not scale
    or join it; None if it does.

    A class declares it (``linear_in_weight = True`` in its own body). A subclass does not inherit it: one that
    quantises its weight on the fly (ternary layers) has another result for a scaled or joined weight.
    """
    if not vars(type(layer)).get("linear_in_weight", False):
        return f"{type(layer).__name__} is not linear in its weight"
    store = getattr(layer, "store", PLAIN)
    if store.joins:
        return None
    return f"{store.kind} is not linear in its {'codes' if store.coded else 'weight alone'}"


class _Stored(nn.Module):
    """A module with a matrix in the form of its store. Tensors that the store lacks are None."""

    weight: Any
    scale: Tensor | None
    lora_a: Tensor | None
    lora_b: Tensor | None
    store: Store

    def __init__(self, *sizes: int, **options: Any):
        super().__init__(*sizes, **options)
        for name in ("scale", "lora_a", "lora_b"):
            self.register_parameter(name, None)
        self.store = PLAIN

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of products and rows."""
        return self.store.dtype(self)

    def reset_parameters(self) -> None:
        # Weights of a bundle are assigned. On meta tensors torch fills memory that is not there in its Python
        # decompositions: a sixth of the time that opening a small policy takes. The normal distribution of a table
        # imports all of torch._dynamo for it (seconds, 130 MB).
        if not self.weight.is_meta:
            super().reset_parameters()  # type: ignore[misc]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.store.kind}"


class Linear(_Stored, nn.Linear):
    linear_in_weight = True  # as far as its store's is

    def __init__(self, in_features: int, out_features: int, bias: bool = True, **options: Any):
        super().__init__(in_features, out_features, bias=bias, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.store.product(self, x, self.bias)


class Embedding(_Stored, nn.Embedding):
    """A table of rows. The indices are integers of the caller's making: never computed in low precision."""

    def rows(self, ids: tuple[int, ...]) -> Tensor:
        """Return rows [len(ids), C] of constant indices: no tensor of ids, which would be a copy from the host."""
        return self.store.take(self, ids)

    def logits(self, h: Tensor) -> Tensor:  # [..., C] -> [..., rows]
        """Return h W^T: a language head that is tied to its table."""
        return self.store.product(self, h)

    def forward(self, ids: Tensor) -> Tensor:
        if ids.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"row indices must be int64 or int32, got {ids.dtype}")
        return self.store.take(self, ids)


def width_of(layer: nn.Module) -> int | None:
    """Return the length of a row of the layer's weight; None for a class without a store.

    A subclass may compute with its weight in any way, so its weight stays as it was made.
    """
    if type(layer) is Linear:
        return layer.in_features
    return layer.embedding_dim if type(layer) is Embedding else None


def hold(layer: Linear | Embedding, store: Store) -> None:
    """Set the store of ``layer``. Tensors of another form have no values until they are assigned."""
    layer.store = store
    for name, tensor in store.form(len(layer.weight), layer.weight.device).items():
        setattr(layer, name, nn.Parameter(tensor, requires_grad=False))


def linear_layer(ternary: bool) -> Any:
    """Return a function that makes a linear layer of (in, out, bias): BitNet's, with one scale, or one with plain
    weights.
    """
    return _ternary if ternary else Linear


def _ternary(in_features: int, out_features: int, bias: bool = True) -> Linear:
    layer = Linear(in_features, out_features, bias)
    hold(layer, codes("ternary", in_features, scales=1))
    return layer
