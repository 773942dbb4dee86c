"""The description of the engine "plan", which runs a rewritten model. Sinew reads it before it opens the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sinew.core import RTC
from sinew.engine.backend import Backend, EngineOptions, Suitability, lowered
from sinew.engine.capability import Capability

if TYPE_CHECKING:
    from sinew.bundle import Bundle


class Planned(Backend):
    name, opens = "plan", "sinew.engine.plan.engine:open_planned"
    starts_threads = False
    # This engine does not accept new weights, because its rewrites have already changed the old weights.
    capabilities = frozenset(Capability) - {
        Capability.AUDIT,
        Capability.EXCHANGE,
    }
    guides = RTC

    def can(self, bundle: Bundle, options: EngineOptions) -> Suitability:
        if options.adapters and options.kind != "cpu":
            return Suitability(
                f"engine plan computes adapters on cpu only: on {options.device} it folds norms, and each"
                " adapter would need a copy of most weights; use engine eager"
            )
        if why := lowered(options, bundle):
            return Suitability(f"engine plan {why}")
        return super().can(bundle, options)

    def product(self, bundle: Bundle, options: EngineOptions) -> Callable[[], object] | None:
        from sinew.engine.plan.product import torch_product  # this module imports torch

        return torch_product(options.dtype, options.storage)


BACKEND = Planned()
