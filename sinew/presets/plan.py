"""What a random checkpoint consists of."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

Init = Literal["matrix", "embedding", "norm", "bias"]


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One tensor to write. ``storage`` is a safetensors type name."""

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
