"""CLIP's text encoder (Radford et al. 2021, arXiv 2103.00020): a causal transformer whose output at one token is the
text feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sinew.layers.attention import block_mask
from sinew.layers.fold_sites import FoldSite
from sinew.layers.linear import Embedding, Linear
from sinew.layers.norm import LayerNorm
from sinew.layers.vit import BlockConfig, MaskedLayer, ViTConfig, ViTMLP

NORM_EPS = 1e-5  # default of torch, which the reference does not change


class QuickMLP(ViTMLP):
    """An MLP with ``x * sigmoid(1.702 x)`` in place of GELU (Hendrycks and Gimpel 2016), as in OpenAI's CLIP
    weights.
    """

    def inputs(self) -> tuple[nn.Module, ...]:
        return (self.fc1,)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        return self.fc2(h * torch.sigmoid(1.702 * h))


class ClipLayer(MaskedLayer):
    def __init__(self, config: ViTConfig):
        super().__init__(config)
        self.mlp = QuickMLP(config)

    def fold_sites(self) -> list[FoldSite]:
        return super().fold_sites()


@dataclass(frozen=True)
class ClipTextConfig(BlockConfig):
    """Sizes of CLIP's text encoder.

    Attributes:
        positions: Number of tokens of the longest text.
        vocab_size: Rows of the token table (the embedding of the vocabulary).
        out_size: Width of the text feature.
        out_bias: True if the last projection has a bias.
        end_token: Id of the end token, at whose first occurrence the text feature is read. If the id is 0,
            the feature is read at the last token before the padding.
    """

    positions: int
    vocab_size: int
    out_size: int
    out_bias: bool = False
    end_token: int = 0


class ClipText(nn.Module):
    """CLIP's text encoder: token table, transformer blocks and last projection."""

    layers: Sequence[ClipLayer]

    def __init__(self, config: ClipTextConfig):
        super().__init__()
        size, block = config.hidden_size, config.block(NORM_EPS, "gelu")
        self.embed_tokens = Embedding(config.vocab_size, size)
        self.places = Embedding(config.positions, size)
        self.layers = nn.ModuleList(ClipLayer(block) for _ in range(config.num_layers))  # type: ignore[assignment]
        self.norm = LayerNorm(size, eps=NORM_EPS)
        self.project = Linear(size, config.out_size, bias=config.out_bias)
        self.end_token = config.end_token

    def encode(self, tokens: Tensor, token_mask: Tensor) -> Tensor:
        """Encode a text without the last projection.

        Args:
            tokens: int64 [B, L], with padding at the end.
            token_mask: bool [B, L], False for padding.

        Returns:
            The normalised hidden state of the token that represents the text, [B, C].
        """
        positions = (token_mask.long().cumsum(dim=1) - 1).clamp(min=0)
        x = self.embed_tokens(tokens) + self.places(positions)
        mask = block_mask(token_mask, torch.ones_like(token_mask))
        for layer in self.layers:
            x = layer(x, mask)
        if not self.end_token:
            row = token_mask.sum(dim=1) - 1
        else:
            row = ((tokens == self.end_token) & token_mask).long().argmax(dim=1)
        return self.norm(x.gather(1, row[:, None, None].expand(-1, 1, x.shape[2]))[:, 0])

    def forward(self, tokens: Tensor, token_mask: Tensor) -> Tensor:
        """Encode a text.

        Args:
            tokens: int64 [B, L], with padding at the end.
            token_mask: bool [B, L], False for padding.

        Returns:
            The text feature, [B, out_size].
        """
        return self.project(self.encode(tokens, token_mask))
