"""ACT (Zhao et al. 2023, arXiv 2304.13705), as LeRobot computes it: a transformer that returns the whole chunk in one
pass.

The encoder reads these tokens: the latent, the state, the environment's state if there is one, and each feature of each
view. Features come from a ResNet. The latent is zero at inference, so its token is the bias of its projection. Position
embeddings are added to the queries and keys of every layer and never to values. Therefore not only linear layers read
the result of a norm, and engines cannot merge the norm's scale into the weights of linear layers. The policy does not
read prompts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinew.core.fields import Side
from sinew.layers.attention import attend, key_mask
from sinew.layers.linear import Embedding, Linear
from sinew.layers.norm import LayerNorm
from sinew.layers.own_sizes import embed_own_sizes, without_padding
from sinew.layers.resnet import ResNet, ResNetConfig
from sinew.layers.sizes import check_sizes
from sinew.models.base import Regression

NORM_EPS = 1e-5  # default of torch; the reference implementation uses the default too
LONGEST_PERIOD = 10_000  # longest wavelength of the position embedding, in units of the view's side
PLACE_EPS = 1e-6  # avoids a division by zero in the position table


@dataclass(frozen=True)
class ActConfig:
    """Sizes of an ACT model.

    Attributes:
        vision: Sizes of the ResNet.
        hidden_size: Width of the transformer.
        intermediate_size: Width of the hidden layer of the MLPs.
        num_heads: Attention heads.
        encoder_layers: Layers of the encoder.
        decoder_layers: Layers of the decoder.
        rows: Number of rows of the feature map of a camera view. If views have different sizes, the largest number of
            all views.
        cols: Number of columns of the feature map of a camera view. If views have different sizes, the largest number
            of all views.
        chunk_size: Actions in a chunk.
        max_state_dim: Size of the state.
        max_action_dim: Size of an action.
        environment_dim: Number of values at the end of the state that describe the environment. They become a separate
            token. 0 if there are no such values.
        pre_norm: True if each norm comes before the attention or the MLP, False if it comes after the residual
            addition.
        activation: Activation of the MLPs.
        frames: Height and width of each view in pixels, if views have different sizes. Empty if all views have one
            size.
    """

    vision: ResNetConfig
    hidden_size: int
    intermediate_size: int
    num_heads: int
    encoder_layers: int
    decoder_layers: int
    rows: int
    cols: int
    chunk_size: int
    max_state_dim: int
    max_action_dim: int
    environment_dim: int = 0
    pre_norm: bool = False
    activation: Literal["relu", "gelu"] = "relu"
    frames: tuple[tuple[Side, Side], ...] = ()

    def __post_init__(self) -> None:
        check_sizes(self)
        if self.hidden_size % self.num_heads or self.hidden_size % 4:
            raise ValueError(
                f"hidden_size: expected a multiple of 4 and of num_heads {self.num_heads}, got {self.hidden_size}"
            )
        if not 0 <= self.environment_dim < self.max_state_dim:
            raise ValueError(
                f"environment_dim: expected less than max_state_dim {self.max_state_dim}, got {self.environment_dim}"
            )
        if self.frames:
            rows, cols = (max(sides) for sides in zip(*self.grids, strict=True))
            if (rows, cols) != (self.rows, self.cols):
                raise ValueError(
                    f"rows, cols: expected {rows} x {cols}, the largest grid of all views, got {self.rows} x"
                    f" {self.cols}"
                )

    @property
    def grids(self) -> tuple[tuple[int, int], ...]:
        """Return (rows, columns) of the feature map of each camera view. Empty if all views have ``rows`` x ``cols``
        features."""
        return tuple(self.vision.grid(*frame) for frame in self.frames)

    @property
    def counts(self) -> tuple[int, ...]:
        """Return the number of features of each camera view. Empty if all views have ``rows * cols`` features."""
        return tuple(rows * cols for rows, cols in self.grids)


class ActContext(NamedTuple):
    """The results of the encoder that each decoder layer attends to, computed once per observation.

    Attributes:
        keys: Keys of each decoder layer, [B, K, H, D].
        values: Values of each decoder layer, [B, K, H, D].
        valid: bool [B, K], False for missing views.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    valid: Tensor


class PlacedAttention(nn.Module):
    """Attention that adds position embeddings to the input of queries and keys, and not to the input of values."""

    def __init__(self, size: int, num_heads: int):
        super().__init__()
        self.head_dim = size // num_heads
        self.q_proj, self.k_proj = Linear(size, size), Linear(size, size)
        self.v_proj, self.o_proj = Linear(size, size), Linear(size, size)

    def key_value(self, x: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:  # [B, K, C] -> [B, K, H, D] each
        heads = (-1, self.head_dim)
        return self.k_proj(x + places).unflatten(-1, heads), self.v_proj(x).unflatten(-1, heads)

    def forward(self, x: Tensor, places: Tensor, kv: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """Attend from tokens to keys and values.

        Args:
            x: Input, [B, L, C].
            places: [L, C], position embeddings of the tokens.
            kv: Keys and values, [B, K, H, D] each.
            mask: bool [B, L, K], True if the token may attend to the key.

        Returns:
            Output, [B, L, C].
        """
        q = self.q_proj(x + places).unflatten(-1, (-1, self.head_dim))
        return self.o_proj(attend(q, *kv, mask))


class FeedForward(nn.Module):
    """The feed-forward part of a transformer layer: two linear layers with an activation between them."""

    def __init__(self, config: ActConfig):
        super().__init__()
        self.fc1 = Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = Linear(config.intermediate_size, config.hidden_size)
        self.act = F.relu if config.activation == "relu" else F.gelu

    def forward(self, x: Tensor) -> Tensor:  # [B, L, C]
        return self.fc2(self.act(self.fc1(x)))


class EncoderLayer(nn.Module):
    """A layer of ACT's transformer encoder: self-attention and an MLP."""

    def __init__(self, config: ActConfig):
        super().__init__()
        self.pre_norm = config.pre_norm
        self.norm1 = LayerNorm(config.hidden_size, eps=NORM_EPS)
        self.attn = PlacedAttention(config.hidden_size, config.num_heads)
        self.norm2 = LayerNorm(config.hidden_size, eps=NORM_EPS)
        self.mlp = FeedForward(config)

    def attend(self, x: Tensor, places: Tensor, mask: Tensor) -> Tensor:
        return self.attn(x, places, self.attn.key_value(x, places), mask)

    def forward(self, x: Tensor, places: Tensor, mask: Tensor) -> Tensor:  # [B, L, C]
        if self.pre_norm:
            x = x + self.attend(self.norm1(x), places, mask)
            return x + self.mlp(self.norm2(x))
        x = self.norm1(x + self.attend(x, places, mask))
        return self.norm2(x + self.mlp(x))


class ActDecoderLayer(EncoderLayer):
    """A layer of ACT's decoder, which computes the tokens of the chunk.

    ``norm1`` and ``attn`` are for the attention among the chunk's tokens, ``norm2`` and ``cross`` for the attention
    to the encoder's output, and ``norm3`` and ``mlp`` for the MLP.
    """

    def __init__(self, config: ActConfig):
        super().__init__(config)
        self.cross = PlacedAttention(config.hidden_size, config.num_heads)
        self.norm3 = LayerNorm(config.hidden_size, eps=NORM_EPS)

    def answer(
        self, x: Tensor, places: Tensor, own: Tensor, kv: tuple[Tensor, Tensor], mask: Tensor
    ) -> Tensor:
        """Run the layer.

        Args:
            x: [B, H, C], the chunk's tokens.
            places: [H, C], position embeddings.
            own: bool [B, H, H], the mask of the chunk's tokens among each other.
            kv: Keys and values of the encoder's output.
            mask: bool [B, H, K], the mask of the encoder's output.

        Returns:
            Output, [B, H, C].
        """
        if self.pre_norm:
            x = x + self.attend(self.norm1(x), places, own)
            x = x + self.cross(self.norm2(x), places, kv, mask)
            return x + self.mlp(self.norm3(x))
        x = self.norm1(x + self.attend(x, places, own))
        x = self.norm2(x + self.cross(x, places, kv, mask))
        return self.norm3(x + self.mlp(x))


class ACT(Regression):
    """ACT: a ResNet, a transformer encoder, and a transformer decoder."""

    config_type = ActConfig
    config: ActConfig
    encoder: Sequence[EncoderLayer]
    decoder: Sequence[ActDecoderLayer]

    def __init__(self, config: ActConfig):
        super().__init__()
        self.config = config
        size, own = config.hidden_size, config.max_state_dim - config.environment_dim
        self.vision = ResNet(config.vision)
        self.connector = Linear(config.vision.out_channels, size)
        self.latent = nn.Parameter(torch.zeros(size))
        self.state_proj = Linear(own, size)
        self.environment_proj = Linear(config.environment_dim, size) if config.environment_dim else None
        self.places = Embedding(self.first_tokens, size)
        self.register_buffer(
            "view_places", torch.zeros(sum(config.counts) or config.rows * config.cols, size)
        )
        self.encoder = nn.ModuleList(EncoderLayer(config) for _ in range(config.encoder_layers))  # type: ignore[assignment]
        self.encoder_norm = LayerNorm(size, eps=NORM_EPS) if config.pre_norm else nn.Identity()
        self.queries = Embedding(config.chunk_size, size)
        self.decoder = nn.ModuleList(ActDecoderLayer(config) for _ in range(config.decoder_layers))  # type: ignore[assignment]
        self.decoder_norm = LayerNorm(size, eps=NORM_EPS)
        self.action_proj = Linear(size, config.max_action_dim)

    @property
    def first_tokens(self) -> int:
        """Return the number of encoder tokens that come before the tokens of the camera views."""
        return 3 if self.config.environment_dim else 2

    @property
    def views(self) -> int | None:
        return len(self.config.frames) or None

    @property
    def frames(self) -> tuple[tuple[int, int], ...]:
        return self.config.frames

    @property
    def grid(self) -> tuple[int, int]:
        return self.config.rows, self.config.cols

    @property
    def min_tokens(self) -> int:
        return 1

    def embed_images(self, pixels: Tensor) -> Tensor:
        """Encode each view.

        Args:
            pixels: [B, V, 3, height, width].

        Returns:
            [B, V, N, C]. N is the number of features of the largest view. Smaller views are padded with zeros.
        """
        if self.config.frames:
            return embed_own_sizes(self.features, pixels, self.config.frames)
        return self.features(pixels.flatten(0, 1)).unflatten(0, pixels.shape[:2])

    def features(self, pixels: Tensor) -> Tensor:  # shapes: [B, 3, height, width] -> [B, rows * cols, C]
        return self.connector(self.vision(pixels).flatten(2).transpose(1, 2))

    def flat(self, image_tokens: Tensor) -> Tensor:  # shapes: [B, V, N, C] -> [B, features of all views, C]
        if self.config.frames:
            return without_padding(image_tokens, self.config.counts)
        return image_tokens.flatten(1, 2)

    def embed(self, image_tokens: Tensor, state: Tensor) -> Tensor:  # [B, V, N, C], [B, S] -> [B, K, C]
        first = [
            self.latent.expand(state.shape[0], -1),
            self.state_proj(state[:, : self.state_proj.in_features]),
        ]
        if self.environment_proj is not None:
            first.append(self.environment_proj(state[:, self.state_proj.in_features :]))
        return torch.cat([torch.stack(first, dim=1), self.flat(image_tokens)], dim=1)

    def all_places(self, views: int) -> Tensor:  # [K, C]
        table: Tensor = self.view_places  # type: ignore[assignment]
        if not self.config.frames:
            table = table.expand(views, -1, -1).flatten(0, 1)
        return torch.cat([self.places.weight, table])

    def valid(self, camera_mask: Tensor, most: int) -> Tensor:
        """Return a mask of the encoder's tokens, bool [B, K]: True for tokens that other tokens may attend to.

        Args:
            camera_mask: bool [B, V], False for a missing view.
            most: Number of features of the largest view.
        """
        available = camera_mask[:, :, None].expand(-1, -1, most)  # [B, V, most]
        return F.pad(self.flat(available[..., None])[..., 0], (self.first_tokens, 0), value=True)

    def encode(self, x: Tensor, places: Tensor, valid: Tensor) -> Tensor:
        """Run the encoder.

        Args:
            x: Input, [B, K, C].
            places: [K, C], position embeddings.
            valid: bool [B, K].

        Returns:
            Output, [B, K, C].
        """
        mask = key_mask(valid, x.shape[1])
        for layer in self.encoder:
            x = layer(x, places, mask)
        return self.encoder_norm(x)

    def read(
        self, image_tokens: Tensor, camera_mask: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor
    ) -> ActContext:
        places = self.all_places(image_tokens.shape[1])
        valid = self.valid(camera_mask, image_tokens.shape[2])  # [B, K]
        x = self.encode(self.embed(image_tokens, state), places, valid)
        keys, values = zip(*(layer.cross.key_value(x, places) for layer in self.decoder), strict=True)
        return ActContext(keys, values, valid)

    def regress(self, context: ActContext) -> Tensor:
        places = self.queries.weight  # [H, C]
        x = torch.zeros_like(places).expand(context.valid.shape[0], -1, -1)  # [B, H, C]
        mask = key_mask(context.valid, x.shape[1])  # [B, H, K]
        own = torch.ones_like(mask[:, :1, :1]).expand(-1, x.shape[1], x.shape[1])  # [B, H, H]
        for layer, *kv in zip(self.decoder, context.keys, context.values, strict=True):
            x = layer.answer(x, places, own, (kv[0], kv[1]), mask)
        return self.action_proj(self.decoder_norm(x)).float()


def all_view_places(config: ActConfig) -> Tensor:
    """Compute the model's buffer ``view_places``: the position embeddings of one view if all views have the same
    size, else of all views in order."""
    grids = config.grids or ((config.rows, config.cols),)
    return torch.cat([view_places(rows, cols, config.hidden_size) for rows, cols in grids])


def view_places(rows: int, cols: int, size: int) -> Tensor:
    """Return the position embedding of each feature of a view, float32 [rows * cols, size].

    The embedding has sines and cosines of the row and then of the column. Row and column count from 1 and are scaled to
    a full turn. Source: LeRobot ACTSinusoidalPositionEmbedding2d.
    """
    half = size // 2
    wave = LONGEST_PERIOD ** (2 * (torch.arange(half, dtype=torch.float32) // 2) / half)

    def along(count: int) -> Tensor:  # [count, half]
        place = torch.ones(count).cumsum(0)
        angle = (place / (place[-1:] + PLACE_EPS) * (2 * math.pi))[:, None] / wave
        return torch.stack([angle[:, 0::2].sin(), angle[:, 1::2].cos()], dim=-1).flatten(1)

    down, across = along(rows)[:, None].expand(-1, cols, -1), along(cols).expand(rows, -1, -1)
    return torch.cat([down, across], dim=-1).flatten(0, 1)
