"""Import Triton if it is installed, and define the functions that the kernels share.

Triton exists for Linux only and is an optional dependency, so these modules must import without it. The PyTorch
references then still work, and a launch raises :class:`MissingTriton`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None  # type: ignore[assignment]

MASKED = -1e30  # score of a masked key; finite, so that a row without visible keys stays finite
LOG2E = 1.4426950408889634


# The class's name is the message that the user reads, so it has no suffix Error.
class MissingTriton(RuntimeError):  # noqa: N818
    """Raised when a kernel is launched and triton is not installed."""

    def __init__(self) -> None:
        super().__init__("the kernels need triton (Linux only); run pip install 'triton>=3.6'")


def kernel(function: Callable[..., Any]) -> Any:
    """Apply ``triton.jit``, or return the function unchanged if triton is not installed."""
    return function if triton is None else triton.jit(function)


def interpreted(kernel: Any) -> bool:
    """Return True if launches run in Triton's interpreter (``TRITON_INTERPRET=1`` when the file was imported)."""
    return triton is not None and not isinstance(kernel, triton.runtime.JITFunction)


@kernel
def dot(a, b, acc, UPCAST: tl.constexpr):
    """Return acc + a @ b in float32.

    A product of float32 tiles is computed as three products on tensor cores. The parts of a factor below 2^-22 of its
    size are ignored. UPCAST converts bfloat16 tiles to float32 for Triton's interpreter, which would otherwise multiply
    their bit patterns.
    """
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="tf32x3")


@kernel
def came_last(arrivals, SPLIT: tl.constexpr):
    """Count this program as finished. Return True if it is the last of the ``SPLIT`` programs that share a block."""
    tl.debug_barrier()  # all threads must have written the part before one thread counts it
    return tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == SPLIT - 1


def check(what: str, tensor: Tensor, shape: tuple[int, ...], rows_apart: bool = False) -> None:
    """Check the shape and the memory layout of a tensor for the kernels.

    Args:
        what: Name of the tensor, for the error.
        tensor: The tensor.
        shape: The expected shape.
        rows_apart: True if the first axis may have any stride, as in a view of a larger buffer. The other axes must be
            contiguous.

    Raises:
        ValueError: The tensor does not fit.
    """
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{what}: expected shape {list(shape)}, got {list(tensor.shape)}")
    inner = tensor[0] if rows_apart and tensor.ndim > 1 and tensor.shape[0] else tensor
    if not inner.is_contiguous():
        raise ValueError(f"{what}: expected contiguous memory, got strides {list(tensor.stride())}")


def same_dtype(what: str, tensor: Tensor, dtype: Any) -> None:
    if tensor.dtype != dtype:
        raise ValueError(f"{what}: expected dtype {dtype}, got {tensor.dtype}")
