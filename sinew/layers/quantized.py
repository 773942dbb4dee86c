"""Layers whose weights are stored in few bits (``sinew/bundle/quant.py``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sinew.layers.linear import Embedding, Linear
from sinew.layers.lowbit import TINY, dequantize, lowbit_linear, lowbit_linears
from sinew.layers.tables import StoredRows

TERNARY_SMALLEST = 1e-5  # BitNet's: rows of smaller activations count as this large


def _stored(name: str, channels: int, k: int) -> nn.Parameter:
    from sinew.bundle.quant import FORMATS  # needs gguf, which a machine with a GPU alone may lack

    return nn.Parameter(
        torch.empty(channels, FORMATS[name].row_bytes(k), dtype=torch.uint8), requires_grad=False
    )


class QuantizedLinear(nn.Module):
    """A linear layer that computes on its stored weights: activations are rounded to int8 row by row, products are
    summed as integers. Its result is float32.

    name: the format. scales: how many float32 scales there are beside the rows, 0 where the rows hold them.
    """

    linear_in_weight = False  # scaled or joined weights would have other codes

    def __init__(self, name: str, in_features: int, out_features: int, bias: bool, scales: int = 0):
        super().__init__()
        self.name, self.in_features, self.out_features = name, in_features, out_features
        self.smallest = TERNARY_SMALLEST if name == "ternary" else TINY
        self.weight = _stored(name, out_features, in_features)
        self.scale = nn.Parameter(torch.empty(scales), requires_grad=False) if scales else None
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the result."""
        return torch.float32

    def forward(self, x: Tensor) -> Tensor:  # [..., K] -> [..., N]
        bias = None if self.bias is None else self.bias.float()
        return lowbit_linear(x.float(), self.weight, self.scale, bias, self.name, self.smallest)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.name}, bias={self.bias is not None}"


def apart(layers: Sequence[nn.Module]) -> str | None:
    """Return why layers that read the same input cannot share its rounding; None if they can."""
    if not all(isinstance(layer, QuantizedLinear) for layer in layers):
        return "weights in floats"
    found: Any = layers
    return "several formats" if len({(layer.name, layer.smallest) for layer in found}) > 1 else None


def together(layers: Sequence[Any], x: Tensor) -> list[Tensor]:
    """Return what each of ``layers`` gives for x [..., K]; they are not :func:`apart`, so x is rounded once."""
    biases = [None if layer.bias is None else layer.bias.float() for layer in layers]
    weights, scales = [layer.weight for layer in layers], [layer.scale for layer in layers]
    return lowbit_linears(x.float(), weights, scales, biases, layers[0].name, layers[0].smallest)


def linear_layer(ternary: bool) -> Callable[..., Any]:
    """Return what makes a linear layer of (in, out, bias): BitNet's, with one scale, or one with plain weights."""
    return _ternary if ternary else Linear


def _ternary(in_features: int, out_features: int, bias: bool = True) -> QuantizedLinear:
    return QuantizedLinear("ternary", in_features, out_features, bias, scales=1)


class QuantizedEmbedding(StoredRows):
    """A table of rows in few bits; those that are read become floats."""

    def __init__(self, name: str, rows: int, width: int, scales: int = 0):
        super().__init__()
        self.name, self.embedding_dim = name, width
        self.weight = _stored(name, rows, width)
        self.scale = nn.Parameter(torch.empty(scales), requires_grad=False) if scales else None

    def forward(self, ids: Tensor) -> Tensor:  # [...] -> [..., C]
        if ids.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"row indices must be int64 or int32, got {ids.dtype}")
        flat = ids.flatten().to(self.weight.device)
        scale = self.scale if self.scale is None or self.scale.numel() == 1 else self.scale[flat]
        made = dequantize(self.weight[flat], scale, self.name, self.embedding_dim)
        return self.converted(made.view(*ids.shape, self.embedding_dim))

    def rows(self, ids: tuple[int, ...]) -> Tensor:
        """Return what :meth:`Embedding.rows` does."""
        return self.forward(torch.tensor(ids, device=self.weight.device))


def quantized_twin(layer: nn.Module, name: str, scales: int) -> nn.Module | None:
    """Return a layer of ``layer``'s sizes for weights in format ``name``; None for a kind that has none."""
    if type(layer) is Linear:
        return QuantizedLinear(name, layer.in_features, layer.out_features, layer.bias is not None, scales)
    if type(layer) is Embedding:
        return QuantizedEmbedding(name, layer.num_embeddings, layer.embedding_dim, scales)
    return None


def width_of(layer: nn.Module) -> int | None:
    """Return k, the length of a row of the layer's weight; None for a kind that has no low-bit form."""
    if type(layer) is Linear or isinstance(layer, QuantizedLinear):
        return int(layer.in_features)
    if type(layer) is Embedding or isinstance(layer, QuantizedEmbedding):
        return int(layer.embedding_dim)
    return None
