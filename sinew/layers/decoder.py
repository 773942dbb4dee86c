"""Decoder layers as in Llama and Gemma, split into two halves for models with an action expert.

A VLA runs these layers in two ways. First they run over the prefix (views and prompt), and the keys and
values of each layer are stored. Then they run over a few action tokens, which attend to these keys and
values. A layer therefore has two halves: ``project`` before the attention, and ``finish`` after the
attention. The model computes the attention between the two halves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinew.layers.attention import attend
from sinew.layers.fold_sites import FoldSite
from sinew.layers.linear import Embedding, linear_layer
from sinew.layers.norm import AdaRMSNorm, GemmaRMSNorm, Modulation, RMSNorm
from sinew.layers.rope import Rotation
from sinew.layers.sizes import check_sizes

KeyValue = tuple[Tensor, Tensor]  # [B, L, Hkv, D] each; keys are already rotated


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and options of a decoder.

    Attributes:
        hidden_size: Width of the hidden states.
        intermediate_size: Inner width of the MLP.
        num_layers: Number of layers.
        num_heads: Number of query heads.
        num_kv_heads: Number of key/value heads, which divides ``num_heads``.
        head_dim: Width of a head.
        norm_eps: Epsilon of the norms.
        rope_theta: Base of the rotary frequencies.
        norm: "rms" (Llama, Qwen), or "gemma_rms", whose factor is 1 plus the stored weight.
        activation: Activation of the gated MLP.
        qkv_bias: True if the projections to queries, keys and values have biases.
        qk_norm: True if queries and keys are normalised per head before the rotation (Qwen3).
        sub_norms: True if two more norms exist, each before a last projection: one on the attention's result,
            one on the gated product of the MLP (BitNet).
        ternary: True if the linear layers have ternary weights.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    norm: Literal["rms", "gemma_rms"] = "rms"
    activation: Literal["silu", "gelu_tanh", "relu2"] = "silu"
    qkv_bias: bool = False
    qk_norm: bool = False
    sub_norms: bool = False
    ternary: bool = False

    def __post_init__(self) -> None:
        check_sizes(self)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads: expected a multiple of num_kv_heads {self.num_kv_heads}, got {self.num_heads}"
            )


class DecoderAttention(nn.Module):
    """The projections and the attention of one decoder layer.

    An engine may replace :meth:`heads` (the projections) and :meth:`attend`. The operations between these
    methods, :meth:`rotate_query` and :meth:`rotate_key`, are always computed by the model.

    Args:
        config: Sizes of the decoder.
        kv_input_size: Width of the input of keys and values in cross-attention. None means self-attention.
    """

    def __init__(self, config: DecoderConfig, kv_input_size: int | None = None):
        super().__init__()
        self.head_dim = config.head_dim
        self.is_cross = kv_input_size is not None
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        linear = linear_layer(config.ternary)
        self.q_proj = linear(config.hidden_size, q_size, bias=config.qkv_bias)
        self.k_proj = linear(kv_input_size or config.hidden_size, kv_size, bias=config.qkv_bias)
        self.v_proj = linear(kv_input_size or config.hidden_size, kv_size, bias=config.qkv_bias)
        self.o_proj = linear(q_size, config.hidden_size, bias=False)
        eps = config.norm_eps
        self.q_norm = RMSNorm(config.head_dim, eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, eps) if config.qk_norm else None
        self.o_norm = RMSNorm(q_size, eps) if config.sub_norms else None

    def fold_sites(self) -> list[FoldSite]:
        return [FoldSite(self, "o_norm", (self.o_proj,))] if self.o_norm is not None else []

    def inputs(self) -> tuple[nn.Module, ...]:
        return (self.q_proj,) if self.is_cross else (self.q_proj, self.k_proj, self.v_proj)

    def query(self, x: Tensor) -> Tensor:  # [B, L, C] -> [B, L, H, D]
        return self.q_proj(x).unflatten(-1, (-1, self.head_dim))

    def key_value(self, keys: Tensor, values: Tensor) -> KeyValue:  # [B, L, *] -> [B, L, Hkv, D] each
        shape = (-1, self.head_dim)
        return self.k_proj(keys).unflatten(-1, shape), self.v_proj(values).unflatten(-1, shape)

    def heads(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project hidden states h [B, L, C] to q [B, L, H, D], k and v [B, L, Hkv, D], before norms and rotation."""
        k, v = self.key_value(h, h)
        return self.query(h), k, v

    def rotate_query(self, q: Tensor, rotate: Rotation) -> Tensor:
        return rotate(q if self.q_norm is None else self.q_norm(q))

    def rotate_key(self, k: Tensor, rotate: Rotation) -> Tensor:
        return rotate(k if self.k_norm is None else self.k_norm(k))

    def project(self, h: Tensor, rotate: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.heads(h)
        return self.rotate_query(q, rotate), self.rotate_key(k, rotate), v

    def output(self, attended: Tensor) -> Tensor:  # [B, L, H * D] -> [B, L, C]
        return self.o_proj(attended if self.o_norm is None else self.o_norm(attended))

    def attend(self, q: Tensor, kv: KeyValue, mask: Tensor, own: KeyValue | None = None) -> Tensor:
        """Compute the attention of queries over ``kv`` and ``own``.

        An engine may override this method so that ``kv`` and ``own`` need not be joined in memory.

        Args:
            q: [B, L, H, D].
            kv: Keys and values, [B, P, Hkv, D] each.
            mask: bool [B, L, keys], as for :func:`.attend`.
            own: More keys and values after ``kv``, for example of the action tokens.

        Returns:
            [B, L, H * D].
        """
        if own is not None:
            kv = torch.cat([kv[0], own[0]], dim=1), torch.cat([kv[1], own[1]], dim=1)
        return attend(q, *kv, mask)


def relu2(x: Tensor) -> Tensor:
    """Return max(x, 0)^2 (So et al. 2021; BitNet)."""
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu2": relu2,
}


class GatedMLP(nn.Module):
    """The gated MLP down(activation(gate(x)) * up(x)) (Shazeer 2020), with SiLU in Llama and tanh-GELU in Gemma.

    Attributes:
        kind: Name of the activation, independent of the function that computes it.
    """

    def __init__(self, config: DecoderConfig):
        super().__init__()
        linear = linear_layer(config.ternary)
        self.gate_proj = linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = linear(config.intermediate_size, config.hidden_size, bias=False)
        self.kind = config.activation
        self.activation = ACTIVATIONS[config.activation]
        self.norm = RMSNorm(config.intermediate_size, config.norm_eps) if config.sub_norms else None

    def fold_sites(self) -> list[FoldSite]:
        return [FoldSite(self, "norm", (self.down_proj,))] if self.norm is not None else []

    def inputs(self) -> tuple[nn.Module, ...]:
        return self.gate_proj, self.up_proj

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.activation(self.gate_proj(x)) * self.up_proj(x))

    def output(self, product: Tensor) -> Tensor:  # [B, L, intermediate] -> [B, L, C]
        return self.down_proj(product if self.norm is None else self.norm(product))


def decoder_norm(config: DecoderConfig) -> RMSNorm:
    kind = GemmaRMSNorm if config.norm == "gemma_rms" else RMSNorm
    return kind(config.hidden_size, config.norm_eps)


class DecoderLayer(nn.Module):
    """A decoder layer: attention and gated MLP, each preceded by a norm."""

    def __init__(self, config: DecoderConfig, kv_input_size: int | None = None):
        super().__init__()
        self.input_norm = decoder_norm(config)
        self.attn = DecoderAttention(config, kv_input_size)
        self.post_norm = decoder_norm(config)
        self.mlp = GatedMLP(config)

    def fold_sites(self) -> list[FoldSite]:
        return [FoldSite(self, "input_norm", (self.attn,)), FoldSite(self, "post_norm", (self.mlp,))]

    def project(self, x: Tensor, rotate: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the first half of the layer, before the attention: rotated queries [B, L, H, D], rotated
        keys and plain values [B, L, Hkv, D] of hidden states x [B, L, C].
        """
        return self.attn.project(self.input_norm(x), rotate)

    def query(self, x: Tensor, rotate: Rotation) -> Tensor:
        """Compute only the rotated queries [B, L, H, D] of hidden states x [B, L, C]. Cross-attention needs
        no new keys and values in a solver step.
        """
        return self.attn.rotate_query(self.attn.query(self.input_norm(x)), rotate)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Compute the second half of the layer, after the attention: the output [B, L, C] from the layer's
        input x [B, L, C] and the attention's result [B, L, H * D].
        """
        x = x + self.attn.output(attended)
        return x + self.mlp(self.post_norm(x))

    def forward(self, x: Tensor, rotate: Rotation, mask: Tensor) -> tuple[Tensor, KeyValue]:
        """Run the layer over a whole sequence.

        Args:
            x: [B, L, C].
            rotate: Rotary positions.
            mask: bool [B, L, L], True if the query may attend to the key.

        Returns:
            The output [B, L, C], and the layer's keys and values.
        """
        q, k, v = self.project(x, rotate)
        return self.finish(x, self.attn.attend(q, (k, v), mask)), (k, v)


class AdaptiveDecoderLayer(nn.Module):
    """A decoder layer of pi0.5. A condition, such as the solver's time, changes the scale and shift of its
    norms and multiplies its residual branches.
    """

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.input_norm = AdaRMSNorm(config.hidden_size, config.norm_eps)
        self.attn = DecoderAttention(config)
        self.post_norm = AdaRMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(config)

    def project(self, x: Tensor, rotate: Rotation, before: Modulation, after: Modulation):
        """Compute the queries, keys and values, as :meth:`DecoderLayer.project` does. ``before`` and
        ``after`` are the modulations (scale, shift and gate) of this layer's two norms.
        """
        return self.attn.project(self.input_norm(x, before), rotate)

    def finish(self, x: Tensor, attended: Tensor, before: Modulation, after: Modulation) -> Tensor:
        x = x + (self.attn.output(attended) * before.gate).to(x.dtype)
        return x + (self.mlp(self.post_norm(x, after)) * after.gate).to(x.dtype)


class Decoder(nn.Module):
    """Token table, layers and final norm of a language model that runs once over a prefix."""

    layers: Sequence[nn.Module]

    def __init__(self, config: DecoderConfig, vocab_size: int):
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(  # type: ignore[assignment]
            DecoderLayer(config) for _ in range(config.num_layers)
        )
        self.norm = decoder_norm(config)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor) -> tuple[Tensor, list[KeyValue]]:
        """Run the layers over a whole sequence.

        Args:
            x: [B, L, C].
            positions: int [B, L].
            mask: bool [B, L, L], True if the query may attend to the key.

        Returns:
            The hidden states [B, L, C] before the final norm, and the keys and values of each layer.
        """
        x = x.to(self.embed_tokens.dtype)
        rotate = Rotation.at(positions, self.config.head_dim, self.config.rope_theta)
        cache: list[KeyValue] = []
        for layer in self.layers:
            x, kv = layer(x, rotate, mask)
            cache.append(kv)
        return x, cache

    def extend(
        self, x: Tensor, positions: Tensor, mask: Tensor, cache: Sequence[KeyValue]
    ) -> tuple[Tensor, tuple[KeyValue, ...]]:
        """Run new tokens after tokens whose keys and values are already computed.

        Args:
            x: [B, N, C], the new tokens.
            positions: int [B, N].
            mask: bool [B, N, P + N].
            cache: Keys and values of each layer, [B, P, Hkv, D]. The cache is unchanged.

        Returns:
            The hidden states of the N new tokens before the final norm, and a new cache of P + N tokens.
        """
        x = x.to(self.embed_tokens.dtype)
        rotate = Rotation.at(positions, self.config.head_dim, self.config.rope_theta)
        layers: Sequence[DecoderLayer] = self.layers  # type: ignore[assignment]
        longer: list[KeyValue] = []
        for layer, (keys, values) in zip(layers, cache, strict=True):
            q, k, v = layer.project(x, rotate)
            kv = torch.cat([keys, k], dim=1), torch.cat([values, v], dim=1)
            x = layer.finish(x, layer.attn.attend(q, kv, mask))
            longer.append(kv)
        return x, tuple(longer)
