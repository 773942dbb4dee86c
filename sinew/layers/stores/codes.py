"""The stores (classes for the form of a weight in memory) of low-bit weights, in the formats of
``sinew/bundle/quant.py``.

The matrix products of ``lowbit.py`` read the weights in their stored form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sinew.layers.stores.lowbit import (
    BF16_PANELS,
    PANELS,
    TINY,
    dequantize,
    laid_back,
    lowbit_linear,
    lowbit_linears,
)
from sinew.layers.stores.store import Held, Store, Tensors


@dataclass(frozen=True)
class Codes(Store):
    """A store of low-bit weights. A product rounds each row of activations to int8 and multiplies integers.
    Its result is float32.

    Engines must not scale or join such weights, because the stored integers (codes) would change.

    Attributes:
        name: Name of the format.
        width: Number of weights in a row.
        scales: Number of float32 scales in a separate tensor. 0 if the rows contain their scales.
        smallest: Lower bound for the largest activation of a row, which avoids a division by zero.
    """

    name: str
    width: int
    scales: int = 0
    smallest: ClassVar[float] = TINY
    coded = True

    @property
    def kind(self) -> str:
        return self.name

    @property
    def order(self) -> str:
        """The name of the memory layout of the integer weights, as the operator of the product expects it."""
        return self.name

    def size(self, held: Held) -> tuple[int, int]:
        return len(held.weight), self.width

    def product(self, held: Held, x: Tensor, bias: Tensor | None = None) -> Tensor:
        bias = None if bias is None else bias.float()
        return lowbit_linear(x.float(), held.weight, held.scale, bias, self.order, self.smallest)

    def take(self, held: Held, ids: Tensor | tuple[int, ...]) -> Tensor:
        at = torch.as_tensor(ids, device=held.weight.device)
        flat = at.flatten()
        scale = held.scale if held.scale is None or held.scale.numel() == 1 else held.scale[flat]
        return self.widened(Tensors(held.weight[flat], scale)).view(*at.shape, self.width)

    def widened(self, held: Held) -> Tensor:
        return dequantize(held.weight, held.scale, self.name, self.width)

    def form(self, rows: int, device: torch.device) -> dict[str, Tensor]:
        # sinew.bundle.quant requires gguf, which may be missing on a machine that uses only a GPU.
        from sinew.bundle.quant import FORMATS

        row_bytes = FORMATS[self.name].row_bytes(self.width)
        tensors = {"weight": torch.empty(rows, row_bytes, dtype=torch.uint8, device=device)}
        return tensors | ({"scale": torch.empty(self.scales, device=device)} if self.scales else {})

    def precision(self, part: str, dtype: str) -> str:
        return self.name if part == "weight" else dtype


@dataclass(frozen=True)
class Panels(Codes):
    """A store of int8 weights in the memory layout that the compiled kernels read, so that no product has to
    convert the layout.

    Attributes:
        laid: The memory layout, one of :data:`lowbit.INTEGERS`.
    """

    laid: str = PANELS

    @property
    def order(self) -> str:
        return self.laid

    def take(self, held: Held, ids: Tensor | tuple[int, ...]) -> Tensor:
        return self.widened(held)[torch.as_tensor(ids, device=held.weight.device)]

    def widened(self, held: Held) -> Tensor:
        return super().widened(Tensors(laid_back(held.weight, self.laid), held.scale))


@dataclass(frozen=True)
class Bf16Panels(Panels):
    """A store of bfloat16 weights in the memory layout that the kernels read.

    Activations are rounded to bfloat16, and products are added in float32.

    Attributes:
        laid: The order in which products are added, one of :data:`lowbit.HALVES`. Their memory layout is the same.
    """

    laid: str = BF16_PANELS

    def widened(self, held: Held) -> Tensor:
        return dequantize(held.weight, None, self.order, self.width)

    def form(self, rows: int, device: torch.device) -> dict[str, Tensor]:
        return {"weight": torch.empty(rows, 2 * self.width, dtype=torch.uint8, device=device)}


@dataclass(frozen=True)
class Ternary(Codes):
    """A store of BitNet's ternary weights (-1, 0 and 1). BitNet itself defines the low-bit product, so the
    product is not an approximation.
    """

    smallest: ClassVar[float] = 1e-5


def codes(kind: str, width: int, scales: int = 0) -> Codes:
    """Return the store of low-bit weights in the format ``kind``.

    Args:
        kind: Name of the format.
        width: Number of weights in a row.
        scales: Number of float32 scales in a separate tensor.
    """
    return (Ternary if kind == "ternary" else Codes)(kind, width, scales)


def codes_of(layer: nn.Module | None) -> Codes | None:
    """Return the store of a layer with low-bit weights; None for any other layer."""
    store = getattr(layer, "store", None)
    return store if isinstance(store, Codes) else None


def apart(layers: Sequence[nn.Module]) -> str | None:
    """Return the reason why several layers with the same input cannot share one copy of this input that is
    rounded to int8; None if they can.
    """
    stores = [codes_of(layer) for layer in layers]
    if None in stores:
        return "weights in floats"
    return "several formats" if len({store.order for store in stores if store}) > 1 else None


def together(layers: Sequence[Any], x: Tensor) -> list[Tensor]:
    """Return the product of each layer with x [..., K]. The input x is rounded only once, for all layers.

    The layers must be able to share the rounded input, that is, :func:`apart` must return None.
    """
    biases = [None if layer.bias is None else layer.bias.float() for layer in layers]
    weights, scales, store = (
        [layer.weight for layer in layers],
        [layer.scale for layer in layers],
        layers[0].store,
    )
    return lowbit_linears(x.float(), weights, scales, biases, store.order, store.smallest)
