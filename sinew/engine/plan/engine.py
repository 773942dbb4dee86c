"""The planned engine: the eager engine's loop over a rewritten model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from sinew.engine.eager.engine import EagerEngine
from sinew.engine.plan.plan import REWRITES, Plan
from sinew.models.solvers import Guidance

# The rewrites that pay under PyTorch on a CPU. Folding copies most weights out of the file for nothing that
# the clock shows, and two products that are halves of one run faster apart (docs/plan.md has the numbers).
ON_CPU = tuple(name for name in REWRITES if name not in ("fold-norms", "pack-gate-up"))


class PlannedEngine(EagerEngine):
    def __init__(self, plan: Plan, device: torch.device, recipe: Mapping[str, str] | None = None):
        super().__init__(plan.model, device, recipe)
        self.plan = plan

    def exchange(self, weights: Mapping[str, Any]) -> None:
        raise self._cannot("exchange weights", "eager")  # rewritten from the old ones

    def time_embeddings(self, steps: int, guidance: Guidance | None = None) -> Iterable[Tensor]:
        if getattr(guidance, "committed", None) is not None:
            return super().time_embeddings(steps, guidance)  # times of rows are in no table
        return self.plan.schedule(steps)
