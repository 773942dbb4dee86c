"""The storage of a weight matrix, and the two operations of a model on it: a product, and rows.

A module (``linear.py``: ``Linear``, ``Embedding``) has the tensors, with the bundle's names, and one :class:`Store`
that interprets them. A store has no tensors: it is a small record that gets the module. So modules may be copied,
joined, folded and assigned. Only ``layer.store`` changes, never a class. Each way of storing has one class in
``stores/``:

| class | ``kind`` | tensors | arithmetic |
|---|---|---|---|
| ``plain.Plain`` | ``plain`` | ``weight``, floats | in the weight's own precision |
| ``half.Half`` | ``half`` | ``weight``, bfloat16 or float16 | float32 |
| ``codes.Codes`` | ``int8``, ``q8_0``, ``q4_0`` | ``weight``, uint8, and ``scale`` | integers (``lowbit.py``) |
| ``codes.Ternary`` | ``ternary`` | the same | integers, BitNet's |
| ``codes.Bf16Panels`` | ``bf16`` | ``weight``, uint8 | products of bfloat16, sums in float32 (``lowbit.py``) |
| ``rows.Rows`` | of the wrapped store | of the wrapped store, perhaps on another device | of the returned rows |
| ``low_rank.LowRank`` | of the wrapped store | the same, and ``lora_a``, ``lora_b`` | the same, and float32 |

``sinew/engine/loading.py`` decides the store of each weight. An architecture with the arithmetic of a store (BitNet)
names it when it makes the layer.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor


class Held(Protocol):
    """What has the tensors of a matrix: a module, or :class:`Tensors`."""

    @property
    def weight(self) -> Tensor: ...
    @property
    def scale(self) -> Tensor | None: ...


class Tensors(NamedTuple):
    """The tensors of a matrix that is in no module."""

    weight: Tensor
    scale: Tensor | None = None


class Store:
    """One way to store a matrix W [rows, width].

    Attributes:
        joins: True if products are linear in the stored ``weight``, so that rewrites may scale its columns or join
            its rows with others.
        coded: True if ``weight`` is bytes that encode weights, not floats.
    """

    joins: ClassVar[bool] = False
    coded: ClassVar[bool] = False

    @property
    @abstractmethod
    def kind(self) -> str:
        """Name of this way, for reports."""

    def size(self, held: Held) -> tuple[int, int]:
        """Return rows and width of W."""
        rows, width = held.weight.shape
        return rows, width

    def dtype(self, held: Held) -> torch.dtype:
        """Return the dtype of products and rows."""
        return torch.float32

    @abstractmethod
    def product(self, held: Held, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return ``x W^T + bias`` [..., rows], for x [..., width]."""

    @abstractmethod
    def take(self, held: Held, ids: Tensor | tuple[int, ...]) -> Tensor:
        """Return rows [..., width] of W. A tuple of ids makes no copy from the host, which no CUDA graph can record,
        where rows are stored as they are given."""

    @abstractmethod
    def widened(self, held: Held) -> Tensor:
        """Return W as float32 [rows, width]."""

    def form(self, rows: int, device: torch.device) -> dict[str, Tensor]:
        """Return tensors without values, by name, if W is not a single ``weight`` of floats [rows, width]."""
        return {}

    def precision(self, part: str, word: str) -> str | None:
        """Return the precision of the tensor ``part`` for reports, given its dtype ``word``; None if nothing is
        computed in it.
        """
        return word
