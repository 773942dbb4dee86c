"""BERT (Devlin et al. 2019, arXiv 1810.04805) over the sub-sentences of an instruction.

Grounding DINO encodes text in the same way (Liu et al. 2023, arXiv 2303.05499).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinew.layers.attention import attend
from sinew.layers.linear import Embedding, Linear
from sinew.layers.norm import LayerNorm
from sinew.layers.vit import BlockConfig, ViTAttention


@dataclass(frozen=True)
class BertConfig(BlockConfig):
    """Sizes of a BERT encoder, and its special tokens.

    Attributes:
        positions: Rows of the position table.
        vocab_size: Number of rows of the token table, which has one row per token id. The id ``vocab_size`` marks a
            token after the padding of the instruction.
        norm_eps: Epsilon of the norms.
        delimiters: Ids of the tokens that end a sub-sentence.
        pad_token: Id of the padding token.
    """

    positions: int
    vocab_size: int
    norm_eps: float
    delimiters: tuple[int, ...]
    pad_token: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.delimiters or not all(
            0 <= t < self.vocab_size for t in (*self.delimiters, self.pad_token)
        ):
            raise ValueError(
                f"delimiters, pad_token: expected ids below vocab_size {self.vocab_size}, got {self.delimiters} and"
                f" {self.pad_token}"
            )


class TextLayout(NamedTuple):
    """The masks and positions of an instruction's tokens.

    Attributes:
        sees: bool [B, L, L], True if the row's token may attend to the column's token.
        position: int64 [B, L], position in the token's sub-sentence.
        words: bool [B, L], True for tokens of the instruction, False for padding.
        encoded: bool [B, L], True for tokens that BERT encodes. False for tokens after the padded length, whose
            features are zero.
    """

    sees: Tensor
    position: Tensor
    words: Tensor
    encoded: Tensor


class PostNormLayer(nn.Module):
    """A transformer layer whose norms come after the residual additions: norm1(x + attention), then norm2(x + mlp)."""

    def __init__(self, config: BlockConfig, norm_eps: float, activation: Callable[[Tensor], Tensor]):
        super().__init__()
        self.attn = ViTAttention(config.block(norm_eps, "gelu"))
        self.norm1 = LayerNorm(config.hidden_size, eps=norm_eps)
        self.fc1 = Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = Linear(config.intermediate_size, config.hidden_size)
        self.norm2 = LayerNorm(config.hidden_size, eps=norm_eps)
        self.activation = activation

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # shapes: [B, L, C], bool [B, L, L] -> [B, L, C]
        q, k, v = (part.unflatten(-1, (-1, self.attn.head_dim)) for part in self.attn.project(x))
        x = self.norm1(x + self.attn.o_proj(attend(q, k, v, mask)))
        return self.norm2(x + self.fc2(self.activation(self.fc1(x))))


class Bert(nn.Module):
    """The text encoder BERT, followed by a linear projection of its output."""

    layers: Sequence[PostNormLayer]

    def __init__(self, config: BertConfig, out_size: int):
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.embed_tokens = Embedding(config.vocab_size, size)
        self.places = Embedding(config.positions, size)
        # BERT adds an embedding for each segment of a text. An instruction is only one segment, so there is only one
        # such embedding.
        self.segment = nn.Parameter(torch.zeros(size))
        self.norm = LayerNorm(size, eps=config.norm_eps)
        self.layers = nn.ModuleList(  # type: ignore[assignment]
            PostNormLayer(config, config.norm_eps, F.gelu) for _ in range(config.num_layers)
        )
        self.project = Linear(size, out_size)

    def layout(self, tokens: Tensor, token_mask: Tensor) -> TextLayout:
        """Compute which tokens attend to each other, and the position of each token.

        The tokens after one delimiter, up to and including the next delimiter, form a sub-sentence. They attend to each
        other, and their positions start at 0. Every other token attends only to itself, at position 0. A delimiter in
        the last column of the padded instruction does not end a sub-sentence, because the reference implementation
        skips this delimiter and the weights were trained with it.

        Args:
            tokens: int64 [B, L].
            token_mask: bool [B, L], False for padding that an engine added. The padding of the instruction is True.

        Returns:
            The layout.
        """
        config = self.config
        encoded = token_mask & (tokens < config.vocab_size)
        ends = torch.zeros_like(encoded)
        for delimiter in config.delimiters:
            ends = ends | (tokens == delimiter)
        ends = ends & encoded
        column = torch.ones_like(tokens).cumsum(dim=1) - 1  # [B, L]
        last = encoded.long().sum(dim=1, keepdim=True) - 1
        # bool [B, L, L]: True if the token of the second index comes before the token of the first index.
        before = column[:, None, :] < column[:, :, None]
        delimiters_before = (
            (ends[:, None] & before).long().sum(dim=-1)
        )  # number of delimiters before each token
        closing = ends & (column > 0) & (column < last)
        in_sub_sentence = (closing[:, None] & ~before).any(dim=-1) & (column > 0) & encoded
        # Index of the last delimiter before each token.
        start = torch.where(ends[:, None] & before, column[:, None], 0).amax(dim=-1)
        same = (
            (delimiters_before[:, :, None] == delimiters_before[:, None, :])
            & in_sub_sentence[:, :, None]
            & in_sub_sentence[:, None, :]
        )
        return TextLayout(
            sees=same | (column[:, :, None] == column[:, None, :]),
            position=torch.where(in_sub_sentence, column - start - 1, 0),
            words=encoded & (tokens != config.pad_token),
            encoded=encoded,
        )

    def forward(self, tokens: Tensor, layout: TextLayout) -> Tensor:
        """Encode tokens.

        Args:
            tokens: int64 [B, L].
            layout: Result of :meth:`layout`.

        Returns:
            [B, L, out_size]. A token that is not encoded gives the projection of zeros.
        """
        ids = torch.where(layout.encoded, tokens, self.config.pad_token)
        x = self.norm(self.embed_tokens(ids) + self.segment + self.places(layout.position))
        for layer in self.layers:
            x = layer(x, layout.sees)
        return self.project(torch.where(layout.encoded[..., None], x, 0.0))
