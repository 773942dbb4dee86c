"""The form of a weight matrix in memory (its store), and the two operations that a model needs: a product,
and the selection of rows.

A module (``Linear`` or ``Embedding`` in ``linear.py``) owns the tensors, with the bundle's names, and has one
:class:`Store` that interprets the tensors. A store itself contains no tensors. It is a small record whose
methods take the module. So modules may be copied, joined and assigned. Such a change replaces only
``layer.store``, never the class of a module.
Each form has one class in ``stores/``:

| class | ``kind`` | tensors | arithmetic |
|---|---|---|---|
| ``plain.Plain`` | ``plain`` | ``weight``, floats | in the weight's own precision |
| ``half.Half`` | ``half`` | ``weight``, bfloat16 or float16 | float32 |
| ``codes.Codes`` | ``int8``, ``q8_0``, ``q4_0`` | ``weight``, uint8, and ``scale`` | integers (``lowbit.py``) |
| ``codes.Ternary`` | ``ternary`` | as ``Codes`` | integers, as in BitNet |
| ``codes.Bf16Panels`` | ``bf16`` | ``weight``, uint8 | products of bfloat16, sums in float32 (``lowbit.py``) |
| ``rows.Rows`` | of the wrapped store | of the wrapped store, maybe on another device | of the rows' dtype |
| ``WeightOnly`` (engine cuda) | ``int8``, ``q8_0``, ``q4_0`` | ``weight``, uint8 or int8, and ``scale`` | in floats |
| ``low_rank.LowRank`` | of the wrapped store | as wrapped, and ``lora_a``, ``lora_b`` | as wrapped, and float32 |

``sinew/engine/loading.py`` chooses the store of each weight. An architecture that requires the arithmetic of
one store (BitNet) sets this store when it creates the layer.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor


class Held(Protocol):
    """The owner of the tensors of a weight matrix: a module, or a :class:`Tensors`."""

    @property
    def weight(self) -> Tensor: ...
    @property
    def scale(self) -> Tensor | None: ...


class Tensors(NamedTuple):
    """The tensors of a weight matrix that does not belong to a module."""

    weight: Tensor
    scale: Tensor | None = None


class Store:
    """One form of a weight matrix W [rows, width] in memory, for example floats or low-bit integers.

    Attributes:
        joins: True if products are linear in the stored ``weight``. An engine may then scale its columns, or
            join its rows with the rows of another weight.
        stacks: True if an engine may join the rows of ``weight`` and of ``scale`` with those of another weight,
            but may not scale the columns.
        coded: True if the tensor ``weight`` contains bytes that encode the weights. False if it contains
            floats.
    """

    joins: ClassVar[bool] = False
    stacks: ClassVar[bool] = False
    coded: ClassVar[bool] = False

    @property
    @abstractmethod
    def kind(self) -> str:
        """Name of the form of the weight, such as "int8", for reports."""

    def size(self, held: Held) -> tuple[int, int]:
        """Return the size of the weight matrix W: its number of rows, and the width of a row."""
        rows, width = held.weight.shape
        return rows, width

    def dtype(self, held: Held) -> torch.dtype:
        """Return the dtype of the results: of products, and of selected rows."""
        return torch.float32

    @abstractmethod
    def product(self, held: Held, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return ``x W^T + bias`` [..., rows], for x [..., width]."""

    @abstractmethod
    def take(self, held: Held, ids: Tensor | tuple[int, ...]) -> Tensor:
        """Return selected rows of W, [..., width].

        Args:
            held: The owner of the tensors.
            ids: Indices of rows. Pass a tuple for constant indices: an index tensor would be a copy from the host,
                which a CUDA graph cannot record.
        """

    @abstractmethod
    def widened(self, held: Held) -> Tensor:
        """Return the weight matrix W converted to float32 [rows, width]."""

    def form(self, rows: int, device: torch.device) -> dict[str, Tensor]:
        """Create the tensors that the store needs, by name, without values.

        The result is empty if the store needs only the floating-point tensor ``weight``, [rows, width].
        """
        return {}

    def precision(self, part: str, dtype: str) -> str | None:
        """Return the precision in which the model computes with one of the store's tensors, for reports; None
        if no computation uses the tensor.

        Args:
            part: Name of the tensor.
            dtype: Name of its dtype.
        """
        return dtype
