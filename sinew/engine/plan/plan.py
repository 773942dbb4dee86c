"""A plan: a rewritten, faster version of the loaded model, and the list of rewrites that produced it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sinew.core import SinewError
from sinew.engine.clone import clone_model
from sinew.engine.plan.constant_kv import CONSTANT_KV
from sinew.engine.plan.gelu import SIGMOID_GELU
from sinew.engine.plan.norms import FOLD_NORMS
from sinew.engine.plan.packing import PACK_GATE_UP, PACK_QKV
from sinew.engine.plan.positions import HOIST_POSITIONS
from sinew.engine.plan.prefix_end import DROP_UNREAD, LAST_LAYER
from sinew.engine.plan.rewrite import RewriteOutcome, share
from sinew.engine.plan.time_tables import TABULATE_TIME
from sinew.models.base import Model

# The rewrites in their order of application. Unused modules are removed first. Then norms are folded, and then products
# are packed.
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
    )
}


@dataclass(frozen=True, eq=False)
class Plan:
    """A rewritten version of a loaded model. It has the same interface as the loaded model, but other modules.

    The two models share all parameters that no rewrite replaced. If the loaded model is kept, the replaced parameters
    stay in memory too.

    Attributes:
        model: The rewritten model.
        outcomes: The outcome of each rewrite.
    """

    model: Model
    outcomes: tuple[RewriteOutcome, ...]
    _tables: dict[int, list[Tensor]] = field(default_factory=dict, repr=False)

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        model: Model,
        steps: int | Sequence[int] = (),
        rewrites: Iterable[str] | None = None,
        beside: Plan | None = None,
        in_place: bool = False,
    ) -> Plan:
        """Rewrite a copy of ``model``.

        Args:
            model: The loaded model.
            steps: Numbers of solver steps for which tables of time embeddings are made now. Other tables are made at
                first use.
            rewrites: Names from ``REWRITES``, or None for all.
            beside: The plan of the same model without an adapter. The new plan uses the tensors of this plan where they
                are equal.
            in_place: Rewrite ``model`` itself, for a caller that does not need it any more.
        """
        chosen = set(REWRITES) if rewrites is None else set(rewrites)
        if unknown := chosen.difference(REWRITES):
            names = ", ".join(REWRITES)
            raise SinewError(f"rewrites: expected names from {names}, got {', '.join(sorted(unknown))}")
        rewritten = model if in_place else clone_model(model)
        outcomes = [
            rewrite(rewritten) if name in chosen else RewriteOutcome(name, "off", "switched off")
            for name, rewrite in REWRITES.items()
        ]
        if beside is not None:
            share(rewritten, beside.model)
        plan = cls(rewritten.eval().requires_grad_(False), tuple(outcomes))
        for count in (steps,) if isinstance(steps, int) else steps:
            plan.time_embeddings(count)
        return plan

    @property
    def applied(self) -> tuple[str, ...]:
        return tuple(outcome.name for outcome in self.outcomes if outcome.status == "applied")

    def schedule(self, steps: int) -> Iterable[Tensor]:
        """Return the time embeddings of ``steps`` solver steps for :func:`sinew.models.solvers.solve`.

        The plan's table is used if the plan has one. Otherwise the embeddings are computed one by one.
        """
        return (
            self.time_embeddings(steps)
            if TABULATE_TIME.name in self.applied
            else self.model.time_embeddings(steps)
        )

    @torch.no_grad()
    def time_embeddings(self, steps: int) -> list[Tensor]:
        """Return the model's time embedding for each of ``steps`` solver times, each [1, ...].

        The list is computed at the first call with this number of steps, and is then stored.
        """
        if steps not in self._tables:
            self._tables[steps] = list(self.model.time_embeddings(steps))
        return self._tables[steps]
