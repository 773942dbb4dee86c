"""Evo-1 (Lin et al. 2025, arXiv 2511.04555): InternVL3 with a cross-attention action head.

* InternViT encodes each view, and squares of its patches become tokens. The first layers of a Qwen2 model read these
  tokens inside the prompt. The prompt has every view of training. Missing views are masked, but still count in the
  positions of later tokens.
* The head (Evo-1's ``FlowmatchingActionHead``) converts noise to actions by flow matching. In each block the action
  tokens attend to the hidden states of the language model and to the embedded state. They do not attend to each other.
  One layer after the blocks combines all action tokens.

The two layouts read the head's context differently. LeRobot's policy hides masked tokens from the head. The original
repository (MINT-SJTU/Evo-1) pads each prompt to a fixed length, and its head reads every token, including padding and
the black pictures that replace missing views (``Evo1Config.rows``).
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
TIMES = 1000  # number of rows of the head's time table, which has one row per time step


@dataclass(frozen=True)
class Evo1Config:
    """Sizes and options of Evo-1.

    Attributes:
        vision: Sizes of InternViT.
        language: Sizes of the Qwen2 model.
        vocab_size: Number of rows of the token table, which has one row per token id.
        chunk_size: Actions in a chunk.
        max_state_dim: Width of the padded state.
        max_action_dim: Width of a padded action.
        action_dim: Number of values of an action that the robot has. The head reads zeros for the other values.
        views: Number of views in the prompt.
        image_token: Id of the placeholder of an image token.
        unshuffle: One image token is made from a square of patches. This is the number of patches along its side.
        head_layers: Blocks of the head.
        head_heads: Attention heads of the head.
        head_size: Width of the head.
        decoder_size: Inner width of the action decoder.
        state_size: Inner width of the state encoder.
        pad_token: Id of the padding token.
        rows: Number of tokens that the head reads, if it also reads masked tokens. Shorter prompts are padded with
            ``pad_token`` to this number. 0 if the head does not read masked tokens.
        blank: A black pixel after normalisation, from which missing views are made. Empty if the head does not read
            missing views.
        masked_attend: True if masked tokens of the language model attend to other tokens. False if the result of their
            attention is zero, as in flash attention without padding.
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
                f"head_size: expected {self.language.hidden_size}, the width of the language model, as a multiple of"
                f" head_heads {self.head_heads}, got {self.head_size}"
            )
        if not self.action_dim <= self.max_action_dim:
            raise ValueError(
                f"action_dim: expected at most max_action_dim {self.max_action_dim}, got {self.action_dim}"
            )
        if len(self.blank) not in (0, 3) or bool(self.blank) != bool(self.rows):
            raise ValueError(
                f"blank: expected three numbers if rows is above 0, and no numbers if rows is 0, got {self.blank}"
            )


class Evo1Context(NamedTuple):
    """The results of the language model and the state encoder that each block of the head attends to, computed once
    per observation.

    Attributes:
        keys: Keys of each block, [B, K, H, D].
        values: Values of each block, [B, K, H, D].
        valid: bool [B, 1, K], True for the tokens that the head may attend to.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    valid: Tensor


class HeadLayer(nn.Module):
    """A block of the action head: cross-attention to the features of the observation, then an MLP whose input is the
    sum of hidden state and time.
    """

    def __init__(self, size: int, num_heads: int):
        super().__init__()
        self.norm1 = LayerNorm(size, eps=NORM_EPS)
        self.attn = BiasedAttention(size, num_heads, size // num_heads, size)
        self.norm2 = LayerNorm(size, eps=NORM_EPS)
        self.mlp = GeluMLP(size, approximate="none")

    def fold_sites(self) -> list[FoldSite]:
        # Only the query projection reads the result of the first norm, because keys and values come from the language
        # model's features. So this norm can be merged into that projection. The time is added after the second norm,
        # so the second norm cannot be merged into a linear layer.
        return [FoldSite(self, "norm1", (self.attn.q_proj,))]

    def forward(self, x: Tensor, time: Tensor, kv: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """Run the block.

        Args:
            x: Input, [B, H, C].
            time: [B, C].
            kv: Keys and values, [B, K, H, D] each.
            mask: bool [B, H, K], True if the action may attend to the key.

        Returns:
            Output, [B, H, C].
        """
        x = x + self.attn(self.norm1(x), kv, mask)
        return x + self.mlp(self.norm2(x) + time[:, None])


class Evo1ActionEncoder(nn.Module):
    """Encodes noisy actions as tokens: fc3(relu(fc2(relu(fc1(x)) + position)))."""

    def __init__(self, action_dim: int, size: int, horizon: int):
        super().__init__()
        self.fc1 = Linear(action_dim, size)
        self.position_embedding = Embedding(horizon, size)
        self.fc2 = Linear(size, size)
        self.fc3 = Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:  # input shape [B, H, A], output shape [B, H, C]
        hidden = F.relu(self.fc1(x)) + self.position_embedding.weight
        return self.fc3(F.relu(self.fc2(hidden)))


class Evo1Head(nn.Module):
    """The action head. It computes keys and values of the observation once, and the velocity of noisy actions once
    per solver step.
    """

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
        """Compute the keys and values of an observation that all solver steps attend to.

        Args:
            features: [B, L, C], normalised.
            valid: bool [B, L], True for the tokens that the head reads.
            state: [B, S].
        """
        token = self.state_encoder(state)[:, None]
        rows = torch.cat([features.to(token.dtype), token], dim=1)  # [B, L + 1, C]
        keys, values = zip(*(layer.attn.key_value(rows) for layer in self.layers), strict=True)
        return Evo1Context(keys, values, F.pad(valid, (0, 1), value=True)[:, None])

    def velocity(self, x: Tensor, time: Tensor, context: Evo1Context) -> Tensor:
        """Compute the velocity of noisy actions.

        Args:
            x: Input, [B, H, A].
            time: [B, C].
            context: Result of :meth:`context`.

        Returns:
            float32 [B, H, A], zero for the values that the robot does not have.
        """
        dims, spare = self.config.action_dim, self.config.max_action_dim - self.config.action_dim
        h = self.action_encoder(F.pad(x[..., :dims], (0, spare)))  # [B, H, C]
        mask = context.valid.expand(-1, h.shape[1], -1)
        for layer, keys, values in zip(self.layers, context.keys, context.values, strict=True):
            h = layer(h, time.to(h.dtype), (keys, values), mask)
        pooled = self.pool(self.norm(h).flatten(1))  # [B, C]
        out = self.decoder(pooled).unflatten(1, x.shape[1:])  # [B, H, A]
        return F.pad(out[..., :dims], (0, spare)).float()


class Evo1(Model):
    """Evo-1: InternVL3 and an action head of cross-attention blocks."""

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
        """Encode pixels, float32 [B, V, 3, height, width].

        Returns:
            Image tokens [B, V, tokens, C], or [B, 1 + V, tokens, C] with a black view at the start.
        """
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
        """Run the language model, and compute the keys and values that the head attends to. The arguments are those
        of ``Model.read``. ``tokens`` contains a placeholder for each image token.
        """
        tokens, token_mask = self.filled(tokens, token_mask)
        x, valid = self.embed(image_tokens, camera_mask, tokens, token_mask)
        features = self.features(x, valid)
        return self.head.context(features, torch.ones_like(valid) if self.config.rows else valid, state)

    def filled(self, tokens: Tensor, token_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens and mask, padded to the number of tokens that the head reads, [B, rows] each.

        They are unchanged if ``rows`` is 0.
        """
        if not self.config.rows:
            return tokens, token_mask
        # The number of missing tokens is negative if an engine has padded the prompt to more than ``rows`` tokens.
        spare, pad = self.config.rows - tokens.shape[1], self.config.pad_token
        tokens = F.pad(tokens.masked_fill(~token_mask, pad), (0, spare), value=pad)
        return tokens, F.pad(token_mask, (0, spare))

    def embed(
        self, image_tokens: Tensor, camera_mask: Tensor, tokens: Tensor, token_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the language model's input [B, L, C], and a mask, bool [B, L]: True for tokens to which other
        tokens may attend."""
        count, views = image_tokens.shape[2], camera_mask.shape[1]
        is_placeholder = (tokens == self.config.image_token) & token_mask  # [B, L]
        index = (is_placeholder.long().cumsum(dim=1) - 1).clamp(min=0)
        view = index // count
        available = is_placeholder & (view < views) & camera_mask.gather(1, view.clamp(max=views - 1))
        table = self.language.embed_tokens
        flat = image_tokens.flatten(1, 2).to(table.dtype)  # [B, V * N, C]
        # The black view comes before the views of the cameras.
        if self.config.blank:
            index = torch.where(available, index + count, index % count)
        rows = flat.gather(1, index.clamp(max=flat.shape[1] - 1)[..., None].expand(-1, -1, flat.shape[2]))
        pictures = is_placeholder if self.config.blank else available
        return torch.where(pictures[..., None], rows, table(tokens)), token_mask & (
            available | ~is_placeholder
        )

    def features(self, x: Tensor, valid: Tensor) -> Tensor:
        """Run the language model.

        Tokens that are not valid count in the positions, and attend to the valid tokens before them.

        Args:
            x: Input, [B, L, C].
            valid: bool [B, L].

        Returns:
            Normalised hidden states of the last used layer, [B, L, C].
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
        """Return the time's embedding, [B, C], which is row int(t * 999) of the time table.

        The row is computed in double precision, as in the reference.
        """
        return self.head.time_embedding((t * (TIMES - 1)).long().clamp(max=TIMES - 1)).float()

    def act(self, x: Tensor, time_embedding: Tensor, context: Evo1Context) -> Tensor:
        return self.head.velocity(x, time_embedding, context)


def _unpadded(layer: nn.Module, x: Tensor, rotate: Rotation, mask: Tensor, valid: Tensor) -> Tensor:
    """Run a decoder layer whose attention is zero for tokens that are not valid."""
    assert isinstance(layer, DecoderLayer)
    q, k, v = layer.project(x, rotate)
    attended = layer.attn.attend(q, (k, v), mask)
    return layer.finish(x, attended * valid[..., None])
