"""Open a bundle with the engine "cpu", which computes matrix products with compiled kernels."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from sinew.bundle import Bundle
from sinew.bundle.schema import COMPONENTS
from sinew.core import SinewError
from sinew.engine.backend import EngineOptions
from sinew.engine.cpu.compile import compile_floats
from sinew.engine.cpu.kernels.library import extension
from sinew.engine.loading import open_model, stored_recipe
from sinew.engine.plan.engine import ON_CPU, PlannedEngine
from sinew.engine.plan.plan import Plan
from sinew.layers.linear import Conv1d, Linear
from sinew.layers.stores import lowbit
from sinew.layers.stores.codes import Bf16Panels, Codes, Panels
from sinew.layers.stores.half import Half
from sinew.layers.stores.lowbit import HALVES, INTEGERS, LayOut, lies_in_panels

log = logging.getLogger(__name__)


def open_cpu(bundle: Bundle, options: EngineOptions) -> PlannedEngine:
    """Return the engine "cpu" for a bundle. It multiplies low-bit weights as they are stored, or bfloat16 weights."""
    kernels, half = extension(), options.dtype == "bf16"
    order = kernels.halves if half else kernels.integers
    if half and order is None:
        kernels_text = f"{kernels.kernels} kernels ({kernels.reason})"
        raise SinewError(
            f"engine cpu: expected compiled products of bf16, got {kernels_text}; use engine plan"
        )
    # Weights whose sizes do not divide into panels are multiplied in float32.
    if half:
        options = replace(options, storage="bf16")
    model, where = open_model(bundle, options, "cpu", lowbit=COMPONENTS)
    if order is not None:
        lay_out_codes(model, order, kernels.lay_out, bundle.copied)
    rewrites = set(ON_CPU) - {"sigmoid-gelu"}
    plan = Plan.of(model, bundle.manifest.spec.solver_steps, rewrites, in_place=True)
    recipe = stored_recipe(bundle, model)
    engine = PlannedEngine(compile_floats(plan) if kernels.compiled else plan, where, recipe)
    bundle.release(engine.model.parameters())
    log.info("matrix products are computed by %s kernels (%s)", kernels.kernels, kernels.reason)
    return engine


def lay_out_codes(
    model: nn.Module,
    order: str,
    lay_out: LayOut = lowbit.lay_out_into,
    copied: Callable[[Tensor], object] = lambda _: None,
) -> int:
    """Reorder the weights of a model's linear layers in memory, so that the kernels can read them.

    With an order in INTEGERS, int8 weights become :class:`Panels`. With an order in HALVES, bfloat16 weights under
    float32 become :class:`Bf16Panels`. Each weight is copied out of the bundle's memory map. A weight whose size does
    not divide into panels is left unchanged.

    Args:
        model: The model.
        order: The order of the weights.
        lay_out: Writes the panels of an int8 weight.
        copied: Called with each weight that was copied.

    Returns:
        The bytes of the copied weights.
    """
    nbytes = 0
    for layer in model.modules():
        if not isinstance(layer, Linear | Conv1d) or layer.weight.dim() != 2:
            continue
        if not lies_in_panels(*layer.weight.shape):
            continue
        store, weight = layer.store, layer.weight
        if type(store) is Codes and store.name == "int8" and order in INTEGERS:
            panels, store = torch.empty_like(weight), Panels(store.name, store.width, store.scales, order)
            lay_out(weight, panels, order)
        elif isinstance(store, Half) and weight.dtype == torch.bfloat16 and order in HALVES:
            panels, store = lowbit.lay_out(weight), Bf16Panels("bf16", weight.shape[1], laid=order)
        else:
            continue
        layer.weight, layer.store = nn.Parameter(panels, requires_grad=False), store
        copied(weight)
        nbytes += weight.nbytes
    return nbytes
