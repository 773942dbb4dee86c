"""Low-bit weights in GPU memory, which a product converts in its registers (weight-only, W8A16 and W4A16).

A bundle stores the scales of ``q8_0`` and ``q4_0`` between the codes, in blocks of 34 and 18 bytes. A GPU reads aligned
blocks of 16 bytes, so codes and scales become two tensors when the model is loaded. No bit of them changes.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sinew.engine.cuda.kernels import weight_only_linear
from sinew.layers.linear import Conv1d, Linear
from sinew.layers.stores.codes import Codes
from sinew.layers.stores.plain import PLAIN
from sinew.layers.stores.store import Held, Store, Tensors

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WeightOnly(Store):
    """A store of low-bit weights whose products do not round the activations.

    The tensors are those of ``kernels/weight_only_linear.py``: ``weight`` contains the codes, int8 [rows, width] or
    uint8 [rows, width / 2], and ``scale`` is float32 [rows] or float16 [rows, width / 32].

    Attributes:
        name: Name of the format in the bundle.
        width: Length of a row in weights.
        of: Dtype of the products.
    """

    name: str
    width: int
    of: torch.dtype
    coded = True
    stacks = True

    @property
    def kind(self) -> str:
        return self.name

    def size(self, held: Held) -> tuple[int, int]:
        return len(held.weight), self.width

    def dtype(self, held: Held) -> torch.dtype:
        return self.of

    def product(self, held: Held, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute the product with the kernel on a GPU, and with the kernel's reference on another device."""
        flat = x.to(self.of).reshape(-1, self.width)
        on_gpu = x.device.type == "cuda"
        compute = weight_only_linear.weight_only_linear if on_gpu else weight_only_linear.reference
        y = compute(flat, held.weight, _scale(held), bias=bias)
        return y.view(*x.shape[:-1], len(held.weight))

    def take(self, held: Held, ids: Tensor | tuple[int, ...]) -> Tensor:
        at = torch.as_tensor(ids, device=held.weight.device)
        flat = at.flatten()
        rows = self.widened(Tensors(held.weight[flat], _scale(held)[flat]))
        return rows.to(self.of).view(*at.shape, self.width)

    def widened(self, held: Held) -> Tensor:
        return weight_only_linear.widened(held.weight, _scale(held))

    def form(self, rows: int, device: torch.device) -> dict[str, Tensor]:
        halved = self.name == "q4_0"
        kind = torch.uint8 if halved else torch.int8
        groups = torch.empty(rows, self.width // weight_only_linear.GROUP, dtype=torch.float16, device=device)
        return {
            "weight": torch.empty(rows, self.width // 2 if halved else self.width, dtype=kind, device=device),
            "scale": torch.empty(rows, device=device) if self.name == "int8" else groups,
        }

    def precision(self, part: str, dtype: str) -> str:
        return self.name if part in ("weight", "scale") else dtype


def _scale(held: Held) -> Tensor:
    assert held.scale is not None, "a weight of this store always has scales"
    return held.scale


def keep_codes(model: nn.Module, dtype: torch.dtype) -> None:
    """Give each low-bit linear layer of a loaded model the store :class:`WeightOnly`, in place.

    Low-bit convolutions become floats, because no kernel multiplies them.

    BitNet's ternary layers stay unchanged, because rounded activations belong to their architecture.

    Args:
        model: The model.
        dtype: Dtype of the products.
    """
    convolutions = 0
    for layer in model.modules():
        if not isinstance(layer, Linear | Conv1d) or type(store := layer.store) is not Codes:
            continue
        if isinstance(layer, Conv1d):
            wide = store.widened(layer).unflatten(1, (layer.in_channels, *layer.kernel_size))
            layer.weight, layer.scale = nn.Parameter(wide.to(dtype), requires_grad=False), None
            layer.store = PLAIN
            convolutions += 1
            continue
        codes, scales = split(layer.weight, layer.scale, store)
        layer.store = WeightOnly(store.name, store.width, dtype)
        layer.weight = nn.Parameter(codes, requires_grad=False)
        layer.scale = nn.Parameter(scales, requires_grad=False)
    if convolutions:
        log.warning(
            "engine cuda: %d convolutions become floats, because no kernel multiplies their low-bit weights",
            convolutions,
        )


def split(weight: Tensor, scale: Tensor | None, store: Codes) -> tuple[Tensor, Tensor]:
    """Return the codes and the scales of a stored weight as two contiguous tensors, in the form of :class:`WeightOnly`.

    Args:
        weight: Stored rows, uint8 [rows, bytes].
        scale: float32 [rows] or [1]. None if the rows contain their scales.
        store: The store of the weight.
    """
    rows = len(weight)
    if scale is not None:
        return weight.view(torch.int8), scale.expand(rows).contiguous()
    blocks: Any = weight.view(rows, store.width // weight_only_linear.GROUP, -1)
    scales = blocks[..., :2].contiguous().view(torch.float16)[..., 0]
    codes = blocks[..., 2:].reshape(rows, -1)
    return (codes.view(torch.int8) if store.name == "q8_0" else codes), scales
