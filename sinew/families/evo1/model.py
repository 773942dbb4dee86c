"""Evo-1 (Lin et al. 2025, arXiv 2511.04555): InternVL3 under a cross-attention head.

* InternViT sees each view; squares of its patches become tokens, and the first layers of a Qwen2 model read them
  inside the prompt. The prompt names every view that training had: those that are missing are masked, and count in the
  positions of what follows.
* The head (Evo-1's ``FlowmatchingActionHead``) turns noise into actions: each block's action tokens read the language
  model's states and the embedded state, never each other, until one layer joins them all.

Two readings of the same weights differ in the head's context. LeRobot's policy hides masked rows from the head. The
original repository (MINT-SJTU/Evo-1) pads each prompt to a fixed length and lets the head read every row, those of the
padding and of black pictures in place of missing views included (``Evo1Config.rows``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinew.layers.attention import block_mask
from sinew.layers.connector import UnshuffleConnector
from sinew.layers.decoder import Decoder, DecoderConfig, DecoderLayer
from sinew.layers.dit import BiasedAttention, GeluMLP
from sinew.layers.fold_sites import FoldSite
from sinew.layers.linear import Embedding, Linear
from sinew.layers.mlp import Projector
from sinew.layers.norm import LayerNorm
from sinew.layers.rope import Rotation
from sinew.layers.sizes import check_sizes
from sinew.layers.vit import VisionTransformer, ViTConfig
from sinew.models.base import Model
from sinew.models.solvers import Solver

SOLVER = Solver(start=0.0, end=1.0, noise="uniform")
NORM_EPS = 1e-5  # epsilon of the head's norms
TIMES = 1000  # rows of the head's table of times


@dataclass(frozen=True)
class Evo1Config:
    """``views``: of the prompt. ``image_token``: the id of the placeholder of an image token. ``unshuffle``: patches
    along a side of one. ``action_dim``: of the ``max_action_dim`` numbers those that the robot has; the head reads
    zeros in place of the others.

    rows: of the head's context; shorter prompts are filled up with ``pad_token``, and masked rows are read. 0 where
    the head reads no masked row. blank: a black pixel, normalised, which views that are missing are made of; empty
    where nothing reads them. masked_attend: masked rows of the language model attend to the others; where False (flash
    attention with padding left out) their attention gives zero.
    """

    vision: ViTConfig
    language: DecoderConfig
    vocab_size: int
    chunk_size: int
    max_state_dim: int
    max_action_dim: int
    action_dim: int
    views: int
    image_token: int
    unshuffle: int
    head_layers: int
    head_heads: int
    head_size: int
    decoder_size: int
    state_size: int
    pad_token: int = 0
    rows: int = 0
    blank: tuple[float, ...] = ()
    masked_attend: bool = True

    def __post_init__(self) -> None:
        check_sizes(self)
        if self.head_size % self.head_heads or self.head_size != self.language.hidden_size:
            raise ValueError(
                f"head_size {self.head_size}: expected the language model's width {self.language.hidden_size}, a"
                f" multiple of {self.head_heads} heads"
            )
        if not self.action_dim <= self.max_action_dim:
            raise ValueError(f"action_dim {self.action_dim}: expected at most {self.max_action_dim}")
        if len(self.blank) not in (0, 3) or bool(self.blank) != bool(self.rows):
            raise ValueError("blank: expected three numbers if rows is above 0, and no numbers if rows is 0")


class Evo1Context(NamedTuple):
    """Keys and values of each block of the head, [B, K, H, D], and the mask of rows it may read, bool [B, 1, K]."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    valid: Tensor


class HeadLayer(nn.Module):
    """A block of the head: cross-attention to the context, then an MLP to whose input the time is added."""

    def __init__(self, size: int, num_heads: int):
        super().__init__()
        self.norm1 = LayerNorm(size, eps=NORM_EPS)
        self.attn = BiasedAttention(size, num_heads, size // num_heads, size)
        self.norm2 = LayerNorm(size, eps=NORM_EPS)
        self.mlp = GeluMLP(size, approximate="none")

    def fold_sites(self) -> list[FoldSite]:
        # Keys and values are made of the context, and the time comes between the second norm and its reader.
        return [FoldSite(self, "norm1", (self.attn.q_proj,))]

    def forward(self, x: Tensor, time: Tensor, kv: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """x: [B, H, C]; time: [B, C]; kv: [B, K, H, D] each; mask: bool [B, H, K] -> [B, H, C]."""
        x = x + self.attn(self.norm1(x), kv, mask)
        return x + self.mlp(self.norm2(x) + time[:, None])


class Evo1ActionEncoder(nn.Module):
    """Noisy actions -> tokens: fc3(relu(fc2(relu(fc1(x)) + position)))."""

    def __init__(self, action_dim: int, size: int, horizon: int):
        super().__init__()
        self.fc1 = Linear(action_dim, size)
        self.position_embedding = Embedding(horizon, size)
        self.fc2 = Linear(size, size)
        self.fc3 = Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:  # [B, H, A] -> [B, H, C]
        placed = F.relu(self.fc1(x)) + self.position_embedding.weight
        return self.fc3(F.relu(self.fc2(placed)))


class Evo1Head(nn.Module):
    """The action head: language states and state -> context, once; noisy actions -> velocity, per step."""

    layers: Sequence[HeadLayer]

    def __init__(self, config: Evo1Config):
        super().__init__()
        self.config = config
        size, horizon = config.head_size, config.chunk_size
        self.time_embedding = Embedding(TIMES, size)
        self.state_encoder = Projector(config.max_state_dim, config.state_size, size)
        self.action_encoder = Evo1ActionEncoder(config.max_action_dim, size, horizon)
        self.layers = nn.ModuleList(  # type: ignore[assignment]
            HeadLayer(size, config.head_heads) for _ in range(config.head_layers)
        )
        self.norm = LayerNorm(size, eps=NORM_EPS)
        self.pool = Linear(horizon * size, size)
        self.decoder = Projector(size, config.decoder_size, horizon * config.max_action_dim)

    def context(self, features: Tensor, valid: Tensor, state: Tensor) -> Evo1Context:
        """features: [B, L, C], normed; valid: bool [B, L], rows that the head reads; state: [B, S]."""
        token = self.state_encoder(state)[:, None]
        rows = torch.cat([features.to(token.dtype), token], dim=1)  # [B, L + 1, C]
        keys, values = zip(*(layer.attn.key_value(rows) for layer in self.layers), strict=True)
        return Evo1Context(keys, values, F.pad(valid, (0, 1), value=True)[:, None])

    def velocity(self, x: Tensor, time: Tensor, context: Evo1Context) -> Tensor:
        """x: [B, H, A]; time: [B, C] -> float32 [B, H, A], zero in the numbers that the robot has not."""
        dims, spare = self.config.action_dim, self.config.max_action_dim - self.config.action_dim
        h = self.action_encoder(F.pad(x[..., :dims], (0, spare)))  # [B, H, C]
        mask = context.valid.expand(-1, h.shape[1], -1)
        for layer, keys, values in zip(self.layers, context.keys, context.values, strict=True):
            h = layer(h, time.to(h.dtype), (keys, values), mask)
        pooled = self.pool(self.norm(h).flatten(1))  # [B, C]
        out = self.decoder(pooled).unflatten(1, x.shape[1:])  # [B, H, A]
        return F.pad(out[..., :dims], (0, spare)).float()


class Evo1(Model):
    config_type = Evo1Config
    config: Evo1Config
    solver = SOLVER

    def __init__(self, config: Evo1Config):
        super().__init__()
        self.config = config
        self.vision = VisionTransformer(config.vision)
        self.connector = UnshuffleConnector(
            config.vision.hidden_size, config.language.hidden_size, config.unshuffle
        )
        self.language = Decoder(config.language, config.vocab_size)
        self.head = Evo1Head(config)

    @property
    def grid(self) -> tuple[int, int]:
        return self.config.vision.side, self.config.vision.side

    def embed_images(self, pixels: Tensor) -> Tensor:
        """pixels: float32 [B, V, 3, height, width] -> [B, V, tokens, C], or [B, 1 + V, tokens, C] with a black view."""
        if self.config.blank:
            black = [
                pixels.new_full((*pixels.shape[:1], 1, 1, *pixels.shape[3:]), x) for x in self.config.blank
            ]
            pixels = torch.cat([torch.cat(black, dim=2), pixels], dim=1)
        rows, cols = (side // self.config.vision.patch_size for side in pixels.shape[-2:])
        features = self.vision(pixels.flatten(0, 1))  # [B * V, patches, C]
        return self.connector(features, rows, cols).unflatten(0, pixels.shape[:2])

    def read(
        self, image_tokens: Tensor, camera_mask: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor
    ) -> Evo1Context:
        """Return the context; arguments as in ``Model.read``. ``tokens`` hold a placeholder per image token."""
        tokens, token_mask = self.filled(tokens, token_mask)
        x, valid = self.embed(image_tokens, camera_mask, tokens, token_mask)
        features = self.features(x, valid)
        return self.head.context(features, torch.ones_like(valid) if self.config.rows else valid, state)

    def filled(self, tokens: Tensor, token_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens and mask [B, rows] with the padding that the head reads; as they are where it reads none."""
        if not self.config.rows:
            return tokens, token_mask
        # Negative behind an engine's padding
        spare, pad = self.config.rows - tokens.shape[1], self.config.pad_token
        tokens = F.pad(tokens.masked_fill(~token_mask, pad), (0, spare), value=pad)
        return tokens, F.pad(token_mask, (0, spare))

    def embed(
        self, image_tokens: Tensor, camera_mask: Tensor, tokens: Tensor, token_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the language model's input [B, L, C] and which of its rows may be attended to, bool [B, L]."""
        count, views = image_tokens.shape[2], camera_mask.shape[1]
        placed = (tokens == self.config.image_token) & token_mask  # [B, L]
        index = (placed.long().cumsum(dim=1) - 1).clamp(min=0)
        view = index // count
        seen = placed & (view < views) & camera_mask.gather(1, view.clamp(max=views - 1))
        table = self.language.embed_tokens
        flat = image_tokens.flatten(1, 2).to(table.dtype)  # [B, V * N, C]
        if self.config.blank:  # the view before those of the cameras
            index = torch.where(seen, index + count, index % count)
        rows = flat.gather(1, index.clamp(max=flat.shape[1] - 1)[..., None].expand(-1, -1, flat.shape[2]))
        pictures = placed if self.config.blank else seen
        return torch.where(pictures[..., None], rows, table(tokens)), token_mask & (seen | ~placed)

    def features(self, x: Tensor, valid: Tensor) -> Tensor:
        """x: [B, L, C]; valid: bool [B, L] -> normed states of the last language layer that is kept, [B, L, C].

        Rows that are not valid count in the positions, and attend to the valid ones before them.
        """
        config, layers = self.config.language, self.language.layers
        positions = torch.ones_like(valid).long().cumsum(dim=1) - 1
        rotate = Rotation.at(positions, config.head_dim, config.rope_theta)
        every = torch.ones_like(valid)
        mask = block_mask(every, every) & valid[:, None]
        for layer in layers:
            x = (
                layer(x, rotate, mask)[0]
                if self.config.masked_attend
                else _unpadded(layer, x, rotate, mask, valid)
            )
        return self.language.norm(x)

    def embed_time(self, t: Tensor) -> Tensor:
        """Return the row of the time, [B, C]: int(t * 999), cut in double precision as the reference cuts it."""
        return self.head.time_embedding((t * (TIMES - 1)).long().clamp(max=TIMES - 1)).float()

    def act(self, x: Tensor, time_embedding: Tensor, context: Evo1Context) -> Tensor:
        return self.head.velocity(x, time_embedding, context)


def _unpadded(layer: nn.Module, x: Tensor, rotate: Rotation, mask: Tensor, valid: Tensor) -> Tensor:
    """One decoder layer whose attention gives zero in rows that are not valid."""
    assert isinstance(layer, DecoderLayer)
    q, k, v = layer.project(x, rotate)
    attended = layer.attn.attend(q, (k, v), mask)
    return layer.finish(x, attended * valid[..., None])
