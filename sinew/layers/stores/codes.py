"""Weights in few bits (``sinew/bundle/quant.py``), which are computed on as they are stored (``lowbit.py``)."""

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
    """Products of codes: activations are rounded to int8 row by row and multiplied as integers. The result is
    float32.

    Scaled or joined weights would have other codes, so rewrites do not apply.

    Attributes:
        name: Name of the format.
        scales: Number of float32 scales beside the rows; 0 if the rows contain them.
        smallest: Rows of smaller activations count as this large.
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
        """The operator's name for the layout of the codes."""
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
        from sinew.bundle.quant import FORMATS  # needs gguf, which a machine with a GPU alone may lack

        row_bytes = FORMATS[self.name].row_bytes(self.width)
        made = {"weight": torch.empty(rows, row_bytes, dtype=torch.uint8, device=device)}
        return made | ({"scale": torch.empty(self.scales, device=device)} if self.scales else {})

    def precision(self, part: str, word: str) -> str:
        return self.name if part == "weight" else word


@dataclass(frozen=True)
class Panels(Codes):
    """Codes of int8 that were laid out once as kernels read them, in place of at every product."""

    @property
    def order(self) -> str:
        return PANELS

    def take(self, held: Held, ids: Tensor | tuple[int, ...]) -> Tensor:
        return self.widened(held)[torch.as_tensor(ids, device=held.weight.device)]

    def widened(self, held: Held) -> Tensor:
        return super().widened(Tensors(laid_back(held.weight), held.scale))


@dataclass(frozen=True)
class Bf16Panels(Panels):
    """Weights in bfloat16, laid out likewise: activations are rounded to it, and products added in float32.

    Attributes:
        sums: The order of the sums, of :data:`lowbit.HALVES`.
    """

    sums: str = BF16_PANELS

    @property
    def order(self) -> str:
        return self.sums

    def widened(self, held: Held) -> Tensor:
        return dequantize(held.weight, None, self.order, self.width)

    def form(self, rows: int, device: torch.device) -> dict[str, Tensor]:
        return {"weight": torch.empty(rows, 2 * self.width, dtype=torch.uint8, device=device)}


@dataclass(frozen=True)
class Ternary(Codes):
    """BitNet's: the products are the architecture's own arithmetic, not a rounding of another."""

    smallest: ClassVar[float] = 1e-5


def codes(kind: str, width: int, scales: int = 0) -> Codes:
    """Return the store of weights in format ``kind``."""
    return (Ternary if kind == "ternary" else Codes)(kind, width, scales)


def codes_of(layer: nn.Module | None) -> Codes | None:
    """Return the store of a layer that multiplies codes; None for any other layer."""
    store = getattr(layer, "store", None)
    return store if isinstance(store, Codes) else None


def apart(layers: Sequence[nn.Module]) -> str | None:
    """Return why layers that read the same input cannot share its rounding; None if they can."""
    stores = [codes_of(layer) for layer in layers]
    if None in stores:
        return "weights in floats"
    return "several formats" if len({store.order for store in stores if store}) > 1 else None


def together(layers: Sequence[Any], x: Tensor) -> list[Tensor]:
    """Return the product of each layer with x [..., K]. The layers are not :func:`apart`, so x is rounded once."""
    biases = [None if layer.bias is None else layer.bias.float() for layer in layers]
    weights, scales, store = (
        [layer.weight for layer in layers],
        [layer.scale for layer in layers],
        layers[0].store,
    )
    return lowbit_linears(x.float(), weights, scales, biases, store.order, store.smallest)
