"""Vision transformers (SigLIP: Zhai et al. 2023; DINOv2: Oquab et al. 2023), which compute one feature per patch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinew.layers.attention import attend
from sinew.layers.fold_sites import FoldSite
from sinew.layers.linear import Embedding, linear_layer
from sinew.layers.norm import LayerNorm
from sinew.layers.rope import Rotation
from sinew.layers.sizes import check_sizes


@dataclass(frozen=True)
class ViTConfig:
    """Sizes and options of a vision transformer.

    Attributes:
        hidden_size: Width of the hidden states.
        intermediate_size: Inner width of the MLP.
        num_layers: Number of blocks that run.
        num_heads: Number of attention heads.
        image_size: Side in pixels of the square that the position table covers.
        patch_size: Side of a patch in pixels.
        norm_eps: Epsilon of the norms.
        activation: Activation of the MLP.
        prefix_tokens: Number of learned tokens before the patches, without positions (DINOv2's class token and
            registers). They are not part of the output.
        layer_scale: True if each branch has a learned factor per channel.
        final_norm: False if the output is that of a block in the middle, without the final norm.
        ternary: True if the linear layers of the blocks have ternary weights (BitVLA).
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    image_size: int
    patch_size: int
    norm_eps: float
    activation: Literal["gelu", "gelu_tanh"] = "gelu_tanh"
    prefix_tokens: int = 0
    layer_scale: bool = False
    final_norm: bool = True
    ternary: bool = False

    def __post_init__(self) -> None:
        check_sizes(self)
        if self.hidden_size % self.num_heads or self.image_size < self.patch_size:
            raise ValueError(
                f"vision: expected a hidden_size that is a multiple of {self.num_heads} heads, and an image_size of at"
                f" least patch_size {self.patch_size}, got {self.hidden_size} and {self.image_size}"
            )

    @property
    def side(self) -> int:
        """Patches along one side of the position table."""
        return self.image_size // self.patch_size

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return rows and columns of the patches of a picture. Height and width are in pixels."""
        return height // self.patch_size, width // self.patch_size


@dataclass(frozen=True)
class BlockConfig:
    """Sizes of a stack of transformer blocks whose tokens are not patches of a picture, such as the tokens of
    a text.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int

    def __post_init__(self) -> None:
        check_sizes(self)
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size: expected a multiple of num_heads {self.num_heads}, got {self.hidden_size}"
            )

    def block(self, norm_eps: float, activation: Literal["gelu", "gelu_tanh"]) -> ViTConfig:
        """Return the sizes of one block as a :class:`ViTConfig`, because a vision transformer has the same blocks."""
        return ViTConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            image_size=1,
            patch_size=1,
            norm_eps=norm_eps,
            activation=activation,
        )


def position_rows(rows: int, cols: int, side: int, device: torch.device | None = None) -> Tensor:
    """Return the row of a ``side * side`` position table that each patch of a ``rows * cols`` grid reads, int64.

    The reference (SmolVLM) compares the fractional coordinate r / rows with the boundaries k / side. In exact
    arithmetic the result is floor(r * side / rows), which integers compute exactly. In floating point a coordinate can
    be a rounding error below its boundary, so that nearly every patch reads the row of its neighbour in some
    precisions. This function therefore uses only integers.
    """
    row = torch.arange(rows, device=device) * side // rows
    col = torch.arange(cols, device=device) * side // cols
    return (row[:, None] * side + col[None, :]).flatten()


class ViTAttention(nn.Module):
    """Self-attention of a vision transformer: every patch attends to every patch of its view."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.head_dim = config.hidden_size // config.num_heads
        linear = linear_layer(config.ternary)
        self.q_proj = linear(config.hidden_size, config.hidden_size)
        self.k_proj = linear(config.hidden_size, config.hidden_size)
        self.v_proj = linear(config.hidden_size, config.hidden_size)
        self.o_proj = linear(config.hidden_size, config.hidden_size)

    def inputs(self) -> tuple[nn.Module, ...]:
        return self.q_proj, self.k_proj, self.v_proj

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # [B, L, C] -> [B, L, C] each
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend from every patch to every patch. Engines may replace only this method by their own operator.

        Args:
            q: [B, L, C], projected, and rotated in towers with rotary positions.
            k: [B, L, C], like q.
            v: [B, L, C], projected.

        Returns:
            [B, L, C].
        """
        q, k, v = (p.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v)  # [B, H, L, D]
        return out.transpose(1, 2).flatten(2)

    def forward(self, x: Tensor, rotate: Rotation | None = None) -> Tensor:  # [B, L, C]
        q, k, v = self.project(x)
        if rotate is not None:
            heads = (-1, self.head_dim)
            q, k = (rotate(part.unflatten(-1, heads)).flatten(-2) for part in (q, k))
        return self.o_proj(self.attend(q, k, v))


class ViTMLP(nn.Module):
    """The MLP fc2(gelu(fc1(x))) of a vision transformer."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        linear = linear_layer(config.ternary)
        self.fc1 = linear(config.hidden_size, config.intermediate_size)
        self.fc2 = linear(config.intermediate_size, config.hidden_size)
        self.approximate = "tanh" if config.activation == "gelu_tanh" else "none"

    def inputs(self) -> tuple[nn.Module, ...]:
        return (self.fc1,)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate=self.approximate))


class LayerScale(nn.Module):
    """A learned factor per channel (Touvron et al. 2021, CaiT)."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class ViTLayer(nn.Module):
    """A block of a vision transformer: attention and MLP, each preceded by a norm."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.norm1 = LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.attn = ViTAttention(config)
        self.norm2 = LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = ViTMLP(config)
        self.scale1: nn.Module = LayerScale(config.hidden_size) if config.layer_scale else nn.Identity()
        self.scale2: nn.Module = LayerScale(config.hidden_size) if config.layer_scale else nn.Identity()

    def fold_sites(self) -> list[FoldSite]:
        return [FoldSite(self, "norm1", (self.attn,)), FoldSite(self, "norm2", (self.mlp,))]

    def forward(self, x: Tensor, rotate: Rotation | None = None) -> Tensor:  # [B, L, C]
        # Pass ``rotate`` only if it is not None, because an engine's own attention need not accept this
        # argument.
        turn = () if rotate is None else (rotate,)
        x = x + self.scale1(self.attn(self.norm1(x), *turn))
        return x + self.scale2(self.mlp(self.norm2(x)))


class MaskedLayer(ViTLayer):
    """A transformer block with an attention mask: a token attends only to tokens for which the mask is True."""

    def fold_sites(self) -> list[FoldSite]:
        return super().fold_sites()

    def see(self, x: Tensor, mask: Tensor) -> Tensor:  # [B, L, C], bool [B, L, L] -> [B, L, C]
        q, k, v = (part.unflatten(-1, (-1, self.attn.head_dim)) for part in self.attn.project(x))
        return self.attn.o_proj(attend(q, k, v, mask))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        x = x + self.see(self.norm1(x), mask)
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """A vision transformer that returns one feature per patch."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.config = config
        self.patch_embedding = nn.Conv2d(3, config.hidden_size, config.patch_size, stride=config.patch_size)
        self.position_embedding = Embedding(config.side**2, config.hidden_size)
        self.layers = nn.ModuleList(ViTLayer(config) for _ in range(config.num_layers))
        if config.prefix_tokens:
            self.prefix = nn.Parameter(torch.zeros(config.prefix_tokens, config.hidden_size))
        self.norm: nn.Module = (
            LayerNorm(config.hidden_size, eps=config.norm_eps) if config.final_norm else nn.Identity()
        )

    def forward(self, pixels: Tensor) -> Tensor:
        """Encode pixels [B, 3, height, width] to features [B, patches, C] in row-major order.

        Height and width are multiples of the patch size.
        """
        grid, pixels = self.config.grid(*pixels.shape[-2:]), pixels.to(self.patch_embedding.weight.dtype)
        # Do not store the patches in a local variable, so that :meth:`encode` can free them before its first
        # layer.
        return self.encode(self.patch_embedding(pixels).flatten(2).transpose(1, 2), *grid)

    def encode(self, x: Tensor, rows: int, cols: int) -> Tensor:
        """Encode embedded patches x [B, rows * cols, C], without positions, to features [B, rows * cols, C]."""
        # The positions must be the first term, because the sum has the memory layout of its first term. In embedded
        # patches the channels of a token are far apart, and every norm and residual sum would then access memory with
        # large strides.
        x = self.positions(rows, cols) + x
        skip = self.config.prefix_tokens
        if skip:
            x = torch.cat([self.prefix.expand(x.shape[0], -1, -1), x], dim=1)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)[:, skip:]

    def positions(self, rows: int, cols: int) -> Tensor:  # [rows * cols, C]
        table = self.position_embedding
        return table(position_rows(rows, cols, self.config.side, table.weight.device))


class ResizedPositions(VisionTransformer):
    """A vision transformer that resizes its square position table to the grid of patches (SigLIP 2).

    The resize is bilinear and antialiased.
    """

    def positions(self, rows: int, cols: int) -> Tensor:  # [rows * cols, C]
        side = self.config.side
        table = self.position_embedding.weight.float().unflatten(0, (side, side))
        down, across = (antialias_matrix(side, count, table.device) for count in (rows, cols))
        table_of_grid = torch.einsum("rs,stc,kt->rkc", down, table, across)
        return table_of_grid.flatten(0, 1).to(self.position_embedding.weight.dtype)


def antialias_matrix(size: int, target: int, device: torch.device) -> Tensor:
    """Return the weights of torch's antialiased bilinear ``interpolate`` along one axis, float32 [target, size]."""
    scale = size / target
    reach = max(scale, 1.0)
    center = scale * (torch.arange(target, dtype=torch.float64, device=device) + 0.5)
    distance = torch.arange(size, dtype=torch.float64, device=device)[None] + 0.5 - center[:, None]
    weights = (1.0 - (distance / reach).abs()).clamp(min=0.0)
    return (weights / weights.sum(dim=1, keepdim=True)).float()
