"""Triton where it is installed, and what the kernels share.

Triton exists for Linux alone and is an optional dependency, so the files of this package must import
without it: the PyTorch twins then still work, a launch raises :class:`MissingTriton`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None  # type: ignore[assignment]

MASKED = -1e30  # score of a key that a query may not see: finite, so that a row without keys stays finite
LOG2E = 1.4426950408889634


class MissingTriton(RuntimeError):  # noqa: N818 - reads as what it says
    """Raised where a kernel is to be launched and triton is not installed."""

    def __init__(self) -> None:
        super().__init__("kernels need triton: pip install 'triton>=3.6' (Linux)")


def kernel(function: Callable[..., Any]) -> Any:
    """``triton.jit``, or the plain function where there is no triton."""
    return function if triton is None else triton.jit(function)


def interpreted(kernel: Any) -> bool:
    """Whether a launch runs in Triton's interpreter (``TRITON_INTERPRET=1`` when the file was imported)."""
    return triton is not None and not isinstance(kernel, triton.runtime.JITFunction)


def source_of(kernel: Any) -> str:
    """The Python source of a kernel: part of the key under which its tuned tiles are kept."""
    return inspect.getsource(getattr(kernel, "fn", kernel))


@kernel
def dot(a, b, acc, UPCAST: tl.constexpr):
    """acc + a @ b in float32. UPCAST: the interpreter multiplies the bit patterns of bfloat16 tiles."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@kernel
def wait_for_input(PDL: tl.constexpr):
    """Programmatic dependent launch: let the next kernel start, then wait for the previous one's results.

    Every kernel of a chain has to wait, because completion is passed on from each to the next.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


def check(what: str, tensor: Tensor, shape: tuple[int, ...], rows_apart: bool = False) -> None:
    """Raise ValueError unless ``tensor`` has ``shape`` and lies as the kernels read it.

    rows_apart: the first axis may have any stride (a view of a larger buffer); the others are contiguous.
    """
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{what}: expected shape {list(shape)}, got {list(tensor.shape)}")
    inner = tensor[0] if rows_apart and tensor.ndim > 1 and tensor.shape[0] else tensor
    if not inner.is_contiguous():
        raise ValueError(f"{what}: expected contiguous memory, got strides {list(tensor.stride())}")


def same_dtype(what: str, tensor: Tensor, dtype: Any) -> None:
    if tensor.dtype != dtype:
        raise ValueError(f"{what}: expected dtype {dtype}, got {tensor.dtype}")
