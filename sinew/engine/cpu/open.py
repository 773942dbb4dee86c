"""Open a bundle with the engine of low-bit products."""

from __future__ import annotations

import logging

from sinew.bundle import Bundle
from sinew.engine.backend import EngineOptions
from sinew.engine.cpu.compile import compile_floats
from sinew.engine.cpu.kernels.library import extension
from sinew.engine.loading import load_model, open_device
from sinew.engine.plan.engine import ON_CPU, PlannedEngine
from sinew.engine.plan.plan import Plan
from sinew.engine.stores import Storage, stored_recipe

log = logging.getLogger(__name__)


def open_cpu(bundle: Bundle, options: EngineOptions) -> PlannedEngine:
    """Return the engine of the rewritten model over low-bit weights as they are stored."""
    where = open_device(options)
    kernels = extension()
    storage = Storage(lowbit=True, half=bool(options.storage), tables=True)
    model = load_model(bundle, where, options.dtype, storage)
    plan = Plan.of(model, bundle.manifest.spec.solver_steps, set(ON_CPU) - {"sigmoid-gelu"})
    recipe = stored_recipe(bundle, model)
    engine = PlannedEngine(compile_floats(plan) if kernels.compiled else plan, where, recipe)
    bundle.release(engine.model.parameters())
    log.info("low-bit products by %s kernels (%s)", kernels.kernels, kernels.reason)
    return engine
