"""Time the products of a chunk with PyTorch's libraries, beside the kernels that the engine uses.

A row is one kind of product of a chunk. Each column multiplies the same sizes, with weights that are not in the GPU's
cache:

* ``ours_us``: the kernel of the engine, with the norm, the rotation or the activation that it also computes. The row
  has no such column if the engine uses the library.
* ``cublas_us``, ``cublaslt_us``: the product in bfloat16.
* ``bias_us``: the product with a bias.
* ``gelu_us``: the product with a bias and GELU in its epilogue (``torch._addmm_activation``).
* ``gelu_apart_us``: the same with GELU in a second kernel.
* ``e4m3_us``: the product in FP8 with a scale for each row and each column. ``e4m3_one_us`` has one scale for each
  tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.rungs import launched
from benchmarks.gpu.session import Row, Session
from benchmarks.gpu.sweep import COLD, MOST, Problem, own_tile, taken_down
from benchmarks.gpu.timing import call_ms
from sinew.engine.cuda.fp8.linear import unfit
from sinew.engine.cuda.fused.rows import RowOps
from sinew.engine.cuda.kernels.workspace import Workspace

REPLAYS = 15
LIBRARIES = ("cublas", "cublaslt")
GELU = ("fc1",)  # layers that GELU follows


@dataclass
class Product:
    """One kind of product: its sizes, and how often a chunk computes it.

    Attributes:
        name: Name of the first layer with this product.
        M: Rows of the input.
        weight: [N, K].
        ours: The launch of the engine's kernel, or None if the engine uses the library.
        runs: Number of products in a chunk.
    """

    name: str
    M: int
    weight: Tensor
    ours: Problem | None = None
    runs: int = 0


def library(model: str, session: Session) -> None:
    """Emit a row for each kind of product, those with the most arithmetic first."""
    case, made, sample = launched(model, session)
    with torch.inference_mode():
        with products(made.engine.model) as found:
            made.run(sample)
        room = Workspace(1 << 26, 1 << 16, session.device)
        for each in sorted(found.values(), key=lambda each: -each.runs * each.M * each.weight.numel()):
            if session.left <= 0:
                raise TimeoutError("the time limit ended before all products were measured")
            session.emit({"case": case.name, **timed(each, session, room)})


@contextmanager
def products(model: Any) -> Iterator[dict[Any, Product]]:
    """Within the context, record each kind of product that a chunk computes."""
    found: dict[Any, Product] = {}
    names = {parameter.data_ptr(): name for name, parameter in model.named_parameters()}
    real = RowOps.product

    def product(ops: RowOps, operand: Any, linear: Any, *arguments: Any, **options: Any) -> Tensor:
        weight, data = linear.weight, operand.data
        key = (len(data), *weight.shape, _place(names, weight))
        found.setdefault(key, Product(key[-1], len(data), weight)).runs += 1
        return real(ops, operand, linear, *arguments, **options)

    with taken_down() as problems, mock.patch.object(RowOps, "product", product):
        yield found
    for problem in problems.values():
        if problem.weight is not None:
            M = len(problem.given.arguments["x"])
            name = _place(names, problem.weight)
            found[problem.kernel, M, *problem.weight.shape, name] = Product(
                name, M, problem.weight, problem, problem.runs
            )


def _place(names: dict[int, str], weight: Tensor) -> str:
    """Return the name of a layer without the numbers of its layers."""
    name = names.get(weight.data_ptr(), "packed").removesuffix(".weight")
    return ".".join(part for part in name.split(".") if not part.isdigit())


def timed(each: Product, session: Session, room: Workspace) -> Row:
    """Measure a product in each way that the device supports. A way that fails has its error in the row."""
    (N, K), device = each.weight.shape, session.device
    row: Row = {"product": each.name, "M": each.M, "N": N, "K": K, "runs": each.runs}
    row["kernel"] = "library" if each.ours is None else each.ours.kernel
    x, bias = torch.randn(each.M, K, device=device).bfloat16(), torch.randn(N, device=device).bfloat16()
    weights = [each.weight.to(torch.bfloat16, copy=True) for _ in range(_copies(each.weight, session))]
    ways: dict[str, Callable[[Tensor], Callable[[], Any]]] = {
        f"{name}_us": lambda w: partial(F.linear, x, w) for name in LIBRARIES
    }
    ways["bias_us"] = lambda w: partial(F.linear, x, w, bias)
    if each.name.endswith(GELU):
        ways["gelu_us"] = lambda w: partial(with_gelu, x, w, bias)
        ways["gelu_apart_us"] = lambda w: lambda: F.gelu(F.linear(x, w, bias), approximate="tanh")
    for name, way in ways.items():
        chosen = name.removesuffix("_us") if name.removesuffix("_us") in LIBRARIES else "default"
        row |= _time(name, [way(weight) for weight in weights], session, chosen)
    if each.ours is not None:
        ours = each.ours
        calls = [
            launch for w in weights for launch in ours.launches(own_tile(ours), w.to(each.weight.dtype), room)
        ]
        row |= _time("ours_us", calls, session, "default", len(weights))
    if unfit(each.weight) is None:
        e4m3 = torch.float8_e4m3fn
        narrow, small = x.to(e4m3), [weight.to(e4m3) for weight in weights]
        rows, columns = torch.ones(each.M, 1, device=device), torch.ones(1, N, device=device)
        one = torch.ones((), device=device)
        for name, scales in (("e4m3_us", (rows, columns)), ("e4m3_one_us", (one, one))):
            row |= _time(name, [partial(scaled, narrow, weight, *scales) for weight in small], session)
    return row


def with_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute GELU (tanh) of a product and a bias in one call of the library."""
    return torch._addmm_activation(bias, x, weight.t(), use_gelu=True)  # noqa: SLF001 - it has no public name


def scaled(x: Tensor, weight: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    types: dict[str, Any] = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
    return torch._scaled_mm(x, weight.t(), scale_a=rows, scale_b=columns, **types)  # noqa: SLF001


def _copies(weight: Tensor, session: Session) -> int:
    """Return the number of copies of a weight that do not fit the GPU's cache together."""
    return 2 if session.tiny else min(MOST, 2 + COLD // weight.nbytes)


def _time(
    name: str, calls: list[Callable[[], Any]], session: Session, chosen: str = "default", products: int = 0
) -> Row:
    """Return the microseconds of one product, or the error.

    Args:
        name: Field of the row.
        calls: The calls. Some kernels need several calls for a product.
        session: The session.
        chosen: The library for products in bfloat16.
        products: Number of products in ``calls``. 0 for as many as calls.
    """
    before = torch.backends.cuda.preferred_blas_library()
    try:
        if session.is_gpu:
            torch.backends.cuda.preferred_blas_library(chosen)
        ms = call_ms(calls, REPLAYS, session.device)["p50"] * (len(calls) / (products or len(calls)))
    except Exception as error:  # noqa: BLE001 - the device may lack one of the ways
        return {name: None, f"{name}_error": f"{type(error).__name__}: {error}"[:200]}
    finally:
        if session.is_gpu:
            torch.backends.cuda.preferred_blas_library(before)
    return {name: 1e3 * ms}
