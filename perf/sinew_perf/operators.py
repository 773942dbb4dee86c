"""Parts of a roofline: operators, the tensors that they move, and the components that they add up to."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

# Bits per stored element, without block scales. A ternary value is packed into two bits.
BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "int4": 4, "ternary": 2}


class Residency(Enum):
    """The place of a tensor: memory, or registers, shared memory and caches."""

    HBM = "hbm"
    ON_CHIP = "on_chip"


@dataclass(frozen=True, slots=True)
class Tensor:
    """``kind``: "weight", "activation", "cache" (keys and values of the prefix) or "scores" (of attention)."""

    elements: int
    dtype: str
    residency: Residency = Residency.HBM
    kind: str = "activation"

    @property
    def bytes(self) -> int:
        return -(-self.elements * BITS[self.dtype] // 8)


@dataclass(frozen=True, slots=True)
class Operator:
    """``flops``: of one call, 2*M*N*K for a product. ``count``: equal calls, one per layer say. ``stage``:
    "vision", "prefix" or "head". ``shape``: of a product of weights, rows x depth x columns; empty where it is not
    known. ``kernels``: products in one call, as attention's two."""

    name: str
    flops: int
    tensors: tuple[Tensor, ...]
    compute_dtype: str
    count: int = 1
    stage: str = ""
    shape: str = ""
    kernels: int = 1


@dataclass(frozen=True, slots=True)
class Component:
    """Operators that run one after another, ``repeats`` times: solver steps, say."""

    name: str
    operators: tuple[Operator, ...]
    repeats: int = 1

    @property
    def launches(self) -> int:
        """How many matrix products run for one observation."""
        return self.repeats * sum(each.count * each.kernels for each in self.operators if each.flops)
