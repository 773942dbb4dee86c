"""Lower bounds for the time of each stage, computed from the traced program and the ceilings that the device reached.

A product takes the time of its arithmetic or of reading its weight, whichever is longer. Products run one after
another. The bound assumes that activations, keys and values stay in the cache, and that all other operations take no
time.
"""

from __future__ import annotations

import inspect
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from sinew_perf.trace import STAGES, TracedCall, trace

from benchmarks.gpu.models import Case, length, side, weightless
from sinew.engine.cuda.fused.fuse import ON_CUDA
from sinew.engine.example import Shapes
from sinew.engine.plan.plan import Plan

PRODUCTS = ("splitk_linear", "gated_mlp", "qkv_rope", "norm_linear", "packed_attention")
COMPONENT = {"vision": "vision", "prefix": "language", "head": "head"}


@dataclass(frozen=True)
class Ceilings:
    """Measured limits of a device.

    Attributes:
        flops: FLOP/s of bfloat16 products.
        bandwidth: Bytes/s of copies.
        fp8_flops: FLOP/s of e4m3 products. None means that the device has none.
    """

    flops: float
    bandwidth: float
    fp8_flops: float | None = None


H200 = Ceilings(
    785e12, 4.30e12, 2 * 785e12
)  # from an earlier measurement, for tests and tables without a device


Work = dict[
    str, list[list[int]]
]  # stage -> [calls, FLOP, bytes of weights, whether it can be in FP8], each product


def work(case: Case, tiny: bool = False) -> Work:
    """Return the products of one observation, with equal products grouped. The products of the head are counted for
    all solver steps.
    """
    found = trace(*_program(case, tiny))
    result: Work = {}
    for stage in STAGES:
        repeats = found.steps if stage == "head" else 1
        counts = Counter(_product(call) for call in found.of(stage) if call.is_product)
        result[stage] = [[repeats * count, *product] for product, count in counts.items()]
    return result


def bound(products: Work, ceilings: Ceilings, fp8: tuple[str, ...] = ()) -> dict[str, float]:
    """Return the lower bound in milliseconds of each stage and of the whole chunk.

    Args:
        products: The products of each stage, from :func:`work`.
        ceilings: Limits of the device.
        fp8: Components whose linear layers are in e4m3.
    """
    result = {}
    for stage, calls in products.items():
        narrow = COMPONENT[stage] in fp8
        seconds = 0.0
        for count, flops, nbytes, can_be_narrow in calls:
            is_narrow = narrow and can_be_narrow
            seconds += count * least(flops, nbytes // (2 if is_narrow else 1), is_narrow, ceilings)[0]
        result[f"{stage}_ms"] = 1e3 * seconds
    return {**result, "total_ms": sum(result.values())}


def least(flops: int, nbytes: int, narrow: bool, ceilings: Ceilings) -> tuple[float, str]:
    """Return the fewest seconds of a product, and whether "arithmetic" or "memory" limits the product. narrow: in
    e4m3."""
    peak = (ceilings.fp8_flops or ceilings.flops) if narrow else ceilings.flops
    arithmetic, memory = flops / peak, nbytes / ceilings.bandwidth
    return (arithmetic, "arithmetic") if arithmetic >= memory else (memory, "memory")


Counted = dict[
    tuple[str, str], list[tuple[int, int]]
]  # launches of one kernel and grid: FLOP, bytes of weights


def launch_work(engine: Any) -> Counted:
    """Return the products in the kernel launches of the program that the engine has recorded last.

    The function runs the program once more. Products of libraries such as cuBLAS are not included.
    """
    found: Counted = {}

    def noting(name: str) -> Any:
        module = import_module(f"sinew.engine.cuda.kernels.{name}")
        prepare, signature = module.prepare, inspect.signature(module.prepare)

        def noted(*arguments: Any, **options: Any) -> Any:
            made = prepare(*arguments, **options)
            # later launches in the list only join parts of the result
            launch = made[0] if isinstance(made, list) else made
            given = signature.bind(*arguments, **options).arguments
            grid = str([*launch.grid, 1, 1][:3])
            kernel = str(getattr(launch.kernel, "fn", launch.kernel).__name__)
            found.setdefault((kernel, grid), []).append(_given(given))
            return made

        return mock.patch.object(module, "prepare", noted)

    program = engine.programs[engine.programs.keys()[-1]]
    with ExitStack() as held:
        for name in PRODUCTS:
            held.enter_context(noting(name))
        held.enter_context(torch.inference_mode())
        held.enter_context(engine.prefix_stream.current())  # the engine replays on this stream
        program.chunk()
    return found


def _given(given: dict[str, Any]) -> tuple[int, int]:
    """Return the FLOP and the bytes of weights of a launch, from the arguments with which its kernel was prepared."""
    if "kv" in given:
        own = given.get("own")
        keys = given["kv"][0].shape[1] + (0 if own is None else own[0].shape[1])
        return 4 * given["q"].numel() * keys, 0
    weight = given["weight"]
    return 2 * len(given["x"]) * weight.numel(), weight.nbytes


def _product(call: TracedCall) -> tuple[int, int, int]:
    weights = sum(operand.nbytes for operand in call.operands if operand.weight)
    is_linear = call.operator in ("mm", "addmm") and weights > 0
    return call.flops, weights, int(is_linear and call.dtype == torch.bfloat16)


def _program(case: Case, tiny: bool) -> tuple[Any, Shapes, Plan]:
    model = weightless(case.model, case.chunk, tiny)
    size = side(model.config)
    # The engine pads an empty prompt to its smallest bucket. The bound counts an empty prompt as no work.
    shapes = Shapes(case.views, size, size, length(case, model.config), case.steps)
    return model, shapes, Plan.of(model, rewrites=ON_CUDA)
