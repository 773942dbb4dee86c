"""OpenVLA (Kim et al. 2024, arXiv 2406.09246), OpenVLA-OFT (Kim et al. 2025, arXiv 2502.19645) and BitVLA (Wang et al.
2025, arXiv 2506.07530): policies whose actions come from the next tokens of a language model.

* One or two vision towers encode each 224 x 224 view, each with its own normalisation. Their features of a patch are
  concatenated and projected.
* The projected views are inside the prompt, after its first tokens.
* OpenVLA continues the prompt one token at a time. Each token is the one with the highest score, and is a bin of one
  dimension of the action. Every token attends to the tokens before it.
* OFT and BitVLA run one pass over [start of the prompt | views | state | rest of the prompt | zeros | stop token], with
  one zero embedding for each value of the chunk. Every token attends to every token. A small residual MLP converts the
  final hidden states to actions, one state per value, from the last prompt token on.
* OFT with discrete decoding has no MLP. It takes the token with the highest score at each of these states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinew.layers.attention import block_mask
from sinew.layers.decoder import Decoder, DecoderConfig
from sinew.layers.linear import Linear
from sinew.layers.mlp import MLP
from sinew.layers.norm import LayerNorm
from sinew.layers.sizes import check_sizes
from sinew.layers.vit import VisionTransformer, ViTConfig
from sinew.models.base import Model, Regression
from sinew.models.speaker import DecoderSpeaker, ReadPrompt
from sinew.steps.action_tokens.bins import BinTokens, bin_centres

HEAD_EPS = 1e-5  # default of torch; the reference implementation uses the default too
Piece = tuple[Tensor, Tensor]  # embeddings [B, n, C], and their mask, bool [B, n]


@dataclass(frozen=True)
class PrismaticConfig:
    """Sizes that OpenVLA, OpenVLA-OFT, VLA-Adapter, CogACT and BitVLA have in common.

    Attributes:
        vision: Sizes of the vision towers. Each tower reads three channels of a view.
        projector: Hidden widths of the projector after the towers.
        language: Sizes of the language model.
        vocab_size: Number of rows of the token table, which has one row per token id.
        chunk_size: Actions in a chunk.
        max_action_dim: Size of an action.
        max_state_dim: Size of the state. 0 if the policy reads no state.
        views_after: Number of prompt tokens before the views.
    """

    vision: tuple[ViTConfig, ...]
    projector: tuple[int, ...]
    language: DecoderConfig
    vocab_size: int
    chunk_size: int
    max_action_dim: int
    max_state_dim: int = 0
    views_after: int = 1

    def __post_init__(self) -> None:
        check_sizes(self)
        if not self.vision or len({tower.side for tower in self.vision}) != 1:
            raise ValueError("vision: expected towers with equal grids of patches")


@dataclass(frozen=True)
class OpenVLAConfig(PrismaticConfig):
    """Sizes of OpenVLA.

    Each action value is a token, which stands for a bin. The bins divide [-1, 1] at ``action_bins`` equally spaced
    points. The lowest bin has the token ``action_tokens_end - 1``, and each higher bin has the next lower token.

    Attributes:
        action_bins: Number of points.
        action_tokens_end: One more than the token of the lowest bin.
    """

    action_bins: int = 256
    action_tokens_end: int = 32000

    def __post_init__(self) -> None:
        super().__post_init__()
        check_action_tokens(self)


@dataclass(frozen=True)
class OFTConfig(PrismaticConfig):
    """Sizes of OpenVLA-OFT.

    Attributes:
        stop_token: Id of the token whose embedding is the last one of the input sequence.
        action_bins: 0 if a regression head returns the actions. Otherwise actions are tokens, as in
            :class:`OpenVLAConfig`.
        action_tokens_end: As in :class:`OpenVLAConfig`.
    """

    stop_token: int = 2
    action_bins: int = 0
    action_tokens_end: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.action_bins:
            check_action_tokens(self)


def check_action_tokens(config: OpenVLAConfig | OFTConfig) -> None:
    """Raise ValueError if the vocabulary has no token for one of the action bins."""
    if not 1 < config.action_bins <= config.action_tokens_end <= config.vocab_size:
        raise ValueError(
            f"action_tokens_end: expected {config.action_bins} to {config.vocab_size}, got {config.action_tokens_end}"
        )


class Towers(nn.Module):
    """The vision towers and the projector after them. Each tower reads its own three channels of the pixels."""

    towers: Sequence[VisionTransformer]

    def __init__(self, config: PrismaticConfig):
        super().__init__()
        width = sum(tower.hidden_size for tower in config.vision)
        self.towers = nn.ModuleList(  # type: ignore[assignment]
            VisionTransformer(tower) for tower in config.vision
        )
        self.projector = MLP(width, *config.projector, config.language.hidden_size)

    def features(self, pixels: Tensor) -> Tensor:  # shapes: [N, 3 * towers, height, width] -> [N, patches, C]
        parts = zip(self.towers, pixels.split(3, dim=1), strict=True)
        return torch.cat([tower(part) for tower, part in parts], dim=-1)

    def forward(self, pixels: Tensor) -> Tensor:  # -> [N, patches, C']
        return self.projector(self.features(pixels))


class PrismaticVLM(Model):
    """The base class of the policies with OpenVLA's network: vision towers, and a language model whose prompt
    contains the views.
    """

    def __init__(self, config: PrismaticConfig):
        super().__init__()
        self.config = config
        self.vision = Towers(config)
        self.language = Decoder(config.language, config.vocab_size)

    @property
    def channels(self) -> int:
        return 3 * len(self.config.vision)

    @property
    def min_tokens(self) -> int:
        return self.config.views_after + 2

    def embed_images(self, pixels: Tensor) -> Tensor:
        return self.vision(pixels.flatten(0, 1)).unflatten(0, pixels.shape[:2])

    def sequence(
        self,
        image_tokens: Tensor,
        camera_mask: Tensor,
        tokens: Tensor,
        token_mask: Tensor,
        behind_views: Sequence[Tensor] = (),
        behind_prompt: Sequence[Tensor] = (),
    ) -> Piece:
        """Build the sequence [start of the prompt | views | behind_views | rest of the prompt | behind_prompt].

        Args:
            image_tokens, camera_mask, tokens, token_mask: As for :meth:`read`.
            behind_views: Embeddings after the views, [B, n, C] each.
            behind_prompt: Embeddings after the prompt, [B, n, C] each.

        Returns:
            The embeddings [B, L, C] and their mask, bool [B, L].
        """
        start, dtype = self.config.views_after, self.language.embed_tokens.dtype
        prompt = self.language.embed_tokens(tokens)  # [B, L, C]
        view_mask = camera_mask[:, :, None].expand(image_tokens.shape[:3]).flatten(1)  # [B, V * N]

        def always(x: Tensor) -> Piece:
            return x, token_mask.new_ones(x.shape[:2])

        pieces = [
            (prompt[:, :start], token_mask[:, :start]),
            (image_tokens.flatten(1, 2), view_mask),
            *map(always, behind_views),
            (prompt[:, start:], token_mask[:, start:]),
            *map(always, behind_prompt),
        ]
        x = torch.cat([rows.to(dtype) for rows, _ in pieces], dim=1)
        return x, torch.cat([valid for _, valid in pieces], dim=1)

    def stop(self, token: int, batch: int) -> Tensor:
        """Return the embedding of the stop token, [B, 1, C].

        The method ``rows`` of the token table reads a row without an index tensor (see layers/linear.py).
        """
        return self.language.embed_tokens.rows((token,)).expand(batch, 1, -1)


def last_row(x: Tensor, token_mask: Tensor, behind: int) -> Tensor:
    """Return the hidden state of the last prompt token, [B, 1, C].

    Args:
        x: [B, L, C], hidden states of the sequence.
        token_mask: bool [B, N], False for padding at the end of the prompt.
        behind: Number of tokens after the padded prompt.
    """
    length = token_mask.shape[1]
    row = x.shape[1] - behind - 1 - (length - token_mask.sum(dim=1))  # [B]
    return x.gather(1, row[:, None, None].expand(-1, 1, x.shape[2]))


class ActionStates(NamedTuple):
    """The hidden states of the language model that the action head reads.

    Attributes:
        hidden: [B, H, A * C], final states of the language model, one row per action of the chunk.
    """

    hidden: Tensor


class ResidualBlock(nn.Module):
    """A residual block of OFT's action head."""

    def __init__(self, size: int):
        super().__init__()
        self.norm = LayerNorm(size, eps=HEAD_EPS)
        self.proj = Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.proj(self.norm(x)))


class RegressionHead(nn.Module):
    """OFT's action head: an MLP with residual blocks from the hidden states of a step to its action.

    In OFT's code this head is ``MLPResNet``.
    """

    def __init__(self, input_size: int, hidden_size: int, output_size: int, num_blocks: int = 2):
        super().__init__()
        self.norm_in = LayerNorm(input_size, eps=HEAD_EPS)
        self.proj_in = Linear(input_size, hidden_size)
        self.blocks = nn.ModuleList(ResidualBlock(hidden_size) for _ in range(num_blocks))
        self.norm_out = LayerNorm(hidden_size, eps=HEAD_EPS)
        self.proj_out = Linear(hidden_size, output_size)

    def forward(self, x: Tensor) -> Tensor:  # input shape [B, H, input], output shape [B, H, output]
        x = F.relu(self.proj_in(self.norm_in(x)))
        for block in self.blocks:
            x = block(x)
        return self.proj_out(self.norm_out(x))


class OpenVLAOFT(PrismaticVLM, Regression):
    """OpenVLA-OFT and BitVLA: all actions of a chunk in one pass."""

    config_type = OFTConfig
    config: OFTConfig

    def __init__(self, config: OFTConfig):
        super().__init__(config)
        width, dim = config.language.hidden_size, config.max_action_dim
        if config.max_state_dim:
            self.state_proj = MLP(config.max_state_dim, width, width)
        if config.action_bins:
            self.lm_head = Linear(width, config.vocab_size, bias=False)
        else:
            self.head = RegressionHead(dim * width, width, dim)

    def read(
        self, image_tokens: Tensor, camera_mask: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor
    ) -> ActionStates:
        config = self.config
        B, slots = tokens.shape[0], config.chunk_size * config.max_action_dim
        zeros = image_tokens.new_zeros(B, slots, config.language.hidden_size)
        x, valid = self.sequence(
            image_tokens,
            camera_mask,
            tokens,
            token_mask,
            behind_views=[self.state_proj(state)[:, None]] if config.max_state_dim else [],
            behind_prompt=[zeros, self.stop(config.stop_token, B)],
        )
        positions = valid.long().cumsum(dim=1) - 1
        h, _ = self.language(x, positions, block_mask(valid, torch.zeros_like(valid)))
        h = torch.cat([last_row(h, token_mask, slots + 1), h[:, -slots - 1 : -2]], dim=1)  # [B, slots, C]
        shape = (config.chunk_size, config.max_action_dim)
        return ActionStates(self.language.norm(h).unflatten(1, shape).flatten(2))

    @property
    def chooses_tokens(self) -> bool:
        return bool(self.config.action_bins)

    def regress(self, context: ActionStates) -> Tensor:
        if self.config.action_bins:
            config = self.config
            return bin_centres(self.tokens(context), config.action_bins, config.action_tokens_end)
        return self.head(context.hidden).float()

    def tokens(self, context: ActionStates) -> Tensor:
        """Return the token with the highest score for each value of the chunk, int64 [B, H, A]."""
        states = context.hidden.unflatten(2, (self.config.max_action_dim, -1))  # [B, H, A, C]
        return self.lm_head(states).argmax(dim=-1)


class OpenVLA(PrismaticVLM, DecoderSpeaker):
    """OpenVLA: the language model generates one action token after the other."""

    config_type = OpenVLAConfig
    config: OpenVLAConfig

    def __init__(self, config: OpenVLAConfig):
        super().__init__(config)
        self.lm_head = Linear(config.language.hidden_size, config.vocab_size, bias=False)

    def read(
        self, image_tokens: Tensor, camera_mask: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor
    ) -> ReadPrompt:
        x, valid = self.sequence(image_tokens, camera_mask, tokens, token_mask)
        positions = valid.long().cumsum(dim=1) - 1
        h, kv = self.language(x, positions, block_mask(valid, torch.ones_like(valid)))
        return ReadPrompt(tuple(kv), valid, valid.sum(dim=1), last_row(h, token_mask, 0))

    @property
    def action_tokens(self) -> BinTokens:
        config = self.config
        sizes = config.chunk_size, config.max_action_dim
        return BinTokens(*sizes, config.action_bins, config.action_tokens_end)

    def embed_token(self, token: Tensor) -> Tensor:
        return self.language.embed_tokens(token)

    def logits(self, h: Tensor) -> Tensor:
        return self.lm_head(h)  # a score for each token of the vocabulary
