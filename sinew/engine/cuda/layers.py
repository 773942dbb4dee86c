"""Decoder layers whose forward is kernels: five per layer of the language model, five per layer of the head.

Classes to be given to modules of a planned model (``rewrite.become``). They add an ``ops`` and no other state, read
the packed and folded weights where the plan left them, and take one observation (a batch of one).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sinew.engine.cuda.ops import Ops
from sinew.engine.plan.packing import PackedMLP
from sinew.engine.plan.prefix_end import KeyValueLayer
from sinew.layers.decoder import AdaptiveDecoderLayer, DecoderAttention, DecoderLayer, KeyValue
from sinew.layers.rope import Rotation


class Modulated(NamedTuple):
    """What the solver's time gives to one norm. bias: shift times the weights that read the norm, plus their own
    bias; None where the norm has a pass of its own."""

    scale: Tensor  # [C]
    shift: Tensor
    gate: Tensor
    bias: Tensor | None  # [N]


class FusedAttention(DecoderAttention):
    ops: Ops

    def attend(self, q: Tensor, kv: KeyValue, mask: Tensor, own: KeyValue | None = None) -> Tensor:
        mine = None if own is None else pair(own, q.dtype)
        return self.ops.packed_attention(one(q), pair(kv, q.dtype), one(mask), mine).flatten(1)[None]


class FusedLayer(DecoderLayer):
    """Of the language model, of pi0's expert and of SmolVLA's, self or cross. Its norms are unit norms."""

    ops: Ops

    def project(self, x: Tensor, rotate: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        return project(self.ops, self.attn, one(x), rotate, eps=self.input_norm.eps)

    def query(self, x: Tensor, rotate: Rotation) -> Tensor:
        linear: Any = self.attn.q_proj
        heads = len(linear.weight) // self.attn.head_dim, 0
        return qkv(self.ops, linear, one(x), rotate, heads, eps=self.input_norm.eps)[0]

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        stream = output(self.ops, self.attn.o_proj, one(attended), one(x))
        return mlp(self.ops, self.mlp, stream, stream, eps=self.post_norm.eps)[None]


class FusedKeyValueLayer(KeyValueLayer):
    """The last language layer: keys and values alone."""

    ops: Ops

    def forward(self, x: Tensor, rotate: Rotation, mask: Tensor) -> tuple[Tensor, KeyValue]:
        attn: Any = self.attn
        heads = 0, len(attn.kv_proj.weight) // (2 * attn.head_dim)
        _, k, v = qkv(self.ops, attn.kv_proj, one(x), rotate, heads, eps=self.input_norm.eps)
        return x, (k, v)


class FusedAdaptiveLayer(AdaptiveDecoderLayer):
    """Of pi0.5's expert: ``before`` and ``after`` come from the table of the step."""

    ops: Ops

    def project(self, x: Tensor, rotate: Rotation, before: Any, after: Any):
        attn: Any = self.attn
        rows, norm = modulated(self.ops, one(x), self.input_norm.eps, before, attn.qkv_proj.bias)
        return project(self.ops, attn, rows, rotate, **norm)

    def finish(self, x: Tensor, attended: Tensor, before: Any, after: Any) -> Tensor:
        stream = output(self.ops, self.attn.o_proj, one(attended), one(x), before.gate)
        gate_up: Any = self.mlp.gate_up_proj
        rows, norm = modulated(self.ops, stream, self.post_norm.eps, after, gate_up.bias)
        return mlp(self.ops, self.mlp, rows, stream, after.gate, **norm)[None]


def modulated(
    ops: Ops, x: Tensor, eps: float, m: Modulated, bias: Tensor | None
) -> tuple[Tensor, dict[str, Any]]:
    """The rows and the ``norm`` that a product has to be given to read x through a modulated norm."""
    if m.bias is not None:
        return x, {"eps": eps, "scale": m.scale, "bias": m.bias}
    return ops.ada_rms(x, m.scale, m.shift, eps), {"bias": bias}


def project(ops: Ops, attn: Any, x: Tensor, rotate: Rotation, **norm: Any) -> tuple[Tensor, Tensor, Tensor]:
    return qkv(ops, attn.qkv_proj, x, rotate, (attn.num_heads, attn.num_kv_heads), **norm)


def qkv(
    ops: Ops, linear: Any, x: Tensor, rotate: Rotation, heads: tuple[int, int], **norm: Any
) -> tuple[Tensor, Tensor, Tensor]:
    options = {"bias": linear.bias} | norm
    cos, sin = tables(rotate)
    q, k, v = ops.qkv_rope(x.to(linear.weight.dtype), linear.weight, cos, sin, heads, **options)
    return q[None], k[None], v[None]


def output(ops: Ops, linear: Any, x: Tensor, residual: Tensor, gate: Tensor | None = None) -> Tensor:
    x = x.to(linear.weight.dtype)
    return ops.splitk_linear(x, linear.weight, bias=linear.bias, gate=gate, residual=residual)


def mlp(
    ops: Ops, module: Any, x: Tensor, residual: Tensor, gate: Tensor | None = None, **norm: Any
) -> Tensor:
    linear = module.gate_up_proj
    options = {"bias": linear.bias} | norm
    hidden = ops.gated_mlp(x.to(linear.weight.dtype), linear.weight, activation(module), **options)
    return output(ops, module.down_proj, hidden, residual, gate)


def activation(module: PackedMLP) -> Any:
    return "silu" if module.activation is F.silu else "gelu_tanh"


def pair(kv: KeyValue, dtype: torch.dtype) -> KeyValue:
    """Keys and values as the kernel reads them: of the queries' precision, which differs where a bundle mixes
    precisions, and with one distance between rows."""
    k, v = (one(tensor).to(dtype) for tensor in kv)
    return (k, v) if k.stride(0) == v.stride(0) else (k.contiguous(), v.contiguous())


def tables(rotate: Rotation) -> tuple[Tensor, Tensor]:
    """cos and sin, [1, L, 1, D / 2] -> [L, D / 2]."""
    return one(rotate.cos)[:, 0], one(rotate.sin)[:, 0]


def one(x: Tensor) -> Tensor:
    """The rows of a batch of one. Kernels have no batch axis: an engine runs one observation at a time."""
    if len(x) != 1:
        raise ValueError(f"batch: expected one observation, got {len(x)}")
    return x[0]
