"""Open a bundle with the engine of low-bit products."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor, nn

from sinew.bundle import Bundle
from sinew.engine.backend import EngineOptions
from sinew.engine.cpu.compile import compile_floats
from sinew.engine.cpu.kernels.library import extension
from sinew.engine.loading import open_model, stored_recipe
from sinew.engine.plan.engine import ON_CPU, PlannedEngine
from sinew.engine.plan.plan import Plan
from sinew.layers.linear import Linear
from sinew.layers.stores import lowbit
from sinew.layers.stores.codes import Codes, Panels, codes_of
from sinew.layers.stores.lowbit import LayOut, lies_in_panels

log = logging.getLogger(__name__)


def open_cpu(bundle: Bundle, options: EngineOptions) -> PlannedEngine:
    """Return the engine of the rewritten model over low-bit weights as they are stored."""
    model, where = open_model(bundle, options, "cpu", lowbit=True)
    kernels = extension()
    if kernels.panels:
        lay_out_codes(model, kernels.lay_out, bundle.copied)
    rewrites = set(ON_CPU) - {"sigmoid-gelu"}
    plan = Plan.of(model, bundle.manifest.spec.solver_steps, rewrites, in_place=True)
    recipe = stored_recipe(bundle, model)
    engine = PlannedEngine(compile_floats(plan) if kernels.compiled else plan, where, recipe)
    bundle.release(engine.model.parameters())
    log.info("low-bit products by %s kernels (%s)", kernels.kernels, kernels.reason)
    return engine


def lay_out_codes(
    model: nn.Module,
    lay_out: LayOut = lowbit.lay_out_into,
    copied: Callable[[Tensor], object] = lambda _: None,
) -> int:
    """Lay out the int8 weights of a model's linear layers as :class:`Panels`, and return how many bytes they are.

    Each is copied out of the bundle's map. lay_out: what writes a weight's panels. copied: called with each weight that
    was copied. A weight that does not divide stays as it is.
    """
    done = 0
    for layer in model.modules():
        if not isinstance(layer, Linear):
            continue
        store, weight = codes_of(layer), layer.weight
        if type(store) is Codes and store.name == "int8" and lies_in_panels(*weight.shape):
            panels = torch.empty_like(weight)
            lay_out(weight, panels)
            layer.weight = nn.Parameter(panels, requires_grad=False)
            layer.store = Panels(store.name, store.width, store.scales)
            copied(weight)
            done += weight.nbytes
    return done
