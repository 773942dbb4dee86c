"""GR00T's action head, shared by N1.5, N1.6 and N1.7.

The features of the vision-language model are normalised and, in N1.5 and N1.7, refined by self-attention blocks. The
head's tokens are [state | future tokens (N1.5) | noisy actions]. In the diffusion transformer, even blocks attend to
the features and odd blocks attend to the head's own tokens. In N1.6 and N1.7 the even blocks alternate between the text
tokens and the image tokens. The output is the velocity of flow matching.

A checkpoint stores some weights per embodiment. The converter selects one embodiment, so these weights are plain linear
layers here.
Source: Isaac-GR00T ``action_head/flow_matching_action_head.py`` (N1.5), ``gr00t_n1d6.py``, ``gr00t_n1d7.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinew.layers.dit import DiT, DiTConfig, SelfAttentionLayer, action_sinusoids
from sinew.layers.linear import Embedding, Linear
from sinew.layers.mlp import Projector
from sinew.layers.norm import LayerNorm
from sinew.layers.sizes import check_sizes

VL_NORM_EPS = 1e-5


@dataclass(frozen=True)
class HeadConfig:
    """Sizes of the action head.

    Attributes:
        dit: Sizes of the diffusion transformer.
        hidden_size: Inner width of the state encoder and the action decoder.
        buckets: Number of steps to which the solver's time is rounded.
        positions: Rows of the position table that is added to the action tokens. 0 means no table.
        refine_layers: Number of self-attention blocks over the features.
        refine_heads: Heads of these blocks.
        refine_head_dim: Width of a head of these blocks.
        text_every: Of the blocks that read the features, each ``text_every``-th reads the text tokens, and the others
            read the image tokens. 0 means that all blocks read all tokens.
        future_tokens: Number of learned tokens between the state token and the action tokens.
        norm_features: True if the features are normalised first.
    """

    dit: DiTConfig
    hidden_size: int
    buckets: int
    positions: int
    refine_layers: int = 0
    refine_heads: int = 0
    refine_head_dim: int = 0
    text_every: int = 0
    future_tokens: int = 0
    norm_features: bool = True

    def __post_init__(self) -> None:
        check_sizes(self)


class HeadContext(NamedTuple):
    """The results of an observation that the head reads in each solver step.

    Attributes:
        prefix: Tokens before the actions, [B, state and future tokens, D].
        keys: Keys of every block that reads the features, [B, L, H, D] each.
        values: Values of every block that reads the features, [B, L, H, D] each.
        text: bool [B, 1, L], True for the tokens that the text blocks read.
        image: bool [B, 1, L], True for the tokens that the image blocks read.
    """

    prefix: Tensor
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    text: Tensor
    image: Tensor


class ActionEncoder(nn.Module):
    """Encodes noisy actions and embedded time as tokens: fc3(silu(fc2([fc1(x), time])))."""

    def __init__(self, action_dim: int, size: int):
        super().__init__()
        self.fc1 = Linear(action_dim, size)
        self.fc2 = Linear(2 * size, size)
        self.fc3 = Linear(size, size)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:  # shapes: [B, H, A], [B, D] -> [B, H, D]
        actions = self.fc1(x)
        both = torch.cat([actions, time.to(actions.dtype)[:, None].expand_as(actions)], dim=-1)
        return self.fc3(F.silu(self.fc2(both)))


class Head(nn.Module):
    """The action head. It computes keys and values of the vision-language features once per observation, and the
    velocity of noisy actions once per solver step.
    """

    def __init__(self, config: HeadConfig, state_dim: int, action_dim: int):
        super().__init__()
        self.config, self.state_dim = config, state_dim
        size, width = config.dit.hidden_size, config.dit.context_size
        if config.norm_features:
            self.vl_norm = LayerNorm(width, eps=VL_NORM_EPS)
        self.vl_layers = nn.ModuleList(
            SelfAttentionLayer(width, config.refine_heads, config.refine_head_dim)
            for _ in range(config.refine_layers)
        )
        if state_dim:
            self.state_encoder = Projector(state_dim, config.hidden_size, size)
        self.action_encoder = ActionEncoder(action_dim, size)
        self.action_decoder = Projector(config.dit.output_size, config.hidden_size, action_dim)
        if config.positions:
            self.position_embedding = Embedding(config.positions, size)
        if config.future_tokens:
            self.future_tokens = Embedding(config.future_tokens, size)
        self.dit = DiT(config.dit)

    def refine(self, features: Tensor, valid: Tensor) -> Tensor:
        """Run the self-attention blocks over the vision-language features, before the head reads them.

        Args:
            features: [B, L, C].
            valid: bool [B, L], False for padding.

        Returns:
            Output, [B, L, C].
        """
        x = self.vl_norm(features) if self.config.norm_features else features
        mask = valid[:, None].expand(-1, x.shape[1], -1)
        for layer in self.vl_layers:
            x = layer(x, mask)
        return x

    def context(self, features: Tensor, is_image: Tensor, valid: Tensor, state: Tensor) -> HeadContext:
        """Compute the results of an observation that all solver steps read.

        Args:
            features: [B, L, C], features of the vision-language model.
            is_image: bool [B, L], True for image tokens.
            valid: bool [B, L], False for padding.
            state: [B, S], normalised and padded.
        """
        keys, values = zip(*self.dit.context(self.refine(features, valid)), strict=True)
        split = self.config.text_every > 0
        text, image = (valid & ~is_image, valid & is_image) if split else (valid, valid)
        return HeadContext(self.prefix(state), keys, values, text[:, None], image[:, None])

    def prefix(self, state: Tensor) -> Tensor:
        """Return the head's tokens that come before the actions: the state token and the future tokens, [B, tokens, D].

        ``state`` has the shape [B, S].
        """
        parts = [self.state_encoder(state)[:, None]] if self.state_dim else []
        if self.config.future_tokens:
            future = self.future_tokens.weight.expand(state.shape[0], -1, -1)
            parts.append(future.to(parts[0].dtype) if parts else future)
        return torch.cat(parts, dim=1)

    def embed_time(self, bucket: Tensor) -> Tensor:  # int64 [B] -> [B, D + (layers + 1) * 2 D]
        """Return the time embedding for the action encoder, followed by the scales and shifts for all norms of the
        transformer."""
        time = action_sinusoids(bucket, self.config.dit.hidden_size)
        modulations = self.dit.modulations(bucket).flatten(1)
        return torch.cat([time, modulations.float()], dim=-1)

    def velocity(self, x: Tensor, time_embedding: Tensor, context: HeadContext) -> Tensor:
        """Compute the velocity of noisy actions.

        Args:
            x: Input, [B, H, A].
            time_embedding: Result of :meth:`embed_time`.
            context: Result of :meth:`context`.

        Returns:
            float32 [B, H, A].
        """
        config, (B, H, _) = self.config, x.shape
        time, modulations = time_embedding.split(
            [config.dit.hidden_size, time_embedding.shape[1] - config.dit.hidden_size], 1
        )
        actions = self.action_encoder(x, time)  # [B, H, D]
        if config.positions:
            actions = actions + self.position_embedding.weight[:H]
        h = torch.cat([context.prefix.to(actions.dtype), actions], dim=1).to(self.dit.dtype)  # [B, S, D]
        S = h.shape[1]
        own = torch.ones(B, S, S, dtype=torch.bool, device=h.device)
        reads = (context.text.expand(-1, S, -1), context.image.expand(-1, S, -1))
        masks = tuple(
            reads[bool(config.text_every and i % config.text_every)] for i in range(len(context.keys))
        )
        kv = tuple(zip(context.keys, context.values, strict=True))
        out = self.dit(h, modulations.unflatten(1, (-1, 2 * config.dit.hidden_size)), kv, masks, own)
        return self.action_decoder(out[:, -H:].to(self.action_decoder.fc1.dtype)).float()
