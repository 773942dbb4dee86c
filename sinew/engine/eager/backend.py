"""The description of the reference engine, which Sinew reads before it opens the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sinew.core import RTC
from sinew.engine.backend import YES, Backend, EngineOptions, Suitability, lowered
from sinew.engine.capability import Capability

if TYPE_CHECKING:
    from sinew.bundle import Bundle


class Eager(Backend):
    name, opens, reference = "eager", "sinew.engine.eager.engine:open_eager", True
    starts_threads = False
    capabilities = frozenset(Capability) - {Capability.AUDIT}
    guides = RTC  # autograd differentiates the head, and some heads support a denoising time per action
    counted_as = "eager"

    def can(self, bundle: Bundle, options: EngineOptions) -> Suitability:
        if why := lowered(options, bundle):
            return Suitability(f"engine eager {why}")
        return super().can(bundle, options)

    def should(self, bundle: Bundle, options: EngineOptions, prepared: bool = False) -> Suitability:
        return YES  # This engine needs no verification, because the other engines are compared with it.


BACKEND = Eager()
