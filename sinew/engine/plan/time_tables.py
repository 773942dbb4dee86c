"""Compute all values that depend only on the solver's time in advance, in one table per number of solver steps.

The plan makes a table of ``embed_time``. This rewrite lets the time embedding contain as much as possible. In pi0.5,
the time embedding already contains the modulation of every norm. pi0 and SmolVLA mix the time into the action tokens by
a linear layer over [action, time]. This layer is the sum of a layer over the actions and a layer over the time:

    W [P x + p ; e(t)] + b  =  (Wa P) x  +  (Wt e(t) + Wa p + b)

The step then multiplies a matrix as narrow as an action, and the time embedding is the second bracket.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from sinew.engine.plan.rewrite import Rewrite, Status, become, linear
from sinew.layers.linear import Linear, not_linear
from sinew.models.expert import ExpertModel, per_row


class SplitActionTime(ExpertModel):
    """A model with action tokens W2 silu(W [P x + p; e(t)] + b) + b2.

    W is split into a part for actions and a part for time.
    """

    action_part: Linear  # Wa P, no bias
    time_part: Linear  # Wt, Wa p + b

    def embed_time(self, t: Tensor) -> Tensor:  # [B] -> [B, C], [B, H] -> [B, H, C]
        return self.time_part(super().embed_time(t))  # type: ignore[safe-super]

    def embed_actions(self, x: Tensor, time_embedding: Tensor) -> Tensor:
        mixed = self.action_part(x)
        return self.action_time_mlp_out(F.silu(mixed + per_row(time_embedding.to(mixed.dtype))))


def split_action_time(model: Any) -> None:
    project, mix = model.action_in_proj, model.action_time_mlp_in
    # Both parts of the weight are [C, C]. The columns for actions come first.
    for_actions, for_time = mix.weight.float().chunk(2, dim=1)
    action_part = for_actions @ project.weight.float()
    bias = for_actions @ project.bias.float() + mix.bias.float()
    model.action_part = linear(action_part.to(mix.dtype))
    model.time_part = linear(for_time.to(mix.dtype).contiguous(), bias.to(mix.bias.dtype))
    del model.action_in_proj, model.action_time_mlp_in
    become(model, SplitActionTime)


def _tabulate(model: Any) -> tuple[Status, str, tuple[str, ...]]:
    if model.solver.kind == "single":
        return "not applicable", "the head runs only once per chunk, without a time", ()
    embed = getattr(type(model), "embed_actions", None)
    if embed is not ExpertModel.embed_actions:
        return "applied", "the time embedding depends only on the index of the solver step", ("embed_time",)
    for layer in (model.action_in_proj, model.action_time_mlp_in):
        if why := not_linear(layer):
            return (
                "applied",
                f"the table has only the time embedding, and not the layer after it; {why}",
                ("embed_time",),
            )
    split_action_time(model)
    reason = "the time embedding and its part of the next layer depend only on the index of the solver step"
    return "applied", reason, ("action_in_proj", "action_time_mlp_in")


TABULATE_TIME = Rewrite(
    "tabulate-time", "values that depend only on the solver's time are read from a table", _tabulate
)
