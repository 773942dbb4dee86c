"""Open a bundle with the engine of low-bit products."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import nn

from sinew.bundle import Bundle
from sinew.engine.backend import EngineOptions
from sinew.engine.cpu.compile import compile_floats
from sinew.engine.cpu.kernels.library import extension
from sinew.engine.loading import load_model, open_device
from sinew.engine.plan.engine import ON_CPU, PlannedEngine
from sinew.engine.plan.plan import Plan
from sinew.engine.stores import Storage, stored_recipe
from sinew.layers.linear import Linear
from sinew.layers.stores.codes import Codes, Panels, codes_of
from sinew.layers.stores.lowbit import lay_out, lies_in_panels

log = logging.getLogger(__name__)

PORTION = 32 << 20  # bytes of weights that may be there twice while they are laid out


def open_cpu(bundle: Bundle, options: EngineOptions) -> PlannedEngine:
    """Return the engine of the rewritten model over low-bit weights as they are stored."""
    where = open_device(options)
    kernels = extension()
    storage = Storage(lowbit=True, half=bool(options.storage), tables=True)
    model = load_model(bundle, where, options.dtype, storage)
    if kernels.panels:
        lay_out_codes(model, lambda: bundle.release(model.parameters()))
    plan = Plan.of(model, bundle.manifest.spec.solver_steps, set(ON_CPU) - {"sigmoid-gelu"})
    recipe = stored_recipe(bundle, model)
    engine = PlannedEngine(compile_floats(plan) if kernels.compiled else plan, where, recipe)
    bundle.release(engine.model.parameters())
    log.info("low-bit products by %s kernels (%s)", kernels.kernels, kernels.reason)
    return engine


def lay_out_codes(model: nn.Module, copied: Callable[[], object] = lambda: None) -> int:
    """Lay out the int8 weights of a model's linear layers as :class:`Panels`, and return how many bytes they are.

    Each is copied out of the bundle's map. copied: called whenever PORTION bytes more have been, so that their pages go
    before all are there twice. A weight that does not divide stays as it is.
    """
    done = since = 0
    for layer in model.modules():
        if not isinstance(layer, Linear):
            continue
        store, (rows, width) = codes_of(layer), layer.weight.shape
        if type(store) is not Codes or store.name != "int8" or not lies_in_panels(rows, width):
            continue
        layer.weight = nn.Parameter(lay_out(layer.weight), requires_grad=False)
        layer.store = Panels(store.name, store.width, store.scales)
        done, since = done + layer.weight.nbytes, since + layer.weight.nbytes
        if since >= PORTION:
            copied()
            since = 0
    copied()
    return done
