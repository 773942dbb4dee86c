"""Transformer blocks of a diffusion action head, as diffusers defines them and GR00T uses them.

A block consists of attention and a GELU MLP, each after a norm, with biases in all linear layers. In the diffusion
transformer the first norm has no weights: its scale and shift come from the embedded time. Its attention alternates
between the head's own tokens and the features of the vision-language model (Peebles and Xie 2023; diffusers
``BasicTransformerBlock`` with ``ada_norm``). With a plain norm the same block refines the vision-language features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinew.layers.attention import attend
from sinew.layers.fold_sites import FoldSite
from sinew.layers.linear import Linear, rounded
from sinew.layers.norm import LayerNorm
from sinew.layers.sizes import check_sizes

NORM_EPS = 1e-5  # epsilon of norms inside a block
OUT_EPS = 1e-6  # epsilon of the last norm
MAX_PERIOD = 10_000.0  # longest period of both sinusoids
TIME_CHANNELS = 256  # channels of the sinusoids at the start of the time embedding


@dataclass(frozen=True)
class DiTConfig:
    """Sizes of a stack of transformer blocks.

    Attributes:
        num_layers: Number of blocks.
        num_heads: Number of attention heads.
        head_dim: Width of a head.
        output_size: Width of the output.
        context_size: Width of the features of the vision-language model, which cross-attention reads.
        is_cross: For each block, True if its attention reads these features, and False if it reads the
            block's own tokens.
    """

    num_layers: int
    num_heads: int
    head_dim: int
    output_size: int
    context_size: int
    is_cross: tuple[bool, ...]

    def __post_init__(self) -> None:
        check_sizes(self)
        if len(self.is_cross) != self.num_layers:
            raise ValueError(
                f"is_cross: expected {self.num_layers} entries, one per block, got {len(self.is_cross)}"
            )

    @property
    def hidden_size(self) -> int:
        return self.num_heads * self.head_dim


def plain_layer_norm(x: Tensor, eps: float) -> Tensor:
    """Normalise the last axis of x without weights. Statistics and result are float32."""
    return F.layer_norm(x.float(), x.shape[-1:], eps=eps)


def modulated(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    """Return LN(x) * (1 + scale) + shift in x's dtype.

    Args:
        x: [B, L, C].
        scale: [B, C].
        shift: [B, C].
        eps: Epsilon of the norm.
    """
    normal = plain_layer_norm(x, eps)
    return (normal * (1.0 + scale.float()[:, None]) + shift.float()[:, None]).to(x.dtype)


class BiasedAttention(nn.Module):
    """Multi-head attention whose projections have biases.

    Args:
        size: Width of the queries' input and of the output.
        num_heads: Number of heads.
        head_dim: Width of a head.
        context_size: Width of the input of keys and values.
    """

    def __init__(self, size: int, num_heads: int, head_dim: int, context_size: int):
        super().__init__()
        self.head_dim = head_dim
        inner = num_heads * head_dim
        self.q_proj = Linear(size, inner)
        self.k_proj = Linear(context_size, inner)
        self.v_proj = Linear(context_size, inner)
        self.o_proj = Linear(inner, size)

    def inputs(self) -> tuple[nn.Module, ...]:
        return self.q_proj, self.k_proj, self.v_proj

    def query(self, x: Tensor) -> Tensor:  # [B, L, C] -> [B, L, H, D]
        return self.q_proj(x).unflatten(-1, (-1, self.head_dim))

    def key_value(self, context: Tensor) -> tuple[Tensor, Tensor]:  # [B, K, C'] -> [B, K, H, D] each
        shape = (-1, self.head_dim)
        return self.k_proj(context).unflatten(-1, shape), self.v_proj(context).unflatten(-1, shape)

    def forward(self, x: Tensor, kv: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """Attend from tokens to keys and values.

        Args:
            x: [B, L, C].
            kv: Keys and values, [B, K, H, D] each.
            mask: bool [B, L, K], True if the token may attend to the key.

        Returns:
            [B, L, C].
        """
        return self.o_proj(attend(self.query(x), *kv, mask))


class GeluMLP(nn.Module):
    """The MLP fc2(gelu(fc1(x))), whose inner width is four times ``size``.

    Args:
        size: Width of input and output.
        approximate: Form of GELU, as in ``torch.nn.functional.gelu``.
    """

    def __init__(self, size: int, approximate: Literal["tanh", "none"] = "tanh"):
        super().__init__()
        self.approximate = approximate
        self.fc1 = Linear(size, 4 * size)
        self.fc2 = Linear(4 * size, size)

    def inputs(self) -> tuple[nn.Module, ...]:
        return (self.fc1,)

    def forward(self, x: Tensor) -> Tensor:  # [B, L, C]
        return self.fc2(F.gelu(self.fc1(x), approximate=self.approximate))


class SelfAttentionLayer(nn.Module):
    """A transformer block with plain norms, whose self-attention reads one sequence."""

    def __init__(self, size: int, num_heads: int, head_dim: int):
        super().__init__()
        self.norm1 = LayerNorm(size, eps=NORM_EPS)
        self.attn = BiasedAttention(size, num_heads, head_dim, size)
        self.norm2 = LayerNorm(size, eps=NORM_EPS)
        self.mlp = GeluMLP(size)

    def fold_sites(self) -> list[FoldSite]:
        return [FoldSite(self, "norm1", (self.attn,)), FoldSite(self, "norm2", (self.mlp,))]

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Run the block.

        Args:
            x: [B, L, C].
            mask: bool [B, L, L], True if the token may attend to the key.

        Returns:
            [B, L, C].
        """
        h = self.norm1(x)
        x = x + self.attn(h, self.attn.key_value(h), mask)
        return x + self.mlp(self.norm2(x))


class DiTLayer(nn.Module):
    """A transformer block whose first norm gets its scale and shift from the embedded time.
    ``dense(silu(time))`` is [scale, shift].
    """

    def __init__(self, config: DiTConfig, is_cross: bool):
        super().__init__()
        size = config.hidden_size
        self.is_cross = is_cross
        self.dense = Linear(size, 2 * size)
        self.attn = BiasedAttention(
            size, config.num_heads, config.head_dim, config.context_size if is_cross else size
        )
        self.mlp = GeluMLP(size)

    def forward(
        self, x: Tensor, modulation: Tensor, kv: tuple[Tensor, Tensor] | None, mask: Tensor
    ) -> Tensor:
        """Run the block.

        Args:
            x: [B, L, C].
            modulation: [B, 2C], the scale of the first norm before its shift.
            kv: Keys and values of the vision-language features in a cross-attention block. None in a
                self-attention block.
            mask: bool [B, L, keys], True if the token may attend to the key.

        Returns:
            [B, L, C].
        """
        scale, shift = modulation.chunk(2, dim=-1)
        h = modulated(x, scale, shift, NORM_EPS)
        x = x + self.attn(h, self.attn.key_value(h) if kv is None else kv, mask)
        return x + self.mlp(plain_layer_norm(x, NORM_EPS).to(x.dtype))


class DiT(nn.Module):
    """A diffusion transformer: embedded time, blocks, and a modulated norm before the last projection."""

    layers: Sequence[DiTLayer]

    def __init__(self, config: DiTConfig):
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.time_in = Linear(TIME_CHANNELS, size)
        self.time_out = Linear(size, size)
        self.layers = nn.ModuleList(  # type: ignore[assignment]
            DiTLayer(config, is_cross) for is_cross in config.is_cross
        )
        self.dense = Linear(size, 2 * size)
        self.proj = Linear(size, config.output_size)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the hidden states."""
        return self.proj.dtype

    def modulations(self, bucket: Tensor) -> Tensor:
        """Compute the scale and shift of every norm from the time.

        Args:
            bucket: int64 [B], the time bucket.

        Returns:
            [B, layers + 1, 2C]. The entry of a block has the scale before the shift. The last entry has the
            shift first, as in GR00T's training code.
        """
        time = self.time_out(F.silu(self.time_in(bucket_sinusoids(bucket))))
        condition = F.silu(time)
        denses = [layer.dense for layer in self.layers] + [self.dense]
        return torch.stack([dense(condition) for dense in denses], dim=1)

    def context(self, features: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
        """Return keys and values of every cross-attention block, [B, K, H, D] each, from features of the
        vision-language model, [B, K, C'].
        """
        return tuple(layer.attn.key_value(features) for layer in self.layers if layer.is_cross)

    def forward(
        self,
        x: Tensor,
        modulations: Tensor,
        kv: tuple[tuple[Tensor, Tensor], ...],
        masks: tuple[Tensor, ...],
        own: Tensor,
    ) -> Tensor:
        """Run all blocks.

        Args:
            x: [B, L, C], the head's tokens.
            modulations: Result of :meth:`modulations`.
            kv: Keys and values for each cross-attention block, in order.
            masks: bool [B, L, K] for each cross-attention block, in order.
            own: bool [B, L, L], the attention mask between the head's own tokens.

        Returns:
            The head's features, [B, L, output_size].
        """
        crosses = iter(zip(kv, masks, strict=True))
        *rows, last = modulations.unbind(dim=1)
        for layer, row in zip(self.layers, rows, strict=True):
            x = layer(x, row, *(next(crosses) if layer.is_cross else (None, own)))
        shift, scale = last.chunk(2, dim=-1)
        return self.proj(modulated(x, scale, shift, OUT_EPS))


def bucket_sinusoids(bucket: Tensor) -> Tensor:
    """Return [cos, sin] of bucket * 10000^(-j / 127), float32 [B, 256], for time buckets, int64 [B].

    Source: diffusers ``get_timestep_embedding`` with ``flip_sin_to_cos=True`` and ``downscale_freq_shift=1``.
    """
    half = TIME_CHANNELS // 2
    exponent = torch.arange(half, dtype=torch.float32, device=bucket.device) * -math.log(MAX_PERIOD)
    angle = bucket[:, None].float() * (exponent / (half - 1)).exp()
    return torch.cat([angle.cos(), angle.sin()], dim=-1)


def action_sinusoids(bucket: Tensor, size: int) -> Tensor:
    """Return [sin, cos] of bucket * 10000^(-2j / size), float32 [B, size], for time buckets, int64 [B].

    The division comes before the product, in float32, as in the reference. Buckets go up to 1000, where a change of one
    unit in the last place of a frequency changes a sine by 5e-5. Source: Isaac-GR00T ``SinusoidalPositionalEncoding``.
    """
    half = size // 2
    step = rounded(rounded(math.log(MAX_PERIOD), torch.float32) / half, torch.float32)
    exponent = -torch.arange(half, dtype=torch.float32, device=bucket.device) * step
    angle = bucket[:, None].float() * exponent.exp()
    return torch.cat([angle.sin(), angle.cos()], dim=-1)
