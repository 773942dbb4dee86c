"""Open a bundle with the engine of rewritten models."""

from __future__ import annotations

from sinew.bundle import Bundle
from sinew.engine.adapters import with_adapter
from sinew.engine.backend import EngineOptions
from sinew.engine.loading import Storage, load_model, open_device, say_widened
from sinew.engine.plan.engine import ON_CPU, PlannedEngine
from sinew.engine.plan.plan import Plan


def open_planned(bundle: Bundle, options: EngineOptions) -> PlannedEngine:
    """Return the engine of the rewritten model."""
    where = open_device(options)
    model = load_model(bundle, where, options.dtype, Storage(half=bool(options.storage), tables=True))
    say_widened(bundle, model, "plan")
    rewrites = ON_CPU if where.type == "cpu" else None
    steps = bundle.manifest.spec.solver_steps
    plan = Plan.of(model, steps, rewrites, in_place=not options.adapters)
    engine = PlannedEngine(plan, where)
    engine.adapters = {
        name: PlannedEngine(Plan.of(with_adapter(model, adapter), steps, rewrites, plan), where)
        for name, adapter in options.adapters.items()
    }
    bundle.release(engine.model.parameters())
    return engine
