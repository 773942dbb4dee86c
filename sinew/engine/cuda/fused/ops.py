"""The operations that fused layers call, and two implementations of them in PyTorch.

Products read rows, and the rows of a batch are those of all its observations. Only the attention has an axis of
observations.

* ``References`` defines the kernels: float32 inside, one rounding at the end.
* ``PlainOps`` runs a model without kernels: products in the weight's precision, and ``scaled_dot_product_attention``.
* :mod:`.launches` has the third way, Triton's kernels.

Each operation is at most one product. An operation that computes a whole step of the head belongs to :mod:`.step`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sinew.engine.cuda.fused.rows import RowOps, RowReferences
from sinew.engine.cuda.fused.step import HeadStep
from sinew.engine.cuda.kernels import (
    gated_mlp,
    norm_linear,
    packed_attention,
    preprocess,
    qkv_rope,
    row_norm,
    splitk_linear,
)
from sinew.engine.cuda.kernels.lang import MASKED
from sinew.engine.cuda.kernels.resize_tables import ResizeTables
from sinew.layers.decoder import KeyValue
from sinew.layers.norm import rms_normalize
from sinew.layers.rope import Rotation


class ResidualStream(NamedTuple):
    """The activations that one layer passes to the next layer.

    Attributes:
        rows: [M, C].
        squares: float32 [M, any number]. The sum of row i is the sum of squares of ``rows[i]``. None if not computed.
        scaled: rows * (1 + scale of the next norm). None if not computed.
    """

    rows: Tensor
    squares: Tensor | None = None
    scaled: Tensor | None = None


class Ops(ABC):
    """The operations of a fused model.

    Several operations accept the keyword arguments ``norm``: bias [N], and the pair eps and squares.
    ``norm_linear.product`` explains them. ``norm_linear`` also accepts silu.

    Attributes:
        rows: The operations between library products. None uses PyTorch's operations.
        steps: Operations that compute a whole step of the head, the preferred one first. Without a suitable one, the
            fused layers compute the step.
    """

    rows: RowOps | None = None
    steps: tuple[type[HeadStep], ...] = ()

    @abstractmethod
    def norm_linear(self, x: Tensor, weight: Tensor, **norm: Any) -> Tensor:
        """Return norm(x) W^T, [M, N] in weight's dtype.

        The shapes are x [M, K] and weight [N, K]. The keyword arguments ``norm`` are the norm's options.
        """

    @abstractmethod
    def gated_mlp(self, x: Tensor, weight: Tensor, activation: gated_mlp.Activation, **norm: Any) -> Tensor:
        """Return activation(gate) * up, [M, N].

        Args:
            x: [M, K].
            weight: [2 N, K], the gate's rows before the rows of up.
            activation: The activation.
            **norm: Options of the norm.
        """

    @abstractmethod
    def qkv_rope(
        self, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, int], **norm: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated q [M, H, D] and k [M, Hkv, D], and v [M, Hkv, D].

        Args:
            x: [M, K].
            weight: [(H + 2 Hkv) D, K].
            cos: float32 [M, D / 2].
            sin: float32 [M, D / 2].
            heads: (H, Hkv).
            **norm: Options of the norm.
        """

    @abstractmethod
    def splitk_linear(self, x: Tensor, weight: Tensor, **rest: Any) -> Tensor:
        """Return residual + gate * (x W^T + bias), [M, N]. The options are bias [N], gate [N] and residual [M, N]."""

    def stream_linear(
        self,
        x: Tensor,
        weight: Tensor,
        *,
        scale: Tensor | None = None,
        dtype: torch.dtype | None = None,
        **rest: Any,
    ) -> ResidualStream:
        """Compute :meth:`splitk_linear`, and the sums of squares and scaled values that the next norm needs.

        Args:
            x: [M, K].
            weight: [N, K].
            scale: Scale of the next norm if it is modulated, [N].
            dtype: Dtype of the stream, by default x's dtype.
            **rest: Options of :meth:`splitk_linear`.
        """
        rows = self.splitk_linear(x, weight, **rest)
        return ResidualStream(rows if dtype is None else rows.to(dtype))

    @abstractmethod
    def packed_attention(self, q: Tensor, kv: KeyValue, mask: Tensor, own: KeyValue | None = None) -> Tensor:
        """Return the attention of q over kv and own of the same observation, [B, M, H, D].

        Args:
            q: Queries, [B, M, H, D].
            kv: Keys and values of the prefix, [B, P, Hkv, D] each.
            mask: bool [B, M, P + S], True for visible keys.
            own: Keys and values of the queries' own tokens, [B, S, Hkv, D] each, or None.
        """

    @abstractmethod
    def rms(self, x: Tensor, eps: float, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
        """Return x / rms(x) * (1 + scale) + shift, [M, C]."""

    @abstractmethod
    def preprocess(self, frames: Tensor, resize: ResizeTables, patch: int, out: Tensor) -> None:
        """Write the first 3 * patch^2 values of each row of ``out``.

        Args:
            frames: uint8 [V, h, w, 3].
            resize: The tables of the resize.
            patch: Side of a patch in pixels.
            out: [V, patches, values].
        """


class References(Ops):
    """The PyTorch references that define the results of the kernels. They run on any device."""

    rows = RowReferences()

    def norm_linear(self, x: Tensor, weight: Tensor, **norm: Any) -> Tensor:
        return norm_linear.reference(x, weight, **norm)

    def gated_mlp(self, x: Tensor, weight: Tensor, activation: gated_mlp.Activation, **norm: Any) -> Tensor:
        return gated_mlp.reference(x, weight, activation=activation, **norm)

    def qkv_rope(
        self, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, int], **norm: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        return qkv_rope.reference(x, weight, cos, sin, heads, **norm)

    def splitk_linear(self, x: Tensor, weight: Tensor, **rest: Any) -> Tensor:
        return splitk_linear.reference(x, weight, **rest)

    def stream_linear(
        self,
        x: Tensor,
        weight: Tensor,
        *,
        scale: Tensor | None = None,
        dtype: torch.dtype | None = None,
        **rest: Any,
    ) -> ResidualStream:
        rows = splitk_linear.reference(x, weight, dtype=dtype, **rest)
        return ResidualStream(rows, *splitk_linear.statistics_reference(rows, scale))

    def packed_attention(self, q: Tensor, kv: KeyValue, mask: Tensor, own: KeyValue | None = None) -> Tensor:
        return packed_attention.reference(q, kv, mask, own=own)

    def rms(self, x: Tensor, eps: float, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
        return row_norm.reference(x, eps=eps, weight=scale, offset=1.0, shift=shift)[1]

    def preprocess(self, frames: Tensor, resize: ResizeTables, patch: int, out: Tensor) -> None:
        out[..., : 3 * patch * patch] = preprocess.reference(frames, resize, dtype=out.dtype, patch=patch)


class PlainOps(References):
    """The operations as PyTorch computes them, without kernels. Only the resize of frames uses the reference."""

    rows = None  # type: ignore[assignment]
    steps = ()

    stream_linear = Ops.stream_linear  # this method does not compute the next norm's inputs

    def norm_linear(self, x: Tensor, weight: Tensor, *, silu: bool = False, **norm: Any) -> Tensor:
        y = _linear(x, weight, **norm)
        return F.silu(y) if silu else y

    def gated_mlp(self, x: Tensor, weight: Tensor, activation: gated_mlp.Activation, **norm: Any) -> Tensor:
        gate, up = _linear(x, weight, **norm).chunk(2, dim=-1)
        return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up

    def qkv_rope(
        self, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, int], **norm: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        H, KV = heads
        packed = _linear(x, weight, **norm).unflatten(-1, (H + 2 * KV, -1))  # [M, H + 2 Hkv, D]
        turning, v = packed.split([H + KV, KV], dim=1)
        turned = Rotation(cos[:, None], sin[:, None])(turning)
        return turned[:, :H], turned[:, H:].contiguous(), v.contiguous()

    def splitk_linear(self, x: Tensor, weight: Tensor, **rest: Any) -> Tensor:
        bias, gate, residual = (rest.get(name) for name in ("bias", "gate", "residual"))
        y = _linear(x, weight, bias=bias)
        if gate is not None:
            y = (y * gate).to(x.dtype)
        return y if residual is None else residual + y

    def packed_attention(self, q: Tensor, kv: KeyValue, mask: Tensor, own: KeyValue | None = None) -> Tensor:
        k, v = kv if own is None else (torch.cat([a, b], dim=1) for a, b in zip(kv, own, strict=True))
        B, M, H, D = q.shape
        G = H // k.shape[2]
        # Put the heads of a group into the axis of rows, as the kernel does. Keys need no copies then, and every
        # attention backend supports this form. The mask becomes a finite bias, so that rows without visible keys
        # (padding) give finite results.
        rows = q.view(B, M, -1, G, D).permute(0, 2, 3, 1, 4).flatten(2, 3)  # [B, Hkv, G * M, D]
        bias = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, _masked(q.dtype))
        bias = bias[:, None].expand(-1, G, -1, -1).flatten(1, 2)[:, None]  # [B, 1, G * M, P + S]
        out = F.scaled_dot_product_attention(rows, k.transpose(1, 2), v.transpose(1, 2), attn_mask=bias)
        return out.unflatten(2, (G, M)).permute(0, 3, 1, 2, 4).reshape(B, M, H, D)

    def rms(self, x: Tensor, eps: float, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
        y = rms_normalize(x, eps)
        y = y if scale is None else y * (1.0 + scale.float())
        return (y if shift is None else y + shift.float()).to(x.dtype)


def divided(x: Tensor, squares: Tensor, eps: float | None) -> Tensor:
    """Return x / sqrt(mean + eps) in x's dtype. The mean is the sum of ``squares`` over the width of x."""
    assert eps is not None, "squares: expected only with a norm"
    mean = squares.sum(-1, keepdim=True) / x.shape[-1]
    return (x.float() * torch.rsqrt(mean + eps)).to(x.dtype)


def _masked(dtype: torch.dtype) -> float:
    """Return the attention score for a masked key.

    The score is far below every real score, but far above the smallest number of ``dtype``.
    """
    return max(MASKED, torch.finfo(dtype).min / 4)


def _linear(
    x: Tensor,
    weight: Tensor,
    eps: float | None = None,
    bias: Tensor | None = None,
    squares: Tensor | None = None,
) -> Tensor:
    if squares is not None:
        x = divided(x, squares, eps)
    return F.linear(x.to(weight.dtype), weight, None if bias is None else bias.to(weight.dtype))
