"""Fused decoder layers, in two forms: kernels with products inside, or library products with kernels between.

In the first form, five kernels compute the whole layer. The number of rows of a call decides the form, because programs
with any number of rows share a model's weights. Up to ``fused_rows`` rows, the kernels are faster because they start to
read the weights earlier. With more rows, the library is faster because its products have a higher rate. If a layer has
a weight in FP8, the library computes all of its products. Over low-bit weights, the kernel ``weight_only_linear``
replaces the library.

The classes are given to modules of a planned model (``rewrite.become``). They add the attributes ``ops`` and
``fused_rows``, and read the packed and folded weights of the plan. A batch of observations is one matrix with the rows
of all observations, except in the attention.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sinew.engine.cuda.fused.ops import Ops, ResidualStream
from sinew.engine.cuda.fused.rows import Operand, RowOps, RowTarget, norm_options
from sinew.engine.cuda.kernels.tiles import SOME_ROWS
from sinew.engine.plan.packing import PackedMLP
from sinew.engine.plan.prefix_end import KeyValueLayer
from sinew.layers.decoder import AdaptiveDecoderLayer, DecoderAttention, DecoderLayer, KeyValue
from sinew.layers.rope import Rotation


class Modulated(NamedTuple):
    """The modulation of one adaptive norm. It depends on the solver's time.

    Attributes:
        scale: [C].
        shift: [C].
        gate: [C].
        bias: Shift times the weights that read the norm, plus their own bias, [N]. None if the norm is a separate pass.
        following: The scale of the next norm, [C].
    """

    scale: Tensor  # [C]
    shift: Tensor
    gate: Tensor
    bias: Tensor | None  # [N]
    following: Tensor | None = None  # [C]


class FusedAttention(DecoderAttention):
    ops: Ops

    def attend(self, q: Tensor, kv: KeyValue, mask: Tensor, own: KeyValue | None = None) -> Tensor:
        mine = None if own is None else pair(own, q.dtype)
        return self.ops.packed_attention(q, pair(kv, q.dtype), mask.expand(len(q), -1, -1), mine).flatten(2)


class FusedLayer(DecoderLayer):
    """A layer of the language model or of an action expert, with self- or cross-attention.

    Its norms have no weights, except over low-bit weights.
    """

    ops: Ops
    fused_rows = SOME_ROWS  # the largest number of rows for the kernels; 0 beside FP8 and low-bit weights

    def project(self, x: Tensor, rotate: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        attn: Any = self.attn
        return turned(self, attn.qkv_proj, x, rotate, (attn.num_heads, attn.num_kv_heads))

    def query(self, x: Tensor, rotate: Rotation) -> Tensor:
        linear: Any = self.attn.q_proj
        return turned(self, linear, x, rotate, (linear.out_features // self.attn.head_dim, 0))[0]

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        eps = self.post_norm.eps
        if rows := between(self, x):
            norm = norm_options(self.post_norm)
            total, hidden = rowwise(rows, self, flat(x), flat(attended), **norm)
            return like(x, rows.product(hidden, self.mlp.down_proj, onto=total))
        stream = output(self.ops, self.attn.o_proj, flat(attended), flat(x))
        read, norm = normed(self.ops, stream, eps, self.mlp.gate_up_proj)
        return carried(mlp(self.ops, self.mlp, read, norm, stream.rows), x)


class FusedKeyValueLayer(KeyValueLayer):
    """The last layer of the language model, which computes only keys and values."""

    ops: Ops
    fused_rows = SOME_ROWS

    def forward(self, x: Tensor, rotate: Rotation, mask: Tensor) -> tuple[Tensor, KeyValue]:
        linear: Any = self.attn.kv_proj
        _, k, v = turned(self, linear, x, rotate, (0, linear.out_features // (2 * self.attn.head_dim)))
        return x, (k, v)


class FusedAdaptiveLayer(AdaptiveDecoderLayer):
    """A layer with adaptive norms, as in pi0.5's expert. ``before`` and ``after`` are the step's modulations from
    the table."""

    ops: Ops
    fused_rows = SOME_ROWS

    def project(self, x: Tensor, rotate: Rotation, before: Any, after: Any):
        attn: Any = self.attn
        linear, eps, heads = attn.qkv_proj, self.input_norm.eps, (attn.num_heads, attn.num_kv_heads)
        if rows := between(self, x):
            return rotated(rows, linear, x, rotate, heads, **modulation(before, eps))
        return qkv(
            self.ops, linear, x, *modulated(self.ops, stream_of(x), eps, before, linear), rotate, heads
        )

    def finish(self, x: Tensor, attended: Tensor, before: Any, after: Any) -> Tensor:
        eps = self.post_norm.eps
        if rows := between(self, x):
            norm = {"gate": before.gate, **modulation(after, eps)}
            total, hidden = rowwise(rows, self, flat(x), flat(attended), **norm)
            branch = rows.product(hidden, self.mlp.down_proj)
            return like(x, torch.addcmul(total, branch, after.gate).to(x.dtype))
        # If the norm is a separate kernel, the product before it need not compute the norm's inputs.
        scale, following = (None, None) if after.bias is None else (after.scale, after.following)
        stream = output(self.ops, self.attn.o_proj, flat(attended), flat(x), before.gate, scale)
        read, norm = modulated(self.ops, stream, eps, after, self.mlp.gate_up_proj)
        return carried(mlp(self.ops, self.mlp, read, norm, stream.rows, after.gate, following), x)


def carried(stream: ResidualStream, x: Tensor) -> Tensor:
    """Return the rows of the stream as a tensor [B, L, C] for the next layer, with as many observations as ``x``.

    The tensor has the whole stream as an attribute, so that the next layer can use the sums of squares. A copy of the
    tensor has no such attribute. The next layer is then slower, but correct.
    """
    out = like(x, stream.rows)
    out.stream = stream  # type: ignore[attr-defined]
    return out


def stream_of(x: Tensor) -> ResidualStream:
    return getattr(x, "stream", None) or ResidualStream(flat(x))


Norm = dict[str, Any]


def normed(ops: Ops, stream: ResidualStream, eps: float, reader: Any) -> tuple[Tensor, Norm]:
    """Return the inputs and options of a matrix product that also computes the norm of its input.

    The norm has no weights.

    Args:
        ops: The operations.
        stream: The residual stream, which the product reads.
        eps: The norm's constant.
        reader: The layer that computes the product.
    """
    if stream.squares is None:  # the first layer has no sums, because no product computed its input
        return ops.rms(stream.rows, eps), {"bias": reader.bias}
    return stream.rows, {"eps": eps, "bias": reader.bias, "squares": stream.squares}


def modulated(ops: Ops, stream: ResidualStream, eps: float, m: Modulated, reader: Any) -> tuple[Tensor, Norm]:
    """Return the inputs and options of a matrix product that also computes a norm with the modulation ``m``.

    Args:
        ops: The operations.
        stream: The residual stream, which the product reads.
        eps: The norm's constant.
        m: The modulation of the norm.
        reader: The layer that computes the product.
    """
    if m.bias is None or stream.scaled is None:
        return ops.rms(stream.rows, eps, m.scale, m.shift), {"bias": reader.bias}
    return stream.scaled, {"eps": eps, "bias": m.bias, "squares": stream.squares}


def between(layer: Any, x: Tensor) -> RowOps | None:
    """Return the operations between library products. None if fused kernels compute the products."""
    return layer.ops.rows if x.shape[:2].numel() > layer.fused_rows else None


def turned(
    layer: Any, linear: Any, x: Tensor, rotate: Rotation, heads: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the layer's first norm, the projections and the rotation. Return q, k and v, [B, L, heads, D].

    Args:
        layer: The decoder layer.
        linear: The projections of queries, keys and values as one layer.
        x: The layer's input, [B, L, C].
        rotate: The rotary positions.
        heads: Number of query heads, and number of key/value heads.
    """
    ops, eps = layer.ops, layer.input_norm.eps
    if rows := between(layer, x):
        return rotated(rows, linear, x, rotate, heads, **norm_options(layer.input_norm))
    return qkv(ops, linear, x, *normed(ops, stream_of(x), eps, linear), rotate, heads)


def qkv(
    ops: Ops, linear: Any, x: Tensor, read: Tensor, norm: Norm, rotate: Rotation, heads: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the projections and the rotation from ``read``, the product's input, [B * L, C]."""
    cos, sin = tables(rotate, x)
    q, k, v = ops.qkv_rope(read.to(linear.weight.dtype), linear.weight, cos, sin, heads, **norm)
    return like(x, q), like(x, k), like(x, v)


def output(
    ops: Ops,
    linear: Any,
    x: Tensor,
    residual: Tensor,
    gate: Tensor | None = None,
    scale: Tensor | None = None,
) -> ResidualStream:
    x = x.to(linear.weight.dtype)
    return ops.stream_linear(x, linear.weight, bias=linear.bias, gate=gate, residual=residual, scale=scale)


def mlp(
    ops: Ops,
    module: Any,
    x: Tensor,
    norm: Norm,
    residual: Tensor,
    gate: Tensor | None = None,
    scale: Tensor | None = None,
) -> ResidualStream:
    weight = module.gate_up_proj.weight
    hidden = ops.gated_mlp(x.to(weight.dtype), weight, activation(module), **norm)
    return output(ops, module.down_proj, hidden, residual, gate, scale)


def modulation(m: Modulated, eps: float) -> Norm:
    return {"eps": eps, "weight": m.scale, "offset": 1.0, "shift": m.shift}


def rotated(
    rows: RowOps, linear: Any, x: Tensor, rotate: Rotation, heads: tuple[int, int], **norm: Any
) -> tuple[Tensor, Tensor, Tensor]:
    _, operand = rows.norm(flat(x), RowTarget.of(linear), **norm)
    cos, sin = tables(rotate, x)
    q, k, v = rows.rope(rows.product(operand, linear, bias=False), cos, sin, heads, linear.bias)
    return like(x, q), like(x, k), like(x, v)


def rowwise(rows: RowOps, layer: Any, x: Tensor, attended: Tensor, **norm: Any) -> tuple[Tensor, Operand]:
    """Compute the second half of the layer up to the MLP's activation, from the attention's output.

    Returns:
        The residual stream after the attention, in new memory, and the input of the MLP's last product.
    """
    out, up, down = layer.attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj
    branch = rows.product(rows.convert(attended, RowTarget.of(out)), out, bias=False)
    stream, operand = rows.norm(x, RowTarget.of(up), branch=branch, branch_bias=out.bias, **norm)
    packed = rows.product(operand, up, bias=False)
    kind = activation(layer.mlp)
    return stream, rows.activate(packed, RowTarget.of(down), activation=kind, gated=True, bias=up.bias)


def activation(module: PackedMLP) -> Any:
    return module.kind


def pair(kv: KeyValue, dtype: torch.dtype) -> KeyValue:
    """Return keys and values in the form that the kernel reads.

    Keys and values get the dtype of the queries, because a bundle may mix precisions. They also get the same strides
    between observations and between rows.
    """
    k, v = (tensor.to(dtype) for tensor in kv)
    return (k, v) if k.stride()[:2] == v.stride()[:2] else (k.contiguous(), v.contiguous())


def tables(rotate: Rotation, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin as matrices with one row per row of ``x``: [B, L, 1, D / 2] -> [B * L, D / 2].

    A table with one set of positions for all observations is repeated.
    """
    cos, sin = (flat(table.expand(len(x), -1, -1, -1))[:, 0] for table in rotate)
    return cos, sin


def flat(x: Tensor) -> Tensor:
    """Return the rows of all observations: [B, L, ...] -> [B * L, ...]."""
    return x.flatten(0, 1)


def like(x: Tensor, rows: Tensor) -> Tensor:
    """Return rows [B * L, ...] with the axes of observations and tokens of ``x`` [B, L, ...]."""
    return rows.unflatten(0, x.shape[:2])


def one(x: Tensor) -> Tensor:
    """Return a vector that all observations share: the embedding of the solver's time, [1, C] -> [C].

    Raises:
        ValueError: The observations have different times.
    """
    if len(x) != 1:
        raise ValueError(f"time: expected one time for all observations of a batch, got {len(x)}")
    return x[0]
