"""Combine linear layers that read the same input into one layer. The result is fewer and larger matrix products, and
one pass over the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sinew.engine.plan.prefix_end import KeyValueLayer
from sinew.engine.plan.rewrite import Rewrite, Status, become, foreign, joined, linear, verdict
from sinew.layers.decoder import DecoderAttention, GatedMLP, KeyValue
from sinew.layers.linear import Linear, not_linear
from sinew.layers.rope import Rotation
from sinew.layers.stores.low_rank import LowRank
from sinew.layers.vit import ViTAttention

MIXED = "mixed precision"


class PackedAttention(DecoderAttention):
    """Attention with one product for queries, keys and values, and one rotation for queries and keys."""

    qkv_proj: Linear
    num_heads: int
    num_kv_heads: int

    def heads(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads = self.qkv_proj(h).unflatten(-1, (-1, self.head_dim))  # [B, L, H + 2 Hkv, D]
        q, k, v = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=-2)
        return q, k, v.contiguous()

    def project(self, h: Tensor, rotate: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        # Queries and keys have separate norms, so one rotation cannot follow one product.
        if self.q_norm is not None:
            return super().project(h, rotate)
        heads = self.qkv_proj(h).unflatten(-1, (-1, self.head_dim))  # [B, L, H + 2 Hkv, D]
        turning, v = heads.split([self.num_heads + self.num_kv_heads, self.num_kv_heads], dim=-2)
        q, k = rotate(turning).split([self.num_heads, self.num_kv_heads], dim=-2)
        # Copy keys and values: if the cache contained views of ``heads``, the queries would also stay in memory.
        return q, k.contiguous(), v.contiguous()


class PackedKeyValue(DecoderAttention):
    kv_proj: Linear

    # The class KeyValueLayer passes the same tensor as both arguments.
    def key_value(self, keys: Tensor, values: Tensor) -> KeyValue:
        k, v = self.kv_proj(keys).unflatten(-1, (2, -1, self.head_dim)).unbind(-3)
        return k, v


class PackedViTAttention(ViTAttention):
    qkv_proj: Linear

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv_proj(x).chunk(3, dim=-1)
        return q, k, v


class PackedMLP(GatedMLP):
    gate_up_proj: Linear

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.output(self.activation(gate) * up)


def pack(layers: Sequence[nn.Module]) -> Linear | str:
    """Combine several linear layers with the same input into one layer. Return this layer, or the reason as text why
    they cannot be combined.
    """
    plain: Sequence[Any] = layers
    for layer in plain:
        store = getattr(layer, "store", None)
        if isinstance(store, LowRank) and type(layer) is Linear and store.stored.joins:
            continue
        if type(layer) is Linear and layer.store.stacks:
            continue
        if why := not_linear(layer):
            return why
    if len({(layer.weight.dtype, layer.dtype) for layer in plain}) > 1:
        return MIXED
    stores = {store.stored if isinstance(store := layer.store, LowRank) else store for layer in plain}
    if len(stores) > 1:
        return MIXED
    weight = joined([layer.weight for layer in plain])
    biases, bias = [layer.bias for layer in plain], None
    if any(each is not None for each in biases):
        # Some layers may have no bias, for example if only the other layers got one from a folded norm.
        given = next(each for each in biases if each is not None)
        wide = [given.new_zeros(len(m.weight)) if m.bias is None else m.bias.detach() for m in plain]
        bias = torch.cat(wide)
    packed = linear(weight, bias, stores.pop())
    if plain[0].scale is not None:
        scale = joined([layer.scale for layer in plain])
        packed.scale = nn.Parameter(scale, requires_grad=False)
    _pack_factors(packed, plain)
    return packed


def _pack_factors(packed: Linear, layers: Sequence[Linear]) -> None:
    """Give a packed layer the LoRA adapters of the layers that it replaces.

    The rows of each replaced layer use only the factors of this layer's adapter:

    [q; k] x = [Wq; Wk] x + [[Bq, 0], [0, Bk]] [Aq; Ak] x
    """
    parts = [
        (
            layer.lora_a,
            layer.lora_b if layer.lora_b is not None else packed.weight.new_zeros(len(layer.weight), 0),
        )
        for layer in layers
    ]
    downs = [down for down, _ in parts if down is not None]
    if not downs:
        return
    down, up = torch.cat(downs), torch.block_diag(*(up.float() for _, up in parts))
    packed.store = LowRank(packed.store, len(down), down.shape[1])
    packed.lora_a, packed.lora_b = (nn.Parameter(each, requires_grad=False) for each in (down, up))


def _pack_attention(module: Any, only_kv: bool) -> str | None:
    """Pack the projections of one attention. Return None, or the reason why they cannot be packed."""
    parts = [module.k_proj, module.v_proj] if only_kv else [module.q_proj, module.k_proj, module.v_proj]
    packed = pack(parts)
    if isinstance(packed, str):
        return packed
    if only_kv:
        module.kv_proj = packed
        become(module, PackedKeyValue)
    else:
        module.num_heads = len(module.q_proj.weight) // module.head_dim
        module.num_kv_heads = len(module.k_proj.weight) // module.head_dim
        module.qkv_proj = packed
        become(module, PackedViTAttention if isinstance(module, ViTAttention) else PackedAttention)
        del module.q_proj
    del module.k_proj, module.v_proj
    return None


def _pack_qkv(model: Any) -> tuple[Status, str, tuple[str, ...]]:
    names, skipped, cross = [], {}, 0
    last = {id(module.attn) for module in model.modules() if isinstance(module, KeyValueLayer)}
    for name, module in list(model.named_modules()):
        if unknown := foreign(module, DecoderAttention) or foreign(module, ViTAttention):
            skipped[name] = unknown
        elif isinstance(module, DecoderAttention) and module.is_cross:
            cross += 1
        elif isinstance(module, (DecoderAttention, ViTAttention)):
            if why := _pack_attention(module, only_kv=id(module) in last):
                skipped[name] = why
            else:
                names.append(name)
    reason, absent = (
        "the projections of queries, keys and values read the same input",
        "no attention with separate projections of one input",
    )
    if cross:
        others = (
            f"; {cross} cross-attentions are left out, because their queries, keys and values read different"
            " tensors"
        )
        reason, absent = reason + others, absent + others
    return verdict(names, skipped, reason, absent)


def _pack_gate_up(model: Any) -> tuple[Status, str, tuple[str, ...]]:
    names, skipped = [], {}
    for name, module in list(model.named_modules()):
        if not isinstance(module, GatedMLP):
            continue
        packed = foreign(module, GatedMLP) or pack([module.gate_proj, module.up_proj])
        if isinstance(packed, str):
            skipped[name] = packed
            continue
        module.gate_up_proj = packed
        become(module, PackedMLP)
        del module.gate_proj, module.up_proj
        names.append(name)
    return verdict(names, skipped, "the layers gate and up read the same input", "no gated MLP")


PACK_QKV = Rewrite("pack-qkv", "queries, keys and values are computed by one matrix product", _pack_qkv)
PACK_GATE_UP = Rewrite(
    "pack-gate-up", "the layers gate and up of an MLP are computed by one matrix product", _pack_gate_up
)
