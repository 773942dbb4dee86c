"""How a matrix of weights lies in memory, and the two things that a model asks of it: a product, and rows.

A module (``linear.py``: ``Linear``, ``Embedding``) has the tensors, under the names that a bundle gives them, and one
:class:`Store` that knows what they stand for. A store has no tensors: it is a small record that is given whatever
holds them, so that modules may be copied, joined, folded and assigned as before. No class is exchanged for storage,
only ``layer.store``. There is one class per way of storing, in ``stores/``:

| class | ``kind`` | tensors | arithmetic |
|---|---|---|---|
| ``plain.Plain`` | ``plain`` | ``weight``, floats | in the weight's own precision |
| ``half.Half`` | ``half`` | ``weight``, bfloat16 or float16 | float32 |
| ``codes.Codes`` | ``int8``, ``q8_0``, ``q4_0`` | ``weight``, uint8, and ``scale`` | integers (``lowbit.py``) |
| ``codes.Ternary`` | ``ternary`` | the same | integers, BitNet's |
| ``codes.Bf16Panels`` | ``bf16`` | ``weight``, uint8 | products of bfloat16, sums in float32 (``lowbit.py``) |
| ``rows.Rows`` | that of what it wraps | that of what it wraps, perhaps on another device | of the rows it gives |
| ``low_rank.LowRank`` | that of what it wraps | the same, and ``lora_a``, ``lora_b`` | the same, and float32 |

Which store a weight gets is decided in one place, ``sinew/engine/loading.py``; an architecture whose arithmetic is that
of a store (BitNet) names it when it makes the layer.
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

    joins: products are linear in ``weight`` as it is stored, so that rewrites may scale its columns or join its rows
    with others'. coded: ``weight`` is bytes that stand for weights, not floats.
    """

    joins: ClassVar[bool] = False
    coded: ClassVar[bool] = False

    @property
    @abstractmethod
    def kind(self) -> str:
        """Return the name of this way, as reports say it."""

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
        """Return tensors without values, by name, where W does not lie in one ``weight`` of floats [rows, width]."""
        return {}

    def precision(self, part: str, word: str) -> str | None:
        """Return what reports call the tensor named ``part``, whose dtype is ``word``; None where nothing is computed
        in it."""
        return word
