"""Lower bounds of any execution: per stage, from the traced program and the ceilings measured on the device.

Each product takes the longer of its arithmetic and of reading its weight, one after another; activations, keys and
values are assumed to stay in the cache, and everything between products is free.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.models import Case, length, side, weightless
from sinew.engine.cuda.fused.fuse import ON_CUDA
from sinew.engine.example import Shapes
from sinew.engine.plan.plan import Plan
from sinew.perf.trace import STAGES, TracedCall, trace

COMPONENT = {"vision": "vision", "prefix": "language", "head": "head"}


@dataclass(frozen=True)
class Ceilings:
    """FLOP/s of bfloat16 products, bytes/s of copies, FLOP/s of e4m3 products (None: not there)."""

    flops: float
    bandwidth: float
    fp8_flops: float | None = None


H200 = Ceilings(785e12, 4.30e12, 2 * 785e12)  # measured on another day; for tests and tables without a device


Work = dict[
    str, list[list[int]]
]  # stage -> [calls, FLOP, bytes of weights, whether it can be in FP8], each product


def work(case: Case, tiny: bool = False) -> Work:
    """The products of one observation, equal ones together; of one solver step times their number."""
    found = trace(*_program(case, tiny))
    result: Work = {}
    for stage in STAGES:
        repeats = found.steps if stage == "head" else 1
        counts = Counter(_product(call) for call in found.of(stage) if call.is_product)
        result[stage] = [[repeats * count, *product] for product, count in counts.items()]
    return result


def bound(products: Work, ceilings: Ceilings, fp8: tuple[str, ...] = ()) -> dict[str, float]:
    """Milliseconds per stage, and of all. fp8: components whose linear layers are in e4m3."""
    result = {}
    for stage, calls in products.items():
        narrow = COMPONENT[stage] in fp8
        seconds = 0.0
        for count, flops, nbytes, can_be_narrow in calls:
            is_narrow = narrow and can_be_narrow
            peak = (ceilings.fp8_flops or ceilings.flops) if is_narrow else ceilings.flops
            seconds += count * max(flops / peak, nbytes / (2 if is_narrow else 1) / ceilings.bandwidth)
        result[f"{stage}_ms"] = 1e3 * seconds
    return {**result, "total_ms": sum(result.values())}


def _product(call: TracedCall) -> tuple[int, int, int]:
    weights = sum(operand.nbytes for operand in call.operands if operand.weight)
    is_linear = call.operator in ("mm", "addmm") and weights > 0
    return call.flops, weights, int(is_linear and call.dtype == torch.bfloat16)


def _program(case: Case, tiny: bool) -> tuple[Any, Shapes, Plan]:
    model = weightless(case.model, case.chunk, tiny)
    size = side(model.config)
    # A prompt of nothing is padded to the engine's smallest bucket there; here it costs nothing.
    shapes = Shapes(case.views, size, size, length(case, model.config), case.steps)
    return model, shapes, Plan.of(model, rewrites=ON_CUDA)
