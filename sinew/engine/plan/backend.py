"""The engine of rewritten models, before it is opened."""

from __future__ import annotations

from sinew.engine.backend import Backend


class Planned(Backend):
    name, opens = "plan", "sinew.engine.plan.open:open_planned"


BACKEND = Planned()
