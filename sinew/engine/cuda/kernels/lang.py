"""Triton where it is installed, and what the kernels share.

Triton exists for Linux alone and is an optional dependency, so the files of this package must import
without it: the PyTorch references then still work, a launch raises :class:`MissingTriton`.
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

MASKED = -1e30  # score of a key that a query may not see: finite, so that a row without keys stays finite
LOG2E = 1.4426950408889634
PREFETCH_BYTES = 64 * 1024  # of the weight, per program: the H200's 132 then ask for 8.4 MB of 50 MB of L2
PREFETCH_STEP = 16  # bytes: of addresses and sizes


class MissingTriton(RuntimeError):  # noqa: N818 - reads as what it says
    """Raised where a kernel is to be launched and triton is not installed."""

    def __init__(self) -> None:
        super().__init__("kernels need triton: pip install 'triton>=3.6' (Linux)")


def kernel(function: Callable[..., Any]) -> Any:
    """``triton.jit``, or the plain function where there is no triton."""
    return function if triton is None else triton.jit(function)


def interpreted(kernel: Any) -> bool:
    """Return True if launches run in Triton's interpreter (``TRITON_INTERPRET=1`` when the file was imported)."""
    return triton is not None and not isinstance(kernel, triton.runtime.JITFunction)


@kernel
def dot(a, b, acc, UPCAST: tl.constexpr):
    """acc + a @ b in float32. UPCAST: the interpreter multiplies the bit patterns of bfloat16 tiles."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@kernel
def let_next_start(PDL: tl.constexpr):
    """Programmatic dependent launch: the next kernel of the stream may start beside this one."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@kernel
def wait_for_previous(PDL: tl.constexpr):
    """Programmatic dependent launch: wait until the previous kernel has finished and its writes are seen.

    Every program of every kernel has to wait before it touches what kernels write, counters and parts of a
    workspace included. A kernel that has finished has then waited for the one before it, so by induction all
    earlier ones have finished too, however many were let in beside each other. A kernel behind this wait may
    therefore write over anything that they read. Before the wait only :func:`ask_for` may touch memory: it
    reads nothing into the program.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()


@kernel
def wait_for_input(PDL: tl.constexpr):
    """Both, for kernels that have nothing to do in between."""
    let_next_start(PDL)
    wait_for_previous(PDL)


@kernel
def came_last(arrivals, SPLIT: tl.constexpr):
    """Say that this program's part is written, and return True if those of all ``SPLIT`` programs are."""
    tl.debug_barrier()  # every thread's part is written before one thread says so
    return tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == SPLIT - 1


@kernel
def ask_for(first, rows, row, amount, UPCAST: tl.constexpr):
    """Have the first ``amount`` elements of ``rows`` rows, ``row`` elements apart, brought into L2 (sm_90).

    At most one row per thread. Addresses and sizes have to be multiples of 16 bytes; what is not positive asks
    for nothing. Lanes of a warp take turns, so neighbouring rows go to different warps. UPCAST: the interpreter
    has no such instruction.
    """
    if not UPCAST:
        size: tl.constexpr = first.dtype.element_ty.primitive_bitwidth // 8
        tl.inline_asm_elementwise(
            """{
            .reg .pred p, q;
            .reg .b32 warps, warp, lane, mine;
            .reg .b64 at;
            mov.u32 warp, %tid.x;
            and.b32 lane, warp, 31;
            shr.u32 warp, warp, 5;
            mov.u32 warps, %ntid.x;
            shr.u32 warps, warps, 5;
            mad.lo.u32 mine, lane, warps, warp;
            setp.gt.s32 q, $4, 0;
            setp.lt.and.s32 p, mine, $2, q;
            mad.wide.u32 at, mine, $3, $1;
            @p cp.async.bulk.prefetch.L2.global [at], $4;
            mov.b32 $0, 0;
            }""",
            "=r,l,r,r,r",
            [first.to(tl.int64), rows, row * size, amount * size],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


def prefetched(prefetch: bool, pdl: bool, weight: Tensor, rows: int, depth: int, start: int = 0) -> int:
    """How many elements of each of its ``rows`` rows of the weight a program asks for before it waits.

    ``depth``: what it will read of a row; ``start``: what every program's first element is a multiple of. 0, which asks
    for nothing, unless rows lie as the instruction needs them. ValueError for ``prefetch`` without ``pdl``.
    """
    if not prefetch:
        return 0
    if not pdl:
        raise ValueError("prefetch: expected pdl=True beside it, got pdl=False")
    size = weight.element_size()
    distances = (weight.stride(0) * size, start * size, weight.data_ptr())
    if any(distance % PREFETCH_STEP for distance in distances):
        return 0
    amount = min(depth * size, PREFETCH_BYTES // rows)
    return amount // PREFETCH_STEP * PREFETCH_STEP // size


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
