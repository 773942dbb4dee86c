"""The list of tensors that a random checkpoint consists of."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

Init = Literal["matrix", "embedding", "norm", "bias"]


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One tensor to write.

    Attributes:
        name: Name of the tensor.
        shape: Shape of the tensor.
        init: Kind of the tensor, which sets the scale of its noise.
        storage: Type name in the safetensors format.
    """

    name: str
    shape: tuple[int, ...]
    init: Init
    storage: Literal["F32", "BF16"] = "F32"

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * (4 if self.storage == "F32" else 2)
