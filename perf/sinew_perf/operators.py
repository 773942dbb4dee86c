"""Data types of a roofline: operators, the tensors that they move, and components."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

# Bits per stored element, without block scales. A ternary value is packed into two bits.
BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "int4": 4, "ternary": 2}


class Residency(Enum):
    """Place of a tensor: memory (HBM), or registers, shared memory and caches on the chip."""

    HBM = "hbm"
    ON_CHIP = "on_chip"


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor that an operator moves.

    Attributes:
        elements: Number of elements.
        dtype: Number format.
        residency: Where the tensor is stored during the call.
        kind: "weight", "activation", "cache" (keys and values of the prefix) or "scores" (of attention).
    """

    elements: int
    dtype: str
    residency: Residency = Residency.HBM
    kind: str = "activation"

    @property
    def bytes(self) -> int:
        return -(-self.elements * BITS[self.dtype] // 8)


@dataclass(frozen=True, slots=True)
class Operator:
    """Equal operator calls.

    Attributes:
        name: Name of the operator or of its module.
        flops: FLOPs of one call, 2*M*N*K for a product.
        tensors: Tensors that one call moves.
        compute_dtype: Format of the arithmetic.
        count: Number of equal calls, for example one per layer.
        stage: "vision", "prefix" or "head".
        shape: Rows x depth x columns of a product with weights. "" if it is unknown.
        kernels: Number of matrix products in one call. Fused attention has two.
    """

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
    """Operators that run one after another.

    Attributes:
        name: Name of the component.
        operators: The operators.
        repeats: How often all operators run, for example the number of solver steps.
    """

    name: str
    operators: tuple[Operator, ...]
    repeats: int = 1

    @property
    def launches(self) -> int:
        """Return the number of matrix products that the component computes for one observation."""
        return self.repeats * sum(each.count * each.kernels for each in self.operators if each.flops)
