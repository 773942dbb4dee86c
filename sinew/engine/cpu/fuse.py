"""Transformer layers with two compiled calls: one before the attention and one after it
(``kernels/layer_kernels.py``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sinew.engine.cpu.kernels.layer_kernels import Finish, NormOf, Projection, encode, finish, project, usable
from sinew.engine.plan.rewrite import exactly, loaded_class
from sinew.layers.decoder import DecoderAttention, DecoderLayer, GatedMLP
from sinew.layers.norm import GemmaRMSNorm, LayerNorm, RMSNorm
from sinew.layers.rope import Rotation
from sinew.layers.stores.codes import Ternary, apart, codes_of
from sinew.layers.vit import LayerScale, ViTAttention, ViTLayer, ViTMLP

GATED = {"silu": "silu_times", "gelu_tanh": "gelu_tanh_times"}


class FusedDecoderLayer(DecoderLayer):
    before: Projection
    behind: Finish

    def fuse(self) -> None:
        """Collect the weights for the two compiled calls."""
        attn, mlp = self.attn, self.mlp
        layers = [attn.q_proj] if attn.is_cross else [attn.q_proj, attn.k_proj, attn.v_proj]
        turned = 0 if attn.q_norm is not None else 1 if attn.is_cross else 2
        self.before = Projection(_norm_of(self.input_norm), layers, turned, attn.head_dim)
        gate_up = [mlp.gate_proj, mlp.up_proj]
        self.behind = Finish(attn.o_proj, _norm_of(self.post_norm), gate_up, GATED[mlp.kind], mlp.down_proj)

    def project(self, x: Tensor, rotate: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        if not usable(x):
            return super().project(x, rotate)
        attn, heads = self.attn, (-1, self.attn.head_dim)
        plain = attn.q_norm is None
        q, k, v = (p.unflatten(-1, heads) for p in project(self.before, x, rotate if plain else None))
        return (q, k, v) if plain else (attn.rotate_query(q, rotate), attn.rotate_key(k, rotate), v)

    def query(self, x: Tensor, rotate: Rotation) -> Tensor:
        if not (self.attn.is_cross and usable(x)):
            return super().query(x, rotate)
        plain = self.attn.q_norm is None
        q = project(self.before, x, rotate if plain else None)[0].unflatten(-1, (-1, self.attn.head_dim))
        return q if plain else self.attn.rotate_query(q, rotate)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        return finish(self.behind, x, attended) if usable(x) else super().finish(x, attended)


class FusedViTLayer(ViTLayer):
    before: Projection
    behind: Finish
    rounded: bool

    def fuse(self) -> None:
        """Collect the weights for the two compiled calls."""
        attn, mlp = self.attn, self.mlp
        self.before = Projection(
            _norm_of(self.norm1), [attn.q_proj, attn.k_proj, attn.v_proj], 2, attn.head_dim
        )
        gates = [s.weight if isinstance(s, LayerScale) else None for s in (self.scale1, self.scale2)]
        self.behind = Finish(attn.o_proj, _norm_of(self.norm2), [mlp.fc1], "gelu_tanh", mlp.fc2, *gates)
        self.rounded = rounds_attention(attn)

    def forward(self, x: Tensor, rotate: Rotation | None = None) -> Tensor:
        if not usable(x):
            return super().forward(x, rotate)
        return encode(self.before, self.behind, x, rotate, self.rounded)


def rounds_attention(attention: nn.Module) -> bool:
    """Return True if the attention may round its queries, keys and values to 16 bits.

    This is allowed if they are sums of products of numbers with fewer bits (int8, for example). BitNet's own arithmetic
    (ternary) keeps attention in floats.
    """
    layers = (getattr(attention, name, None) for name in ("q_proj", "k_proj", "v_proj"))
    stores = [codes_of(layer) for layer in layers]
    return all(store is not None and not isinstance(store, Ternary) for store in stores)


def _norm_of(norm: Any) -> NormOf:
    if isinstance(norm, LayerNorm):
        return NormOf(True, norm.eps, norm.weight, norm.bias)
    weight = 1.0 + norm.weight if isinstance(norm, GemmaRMSNorm) else norm.weight
    return NormOf(False, norm.eps, weight)


def _alone(norms: tuple[nn.Module, ...], products: tuple[tuple[nn.Module, ...], ...]) -> str | None:
    """Return the reason why one compiled call cannot compute these norms and matrix products together, or None."""
    for norm in norms:
        if type(norm) not in (LayerNorm, RMSNorm, GemmaRMSNorm):
            return f"{type(norm).__name__} is not a norm with constant weights"
        if norm.weight.dtype != torch.float32:
            return f"a norm in {norm.weight.dtype}"
    return next((why for layers in products if (why := apart(layers))), None)


def decoder_apart(layer: Any) -> str | None:
    """Return the reason why two compiled calls cannot replace a decoder layer, or None if they can."""
    attn, mlp = layer.attn, layer.mlp
    if not (exactly(attn, DecoderAttention) and exactly(mlp, GatedMLP)):
        return f"{loaded_class(attn).__name__} and {loaded_class(mlp).__name__}"
    if not (hasattr(attn, "q_proj") and hasattr(mlp, "gate_proj")):
        return "its projections are packed"
    if attn.o_norm is not None or mlp.norm is not None:
        return "norms inside its branches"
    if mlp.kind not in GATED:
        return f"activation {mlp.kind}"
    before = (attn.q_proj,) if attn.is_cross else (attn.q_proj, attn.k_proj, attn.v_proj)
    products = before, (attn.o_proj,), (mlp.gate_proj, mlp.up_proj), (mlp.down_proj,)
    return _alone((layer.input_norm, layer.post_norm), products)


def vit_apart(layer: Any) -> str | None:
    """Return the reason why two compiled calls cannot replace a vision layer, or None if they can."""
    attn, mlp = layer.attn, layer.mlp
    if not (exactly(attn, ViTAttention) and exactly(mlp, ViTMLP)):
        return f"{loaded_class(attn).__name__} and {loaded_class(mlp).__name__}"
    if not hasattr(attn, "q_proj"):
        return "its projections are packed"
    if mlp.approximate != "tanh":
        return "GELU in its exact form"
    if not all(isinstance(scale, (LayerScale, nn.Identity)) for scale in (layer.scale1, layer.scale2)):
        return "a scale of another kind"
    products = (attn.q_proj, attn.k_proj, attn.v_proj), (attn.o_proj,), (mlp.fc1,), (mlp.fc2,)
    return _alone((layer.norm1, layer.norm2), products)
