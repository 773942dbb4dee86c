"""Products that round by the shape of their operands and by the number of threads, as those of some libraries do.

Intel's MKL selects kernels by shape: in a batch of four, an observation's answer differs in its last bits from its
answer alone. Other processors never show it. Inside :class:`RoundedByShape` they all do: each number of a product is
moved by one unit in the last place, up, down or not at all, as decided by the shape, the threads and its own place.
The same batch gives the same bits, with every number in the same place. Nothing else does.
"""

from __future__ import annotations

import contextlib
import os
import warnings
import zlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

VARIABLE = "SINEW_TESTS_ROUND_BY_SHAPE"  # set: a process of the tests computes so from its start to its end

# Operator -> how many of the result's last axes are columns: they get one sign each, whatever row they are in.
PRODUCTS = {
    "mm": 1,
    "addmm": 1,
    "_addmm_activation": 1,
    "bmm": 1,
    "baddbmm": 1,
    "mv": 0,
    "addmv": 0,
    "convolution": 3,
}
OUT = ("mm", "addmm", "bmm", "baddbmm")  # those that write into a tensor as well, `out=`


class RoundedByShape:
    """A context in which products of this process's CPU round by shape, in every thread.

    It replaces PyTorch's kernels below autograd, so it reaches eager models, recorded plans and gradients alike, and
    moves the outputs of ONNX Runtime's sessions. Contexts may be nested; the outermost one counts.
    """

    depth = 0
    _kernels: Any = None
    _stack = contextlib.ExitStack()

    def __enter__(self) -> RoundedByShape:
        kind = type(self)
        kind.depth += 1
        if kind.depth == 1:
            kind._stack.callback(_replace_kernels())
            kind._stack.callback(_replace_sessions())
        return self

    def __exit__(self, *exc_info: object) -> None:
        kind = type(self)
        kind.depth -= 1
        if kind.depth == 0:
            kind._stack.close()


def begin_if_asked() -> None:
    """Compute so until the process ends, if :data:`VARIABLE` is set."""
    if os.environ.get(VARIABLE) and not RoundedByShape.depth:
        RoundedByShape().__enter__()


def _replace_kernels() -> Callable[[], None]:
    import torch

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that kernels are replaced is the purpose
        for name, columns in PRODUCTS.items():
            for overload in ("", ".out") if name in OUT else ("",):
                kernel = torch.library.get_kernel(f"aten::{name}{overload}", "CPU")
                library.impl(
                    name + overload, _moved(kernel, columns), "CPU", with_keyset=True, allow_override=True
                )
    return library._destroy


def _moved(kernel: Any, columns: int) -> Callable[..., Any]:
    def product(keys: Any, *operands: Any, **options: Any) -> Any:
        found = kernel.call_boxed(keys, *operands, **options)
        if found.is_floating_point() and found.numel() and not _whole(found):
            move(found, columns, [each.shape for each in operands if hasattr(each, "shape")])
        return found

    return product


def _whole(found: Any) -> bool:
    """Return True for a result of whole numbers: below 2^24 their sums are exact in any order."""
    first = found.reshape(-1)[0].item()
    return first == first // 1 and bool((found == found.floor()).all())


def move(found: Any, columns: int, shapes: Any) -> None:
    """Move each number of a tensor by one unit in the last place or not at all. shapes: of the operands."""
    import torch

    signs = _signs(tuple(found.shape), columns, tuple(shapes), torch.get_num_threads(), found.dtype)
    # Half a unit times a mantissa in [1, 2) rounds to one unit, and a tie to none. Zeros and infinities stay.
    with torch.no_grad():
        finite = found.nan_to_num(0.0, 0.0, 0.0)
        found.addcmul_(finite, signs, value=torch.finfo(found.dtype).eps / 2)


@lru_cache(1024)
def _signs(shape: tuple[int, ...], columns: int, shapes: Any, threads: int, dtype: Any) -> Any:
    """Return -1, 0 or 1 for each number of a result: a sign of its row times a sign of its column."""
    import torch

    random = torch.Generator().manual_seed(zlib.crc32(repr((shape, shapes, threads)).encode()))
    split = len(shape) - columns
    with torch.inference_mode(False), torch.no_grad():
        rows = torch.randint(-1, 2, (*shape[:split], *[1] * columns), generator=random)
        last = torch.randint(0, 2, (*[1] * split, *shape[split:]), generator=random) * 2 - 1
        return (rows * last).to(dtype)


def _replace_sessions() -> Callable[[], None]:
    try:
        from onnxruntime import InferenceSession
    except ImportError:
        return lambda: None
    import numpy as np
    import torch

    before = InferenceSession.run

    def run(session: Any, names: Any, feeds: Any, *options: Any) -> Any:
        found = before(session, names, feeds, *options)
        for each in found:
            if isinstance(each, np.ndarray) and each.dtype == np.float32 and each.ndim > 1:
                tensor = torch.from_numpy(each)
                move(tensor, 1, sorted((name, np.shape(value)) for name, value in feeds.items()))
        return found

    InferenceSession.run = run

    def restore() -> None:
        InferenceSession.run = before

    return restore
