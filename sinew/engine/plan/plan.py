"""A plan: the model that is executed instead of the loaded one, and what was done to make it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sinew.core import SinewError
from sinew.engine.plan.built_in import BATCH_VIEWS, DROP_HEADS, DROP_PADDING
from sinew.engine.plan.constant_kv import CONSTANT_KV
from sinew.engine.plan.gelu import SIGMOID_GELU
from sinew.engine.plan.norms import FOLD_NORMS
from sinew.engine.plan.packing import PACK_GATE_UP, PACK_QKV
from sinew.engine.plan.positions import HOIST_POSITIONS
from sinew.engine.plan.prefix_end import DROP_UNREAD, LAST_LAYER
from sinew.engine.plan.rewrite import Outcome, twin
from sinew.engine.plan.time_tables import TABULATE_TIME
from sinew.models.base import FlowModel, Prefix
from sinew.solvers import times

# In the order in which they are applied: what is cut off needs no folding, what is folded is packed after.
REWRITES = {
    rewrite.name: rewrite
    for rewrite in (
        LAST_LAYER,
        DROP_UNREAD,
        CONSTANT_KV,
        TABULATE_TIME,
        HOIST_POSITIONS,
        FOLD_NORMS,
        PACK_QKV,
        PACK_GATE_UP,
        SIGMOID_GELU,
        DROP_HEADS,
        DROP_PADDING,
        BATCH_VIEWS,
    )
}


@dataclass(frozen=True, eq=False)
class Plan:
    """``model`` has the interface of the loaded model and other modules; ``outcomes`` has a row per rewrite.

    ``model`` shares the parameters that no rewrite replaced. Keep the loaded model, and the replaced ones
    stay in memory beside their replacements; let go of it, and they do not.
    """

    model: FlowModel
    outcomes: tuple[Outcome, ...]
    _tables: dict[int, list[Tensor]] = field(default_factory=dict, repr=False)

    @classmethod
    @torch.no_grad()
    def of(
        cls, model: FlowModel, steps: int | Sequence[int] = (), rewrites: Iterable[str] | None = None
    ) -> Plan:
        """Rewrite ``model``, which is left as it is.

        steps: numbers of solver steps whose tables are made now; others get theirs when they are asked for.
        rewrites: names from ``REWRITES``; None is all.
        """
        chosen = set(REWRITES) if rewrites is None else set(rewrites)
        if unknown := chosen.difference(REWRITES):
            known = ", ".join(REWRITES)
            raise SinewError(f"rewrites: expected names of {known}, got {', '.join(sorted(unknown))}")
        rewritten = twin(model)
        outcomes = [
            rewrite(rewritten) if name in chosen else Outcome(name, "off", "switched off")
            for name, rewrite in REWRITES.items()
        ]
        plan = cls(rewritten.eval().requires_grad_(False), tuple(outcomes))
        for count in (steps,) if isinstance(steps, int) else steps:
            plan.moments(count)
        return plan

    @property
    def applied(self) -> tuple[str, ...]:
        return tuple(outcome.name for outcome in self.outcomes if outcome.status == "applied")

    def field(
        self, prefix: Prefix, steps: int
    ) -> tuple[Callable[[Tensor, Tensor], Tensor], list[Tensor] | None]:
        """The velocity under one observation, for :func:`sinew.solvers.euler`, and its moments.

        Without a table (None), what the solver hands over is the time.
        """
        model = self.model
        frame = model.frame(prefix) if HOIST_POSITIONS.name in self.applied else None
        tabulated = TABULATE_TIME.name in self.applied

        def velocity(x: Tensor, t: Tensor) -> Tensor:
            moment = t if tabulated else model.moment(t)
            return model.step(x, moment, model.frame(prefix) if frame is None else frame, prefix)

        return velocity, self.moments(steps) if tabulated else None

    @torch.no_grad()
    def moments(self, steps: int) -> list[Tensor]:
        """The model's moment at each of the solver's times, each [1, ...]."""
        if steps not in self._tables:
            device = next(self.model.parameters()).device
            grid = torch.tensor(times(steps), dtype=torch.float32, device=device)
            self._tables[steps] = [self.model.moment(t) for t in grid.split(1)]
        return self._tables[steps]
