"""Make matrix products round differently for each shape of their operands and each number of threads.

Some libraries do this. Intel's MKL selects kernels by shape, so in a batch of four, the answer to an observation
differs in its last bits from the answer to this observation alone. Other processors never show this. Inside
:class:`RoundedByShape`, all processors do. Each number of a product is moved by one unit in the last place, up, down
or not at all. The shape, the number of threads and the place of the number decide the direction. Only the same batch
with every number in the same place gives the same bits.
"""

from __future__ import annotations

import contextlib
import os
import warnings
import zlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

# if this variable is set, a process of the tests rounds this way from its start to its end
VARIABLE = "SINEW_TESTS_ROUND_BY_SHAPE"

# Operator -> number of the last axes of the result that are columns. Each column has one sign for all rows.
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
OUT = ("mm", "addmm", "bmm", "baddbmm")  # these operators can also write into a given tensor, `out=`


class RoundedByShape:
    """A context in which products on the CPU of this process round by shape, in every thread.

    It replaces PyTorch's kernels below autograd, so it affects eager models, recorded plans and gradients. It also
    changes the outputs of ONNX Runtime's sessions. Contexts may be nested, and only the outermost one has an effect.
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
    """Round this way until the process ends, if the variable :data:`VARIABLE` is set."""
    if os.environ.get(VARIABLE) and not RoundedByShape.depth:
        RoundedByShape().__enter__()


def _replace_kernels() -> Callable[[], None]:
    import torch

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # the warning states that kernels are replaced, which is intended here
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
    """Return True for a result of whole numbers, whose sums below 2^24 are exact in any order."""
    first = found.reshape(-1)[0].item()
    return first == first // 1 and bool((found == found.floor()).all())


def move(found: Any, columns: int, shapes: Any) -> None:
    """Move each number of a tensor by one unit in the last place or not at all. shapes: shapes of the operands."""
    import torch

    signs = _signs(tuple(found.shape), columns, tuple(shapes), torch.get_num_threads(), found.dtype)
    # Half a unit times a mantissa in [1, 2) is rounded to one unit, and a tie to none. Zeros and infinities do not
    # change.
    with torch.no_grad():
        finite = found.nan_to_num(0.0, 0.0, 0.0)
        found.addcmul_(finite, signs, value=torch.finfo(found.dtype).eps / 2)


@lru_cache(1024)
def _signs(shape: tuple[int, ...], columns: int, shapes: Any, threads: int, dtype: Any) -> Any:
    """Return -1, 0 or 1 for each number of a result: the sign of its row times the sign of its column."""
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
