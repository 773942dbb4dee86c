"""Layers made of products and the row-wise passes between them: the vision tower's, and all that are in FP8.

Classes for ``rewrite.become``, as in :mod:`.layers`; they add ``rows``. A norm takes the residual sum before it along
(in the vision tower also across layers; a decoder layer adds its MLP in a pass of its own), and leaves its result as
the next product reads it, in e4m3 if that is what it multiplies.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sinew.engine.cuda.fused.ends import PatchTower
from sinew.engine.cuda.fused.layers import Modulated, activation, one, tables
from sinew.engine.cuda.fused.rows import Operand, RowOps, Target
from sinew.engine.plan.norms import UnitLayerNorm
from sinew.engine.plan.prefix_end import KeyValueLayer
from sinew.layers.decoder import AdaptiveDecoderLayer, DecoderLayer, KeyValue
from sinew.layers.rope import Rotation
from sinew.layers.vit import ViTLayer

# ----------------------------------------------------------------------------- decoder layers


class RowwiseLayer(DecoderLayer):
    """A layer of the language model or an expert. Its norms are unit norms."""

    rows: RowOps

    def project(self, x: Tensor, rotate: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        return project(self.rows, self.attn, one(x), rotate, eps=self.input_norm.eps)

    def query(self, x: Tensor, rotate: Rotation) -> Tensor:
        linear: Any = self.attn.q_proj
        heads = linear.out_features // self.attn.head_dim, 0
        return turned(self.rows, linear, one(x), rotate, heads, eps=self.input_norm.eps)[0]

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        stream, branch = finish(self.rows, self, one(x), one(attended), eps=self.post_norm.eps)
        return (stream + branch)[None]


class RowwiseKeyValueLayer(KeyValueLayer):
    """The last language layer: keys and values alone."""

    rows: RowOps

    def forward(self, x: Tensor, rotate: Rotation, mask: Tensor) -> tuple[Tensor, KeyValue]:
        linear: Any = self.attn.kv_proj
        heads = 0, linear.out_features // (2 * self.attn.head_dim)
        _, k, v = turned(self.rows, linear, one(x), rotate, heads, eps=self.input_norm.eps)
        return x, (k, v)


class RowwiseAdaptiveLayer(AdaptiveDecoderLayer):
    """A layer with adaptive norms: ``before`` and ``after`` come from the table of the step."""

    rows: RowOps

    def project(self, x: Tensor, rotate: Rotation, before: Any, after: Any):
        norm = modulation(before, self.input_norm.eps)
        return project(self.rows, self.attn, one(x), rotate, **norm)

    def finish(self, x: Tensor, attended: Tensor, before: Any, after: Any) -> Tensor:
        norm = modulation(after, self.post_norm.eps)
        stream, branch = finish(self.rows, self, one(x), one(attended), gate=before.gate, **norm)
        return torch.addcmul(stream, branch, after.gate).to(x.dtype)[None]


def modulation(m: Modulated, eps: float) -> dict[str, Any]:
    return {"eps": eps, "weight": m.scale, "offset": 1.0, "shift": m.shift}


def project(
    rows: RowOps, attn: Any, x: Tensor, rotate: Rotation, **norm: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return turned(rows, attn.qkv_proj, x, rotate, (attn.num_heads, attn.num_kv_heads), **norm)


def turned(
    rows: RowOps, linear: Any, x: Tensor, rotate: Rotation, heads: tuple[int, int], **norm: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm, product, rotation: q, k and v [1, M, heads, D]."""
    _, normed = rows.norm(x, Target.of(linear), **norm)
    cos, sin = tables(rotate)
    q, k, v = rows.rope(rows.product(normed, linear, bias=False), cos, sin, heads, linear.bias)
    return q[None], k[None], v[None]


def finish(rows: RowOps, layer: Any, x: Tensor, attended: Tensor, **norm: Any) -> tuple[Tensor, Tensor]:
    """The stream after the attention, and what the MLP adds to it."""
    out, up, down = layer.attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj
    branch = rows.product(rows.convert(attended, Target.of(out)), out)
    stream, normed = rows.norm(x, Target.of(up), branch=branch, **norm)
    packed = rows.product(normed, up, bias=False)
    kind = activation(layer.mlp)
    hidden = rows.activate(packed, Target.of(down), activation=kind, gated=True, bias=up.bias)
    return stream, rows.product(hidden, down)


# ----------------------------------------------------------------------------- vision


class RowwiseViTLayer(ViTLayer):
    """Views as rows: [V, L, C] as [V * L, C]. Its norms are unit norms."""

    rows: RowOps

    def along(self, x: Tensor, branch: Tensor | None, views: int) -> tuple[Tensor, Tensor]:
        """(x, what the layer before adds to it) -> the same of this layer."""
        rows, attn, mlp = self.rows, self.attn, self.mlp
        qkv: Any = attn.qkv_proj
        x, normed = layer_norm(rows, x, branch, self.norm1, qkv)
        packed = rows.product(normed, qkv).view(views, -1, 3, attn.o_proj.in_features)
        q, k, v = (part.unflatten(-1, (-1, attn.head_dim)).transpose(1, 2) for part in packed.unbind(2))
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).flatten(0, 1)
        out = rows.product(rows.convert(attended, Target.of(attn.o_proj)), attn.o_proj)
        x, normed = layer_norm(rows, x, out, self.norm2, mlp.fc1)
        packed = rows.product(normed, mlp.fc1, bias=False)
        to = Target.of(mlp.fc2)
        hidden = rows.activate(packed, to, activation="gelu_tanh", gated=False, bias=mlp.fc1.bias)
        return x, rows.product(hidden, mlp.fc2)


class RowwiseTower(PatchTower):
    rows: RowOps

    def encode(self, x: Tensor, rows: int, cols: int) -> Tensor:
        views = len(x)
        x, branch = (x + self.positions(rows, cols)).flatten(0, 1), None
        layers: Any = self.layers
        for layer in layers:
            x, branch = layer.along(x, branch, views)
        norm: Any = self.norm
        if not isinstance(norm, UnitLayerNorm):  # its readers are not known, so it kept its weight
            return norm((x if branch is None else x + branch).unflatten(0, (views, -1)))
        total, normed = self.rows.norm(x, Target(norm.dtype), branch=branch, eps=norm.eps, kind="layer")
        return normed.data.unflatten(0, (views, -1))


def layer_norm(
    rows: RowOps, x: Tensor, branch: Tensor | None, norm: Any, reader: Any
) -> tuple[Tensor, Operand]:
    return rows.norm(x, Target.of(reader), branch=branch, eps=norm.eps, kind="layer")
