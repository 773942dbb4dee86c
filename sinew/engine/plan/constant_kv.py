"""Compute those keys and values only once per observation that no solver step changes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sinew.engine.plan.rewrite import Rewrite, Status, become, spans
from sinew.layers.attention import attend
from sinew.layers.decoder import DecoderAttention, KeyValue
from sinew.layers.rope import Rotation
from sinew.models.base import Model
from sinew.models.expert import ExpertContext, ExpertModel, Prefix


class StateInPrefix(ExpertModel):
    """A model whose action expert reads the robot's state as a token.

    This token attends to the prefix (image tokens and prompt) and to itself, but never to the actions.

    The token's keys and values are therefore the same in every solver step. They are appended to the prefix's keys
    and values, and the steps compute the actions alone.
    """

    def prefix_of(self, cache: Sequence[KeyValue], valid: Tensor, state: Tensor) -> Prefix:
        return self.absorb_state(super().prefix_of(cache, valid, state))  # type: ignore[safe-super]

    def renew(self, context: ExpertContext, state: Tensor) -> ExpertContext:
        """Return the context with the keys and values of a newer state. The mask of the old context states which
        tokens are valid.
        """
        (sees,) = context.masks
        count = context.kv[0][0].shape[1] - 1  # P, the number of tokens before the state token
        valid = sees[:, 0, :count]
        kv = tuple((k[:, :count], v[:, :count]) for k, v in context.kv)
        prefix = Prefix(kv, valid, valid.sum(dim=1), self.state_token(state))
        return context._replace(kv=self.absorb_state(prefix).kv)

    def absorb_state(self, prefix: Prefix) -> Prefix:
        assert prefix.state is not None
        config = self.config.expert
        h = prefix.state.to(self.expert.dtype)  # [B, 1, C]
        rotate = Rotation.at(prefix.length[:, None], config.head_dim, config.rope_theta)
        valid = torch.cat([prefix.valid, torch.ones_like(prefix.valid[:, :1])], dim=1)  # [B, P + 1]
        extended = []
        for index, (layer, (pk, pv)) in enumerate(zip(self.expert.layers, prefix.kv, strict=True)):
            q, k, v = layer.project(h, rotate)
            k, v = torch.cat([pk, k], dim=1), torch.cat([pv, v], dim=1)
            extended.append((k, v))
            if index + 1 < len(prefix.kv):  # no layer reads the token's output of the last layer
                h = layer.finish(h, attend(q, k, v, valid[:, None]))
        return Prefix(tuple(extended), valid, prefix.length + 1)


def _constant_kv(model: Model) -> tuple[Status, str, tuple[str, ...]]:
    if getattr(model, "has_state_token", False):
        become(model, StateInPrefix)
        return "applied", "the state token attends only to the prefix and to itself", ("expert",)
    crosses = [
        name
        for name, module in model.named_modules()
        if isinstance(module, DecoderAttention) and module.is_cross
    ]
    if crosses:
        return (
            "built in",
            "the model's prefix() projects the cross-attention's keys and values",
            spans(crosses),
        )
    return "not applicable", "no step computes keys and values that do not depend on the noisy actions", ()


CONSTANT_KV = Rewrite(
    "constant-kv", "keys and values that are the same in all solver steps are computed once", _constant_kv
)
