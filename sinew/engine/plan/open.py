"""Open a bundle with the engine of rewritten models."""

from __future__ import annotations

from sinew.bundle import Bundle
from sinew.engine.backend import EngineOptions
from sinew.engine.loading import load_model, open_device, say_widened
from sinew.engine.plan.engine import ON_CPU, PlannedEngine
from sinew.engine.plan.plan import Plan
from sinew.engine.stores import Storage


def open_planned(bundle: Bundle, options: EngineOptions) -> PlannedEngine:
    """Return the engine of the rewritten model."""
    where = open_device(options)
    model = load_model(bundle, where, options.dtype, Storage(half=bool(options.storage), tables=True))
    say_widened(bundle, model, "plan")
    rewrites = ON_CPU if where.type == "cpu" else None
    engine = PlannedEngine(Plan.of(model, bundle.manifest.spec.solver_steps, rewrites), where)
    bundle.release(engine.model.parameters())
    return engine
