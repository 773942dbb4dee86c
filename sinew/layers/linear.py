"""A linear layer, a table of rows (embedding), and a convolution over rows.

Each layer has a store (``stores/store.py``). The store is the object that decides in which form the weight is
in memory, for example as floats or as low-bit integers, and that multiplies by the weight.

Published checkpoints mix precisions, for example a bfloat16 language model with float32 projections. The
input of a layer may therefore have another dtype than its weight. Only a store casts between dtypes, so that
models contain no casts.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinew.layers.stores.codes import codes
from sinew.layers.stores.plain import PLAIN
from sinew.layers.stores.store import Store

# A float32 convolution on a CPU is computed as one matrix product if it has at most FEW_ROWS rows, or a weight of at
# least MANY_NUMBERS numbers. In these cases PyTorch's convolution would take longer, because it reorders the weight in
# each call.
FEW_ROWS, MANY_NUMBERS = 8, 1 << 22


def rounded(value: float, dtype: torch.dtype) -> float:
    """Round ``value`` to the nearest number of ``dtype``, ties to even.

    The result is a Python number. The result must not be a tensor: on a GPU, each pass would copy the constant from the
    CPU, and a CUDA graph cannot record such a copy.
    """
    step = torch.finfo(dtype).eps * 2.0 ** (math.frexp(value)[1] - 1)
    return round(value / step) * step


def not_linear(layer: nn.Module) -> str | None:
    """Return the reason why an engine must not scale or join the stored ``weight`` of a layer; None if the
    engine may do so.

    Scaling or joining weights is correct only for a layer that computes ``x W^T + b`` with its stored weight.
    A class declares this with ``linear_in_weight = True`` in its own body. A subclass does not inherit the
    declaration, because a subclass that quantises its weight during the product has another result for a
    scaled or joined weight.
    """
    if not vars(type(layer)).get("linear_in_weight", False):
        return f"{type(layer).__name__} is not linear in its weight"
    store = getattr(layer, "store", PLAIN)
    if store.joins:
        return None
    return f"{store.kind} is not linear in its {'codes' if store.coded else 'weight alone'}"


class Stored(nn.Module):
    """A module with a weight matrix, whose store (:class:`Store`) decides the form of the matrix in memory.

    Tensors that the store does not use are None.

    Attributes:
        weight: The matrix.
        scale: Scales of low-bit weights.
        lora_a: First factor of a LoRA adapter.
        lora_b: Second factor of a LoRA adapter.
        store: The store that interprets these tensors.
    """

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
        """Return the dtype of the results: of the products of a linear layer, and of the rows that a table
        returns.
        """
        return self.store.dtype(self)

    def reset_parameters(self) -> None:
        # A bundle's weights are assigned later, so random values are not needed. For a meta tensor torch would run its
        # Python decompositions of the fill, which takes a sixth of the time of opening a small policy. The normal
        # distribution of a table would also import all of torch._dynamo (seconds, 130 MB).
        if not self.weight.is_meta:
            super().reset_parameters()  # type: ignore[misc]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.store.kind}"


class Linear(Stored, nn.Linear):
    """A linear layer whose store computes the product."""

    # True means: the layer computes a plain product with its weight, if its store does so too (see
    # not_linear).
    linear_in_weight = True

    def __init__(self, in_features: int, out_features: int, bias: bool = True, **options: Any):
        super().__init__(in_features, out_features, bias=bias, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.store.product(self, x, self.bias)


class Embedding(Stored, nn.Embedding):
    """A table of rows. The caller passes integer indices, which no layer computes in low precision."""

    def rows(self, ids: tuple[int, ...]) -> Tensor:
        """Return the rows of the table with constant indices, [len(ids), C].

        The function takes a tuple instead of an index tensor, because such a tensor would be copied from the
        CPU to the GPU at each call.
        """
        return self.store.take(self, ids)

    def logits(self, h: Tensor) -> Tensor:  # [..., C] -> [..., rows]
        """Return h W^T, for a language head that is tied to the token table."""
        return self.store.product(self, h)

    def forward(self, ids: Tensor) -> Tensor:
        if ids.dtype not in (torch.int64, torch.int32):
            raise TypeError(
                f"row indices must be int64 or int32, got {ids.dtype}; convert them with ids.long()"
            )
        return self.store.take(self, ids)


class Conv1d(Stored, nn.Conv1d):
    """A convolution over the rows (actions) of a chunk, computed in the precision of its weight.

    The rows of a low-bit weight are those of a matrix product: channel by channel, and within a channel row by row of
    the window. If torch records the model as a graph, the graph contains a convolution with floats as one operator.
    """

    def windows(self, x: Tensor) -> Tensor:
        """Return the numbers that the weight multiplies for each row of the result.

        Args:
            x: [B, C, H].

        Returns:
            [B, H', C * kernel].
        """
        assert not isinstance(self.padding, str)
        (kernel,), (stride,), (padding,) = self.kernel_size, self.stride, self.padding
        spread = F.pad(x, (padding, padding)).unfold(2, kernel, stride)  # [B, C, H', kernel]
        return spread.transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:  # input shape [B, C, H], output shape [B, C', H']
        x = x.to(self.dtype)
        if self.store.coded:
            return self.store.product(self, self.windows(x), self.bias).transpose(1, 2)
        if x.device.type != "cpu" or x.dtype != torch.float32 or torch.compiler.is_compiling():
            return super().forward(x)
        assert not isinstance(self.padding, str)
        rows = (x.shape[2] + 2 * self.padding[0] - self.kernel_size[0]) // self.stride[0] + 1
        if x.shape[0] * rows > FEW_ROWS and self.weight.numel() < MANY_NUMBERS:
            return super().forward(x)
        return F.linear(self.windows(x), self.weight.flatten(1), self.bias).transpose(1, 2)


def width_of(layer: nn.Module) -> int | None:
    """Return the length of a row of the layer's weight. None for a module of any other class than those of this file.

    A subclass may compute with its weight in any way, so the weight of a subclass must not be converted.
    """
    if type(layer) is Linear:
        return layer.in_features
    if type(layer) is Conv1d:
        return layer.in_channels * layer.kernel_size[0]
    return layer.embedding_dim if type(layer) is Embedding else None


def hold(layer: Stored, store: Store) -> None:
    """Set the store of ``layer`` (the form of its weight in memory), and create the tensors that the store
    needs. The new tensors have no values yet.
    """
    layer.store = store
    for name, tensor in store.form(len(layer.weight), layer.weight.device).items():
        setattr(layer, name, nn.Parameter(tensor, requires_grad=False))


def linear_layer(ternary: bool) -> Any:
    """Return a function that creates a linear layer from (in, out, bias).

    Args:
        ternary: True for BitNet's layer, with ternary weights and one scale. False for a layer with plain weights.
    """
    return _ternary if ternary else Linear


def _ternary(in_features: int, out_features: int, bias: bool = True) -> Linear:
    layer = Linear(in_features, out_features, bias)
    hold(layer, codes("ternary", in_features, scales=1))
    return layer
