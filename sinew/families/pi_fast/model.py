"""pi0-FAST (Pertsch et al. 2025, arXiv 2501.09747), as LeRobot computes it: PaliGemma generates the chunk as FAST
tokens.

* pi0's vision tower and projector encode each 224 x 224 view as 256 unscaled tokens.
* The prefix [views | prompt | start token] is one bidirectional block. The start token comes after the prompt's
  padding.
* Each generated token attends to the prefix and to the earlier generated tokens. FAST's tokenizer decodes the tokens to
an action chunk. The language head has its own weights, and not those of the token table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sinew.core.fields import problems
from sinew.layers.attention import key_mask
from sinew.layers.decoder import Decoder, DecoderConfig
from sinew.layers.linear import Linear, rounded
from sinew.layers.sizes import check_sizes
from sinew.layers.vit import VisionTransformer, ViTConfig
from sinew.models.speaker import DecoderSpeaker, ReadPrompt
from sinew.steps.action_tokens.fast import FastTokens


@dataclass(frozen=True)
class PI0FastConfig:
    """Sizes of pi0-FAST, and the fields of its action tokens (:class:`FastTokens`).

    Attributes:
        vision: Sizes of the SigLIP tower.
        language: Sizes of the Gemma language model.
        vocab_size: Number of rows of the token table, which has one row per token id.
        chunk_size: Actions in a chunk.
        max_state_dim: Width of the padded state.
        max_action_dim: Size of an action.
        max_tokens: Largest number of generated tokens.
        start_token: Id of the token after the prompt.
        end_token: Id of the token that ends the sequence.
        zero_token: Id, in the language model's vocabulary, of the token that stands for FAST's token 0.
        action_tokenizer: Content of FAST's ``tokenizer.json``.
        lowest: Lowest quantised coefficient that FAST's tokenizer can represent.
        scale: Factor by which FAST multiplies the coefficients before it rounds them.
        begins: Ids of the tokens with which a generated sequence must begin. May be empty.
        leaves_out: Ids of tokens that are removed before the remaining tokens are decoded to actions.
    """

    vision: ViTConfig
    language: DecoderConfig
    vocab_size: int
    chunk_size: int
    max_state_dim: int
    max_action_dim: int
    max_tokens: int
    start_token: int
    end_token: int
    zero_token: int
    action_tokenizer: str
    lowest: float
    scale: float
    begins: tuple[int, ...] = ()
    leaves_out: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_sizes(self)
        for problem in problems(self.action_tokens):
            raise ValueError(problem)
        for name in ("start_token", "end_token", "zero_token"):
            if not 0 <= getattr(self, name) < self.vocab_size:
                raise ValueError(f"{name}: expected an id below {self.vocab_size}, got {getattr(self, name)}")

    @property
    def action_tokens(self) -> FastTokens:
        return FastTokens(
            most=self.max_tokens,
            end=self.end_token,
            rows=self.chunk_size,
            dims=self.max_action_dim,
            zero=self.zero_token,
            tokenizer=self.action_tokenizer,
            least=self.lowest,
            scale=self.scale,
            begins=self.begins,
            leaves_out=self.leaves_out,
        )


class PI0Fast(DecoderSpeaker):
    """pi0-FAST: SigLIP and a Gemma language model that generates action tokens."""

    config_type = PI0FastConfig
    config: PI0FastConfig

    def __init__(self, config: PI0FastConfig):
        super().__init__()
        self.config = config
        self.vision = VisionTransformer(config.vision)
        self.connector = Linear(config.vision.hidden_size, config.language.hidden_size)
        self.language = Decoder(config.language, config.vocab_size)
        self.lm_head = Linear(config.language.hidden_size, config.vocab_size, bias=False)

    @property
    def action_tokens(self) -> FastTokens:
        return self.config.action_tokens

    def embed_images(self, pixels: Tensor) -> Tensor:  # shapes: [B, V, 3, height, width] -> [B, V, N, C]
        return self.connector(self.vision(pixels.flatten(0, 1))).unflatten(0, pixels.shape[:2])

    def scaled(self, rows: Tensor) -> Tensor:
        # Gemma multiplies its embeddings by the square root of their width, rounded to their dtype.
        return rows * rounded(self.config.language.hidden_size**0.5, rows.dtype)

    def embed_token(self, token: Tensor) -> Tensor:
        return self.scaled(self.language.embed_tokens(token))

    def logits(self, h: Tensor) -> Tensor:
        return self.lm_head(h)

    def read(
        self, image_tokens: Tensor, camera_mask: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor
    ) -> ReadPrompt:
        table, B, N = self.language.embed_tokens, tokens.shape[0], image_tokens.shape[2]
        views = image_tokens.flatten(1, 2).to(table.dtype)
        start = self.scaled(table.rows((self.config.start_token,))).expand(B, 1, -1)
        x = torch.cat([views, self.embed_token(tokens), start], dim=1)  # [B, P, C]
        view_mask, start_mask = camera_mask.repeat_interleave(N, dim=1), token_mask.new_ones(B, 1)
        valid = torch.cat([view_mask, token_mask, start_mask], dim=1)
        h, kv = self.language(x, valid.long().cumsum(dim=1) - 1, key_mask(valid, valid.shape[1]))
        return ReadPrompt(tuple(kv), valid, valid.sum(dim=1), h[:, -1:])
