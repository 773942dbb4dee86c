"""Skip the end of the language model. The action head reads the keys and values of the language model's layers, but
not the output of its last layer.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from sinew.engine.plan.rewrite import Rewrite, Status, foreign
from sinew.layers.decoder import DecoderAttention, DecoderLayer, KeyValue
from sinew.layers.fold_sites import FoldSite
from sinew.layers.rope import Rotation

TEXT = "the language head reads the language model's output"
NO_CACHE = "the head does not read the language model's keys and values"


class KeyValueLayer(nn.Module):
    """The last decoder layer without the operations whose results the action head does not need.

    The layer only has a norm and the projections to keys and values.
    """

    def __init__(self, layer: DecoderLayer):
        super().__init__()
        self.input_norm, self.attn = layer.input_norm, layer.attn
        del self.attn.q_proj, self.attn.o_proj
        self.attn.q_norm = self.attn.o_norm = None

    def fold_sites(self) -> list[FoldSite]:
        return [FoldSite(self, "input_norm", (self.attn.k_proj, self.attn.v_proj))]

    def forward(self, x: Tensor, rotate: Rotation, mask: Tensor) -> tuple[Tensor, KeyValue]:
        h = self.input_norm(x)
        k, v = self.attn.key_value(h, h)
        return x, (self.attn.rotate_key(k, rotate), v)


def _last_layer(model: Any) -> tuple[Status, str, tuple[str, ...]]:
    depth = model.prefix_depth
    if depth is None or model.has_lm_head:
        return "not applicable", NO_CACHE if depth is None else TEXT, ()
    layers = list(model.language.layers)
    last = layers[depth - 1]
    if unknown := foreign(last, DecoderLayer) or foreign(last.attn, DecoderAttention):
        return "not applicable", unknown, ()
    layers[depth - 1] = KeyValueLayer(layers[depth - 1])
    model.language.layers = nn.ModuleList(layers[:depth])
    unread = len(layers) - depth
    reason = f"the head reads only the keys and values of layer {depth - 1}, and not its output"
    return (
        "applied",
        reason + (f"; the {unread} layers after it are not read" if unread else ""),
        (f"language.layers.{depth - 1}",),
    )


def _unread(model: Any) -> tuple[Status, str, tuple[str, ...]]:
    if model.prefix_depth is None or model.has_lm_head:
        return "not applicable", NO_CACHE if model.prefix_depth is None else TEXT, ()
    del model.language.norm
    return "applied", "no module reads the language model's output", ("language.norm",)


LAST_LAYER = Rewrite(
    "last-layer-kv", "the last layer of the language model computes only keys and values", _last_layer
)
DROP_UNREAD = Rewrite("drop-unread", "modules whose output no other module reads are removed", _unread)
