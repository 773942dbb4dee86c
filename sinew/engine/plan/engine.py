"""The engine "plan": it runs a rewritten, faster version of the model with the code of the eager engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sinew.engine.capability import Capability
from sinew.engine.eager.engine import EagerEngine
from sinew.engine.plan.plan import REWRITES, Plan
from sinew.models.solvers import Guidance

if TYPE_CHECKING:
    from sinew.bundle import Bundle
    from sinew.engine.backend import EngineOptions

# The rewrites that make PyTorch faster on a CPU. "fold-norms" needs a copy of most weights and saves no measurable
# time. "pack-gate-up" is slower than two separate products (docs/plan.md has the numbers).
ON_CPU = tuple(name for name in REWRITES if name not in ("fold-norms", "pack-gate-up"))


def open_planned(bundle: Bundle, options: EngineOptions) -> PlannedEngine:
    from sinew.engine.adapters import with_adapter
    from sinew.engine.loading import open_model

    model, where = open_model(bundle, options, "plan")
    steps, rewrites = bundle.manifest.spec.solver_steps, ON_CPU if where.type == "cpu" else None
    plan = Plan.of(model, steps, rewrites, in_place=not options.adapters)
    engine = PlannedEngine(plan, where)
    engine.adapters = {
        name: PlannedEngine(Plan.of(with_adapter(model, adapter), steps, rewrites, plan), where)
        for name, adapter in options.adapters.items()
    }
    bundle.release(engine.model.parameters())
    return engine


class PlannedEngine(EagerEngine):
    def __init__(self, plan: Plan, device: torch.device, recipe: Mapping[str, str] | None = None):
        super().__init__(plan.model, device, recipe)
        self.plan = plan

    def exchange(self, weights: Mapping[str, Any]) -> None:
        raise self.cannot(Capability.EXCHANGE)  # the plan has computed its own weights from the old weights

    def time_embeddings(self, steps: int, guidance: Guidance | None = None) -> Iterable[Tensor]:
        if getattr(guidance, "committed", None) is not None:
            # The table has one time per step, not one per action.
            return super().time_embeddings(steps, guidance)
        return self.plan.schedule(steps)
