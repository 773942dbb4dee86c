"""An autoregressive model that generates action tokens with the same decoder that reads the prompt (OpenVLA,
pi0-FAST).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sinew.layers.decoder import Decoder, DecoderLayer, KeyValue
from sinew.layers.rope import Rotation
from sinew.models.base import AutoregressiveModel


class ReadPrompt(NamedTuple):
    """The decoder's results for the prompt, which the generation of each token needs.

    Attributes:
        kv: Keys and values of each layer, [B, P, Hkv, D].
        valid: bool [B, P], False for padding.
        length: int64 [B], the position of the next token.
        last: [B, 1, C], output of the last layer at the last token of the prompt.
    """

    kv: tuple[KeyValue, ...]
    valid: Tensor
    length: Tensor
    last: Tensor


class DecodedTokens(NamedTuple):
    """The state of the decoder after the tokens generated so far.

    Attributes:
        token: int64 [B], the newest token.
        before: int64 [1], the number of generated tokens before the newest one. Keys and values exist for
            these tokens.
        kv: Keys and values of each layer, [B, T, Hkv, D]. Only the first ``before`` of the T rows are filled.
    """

    token: Tensor
    before: Tensor
    kv: tuple[KeyValue, ...]


class DecoderSpeaker(AutoregressiveModel):
    """A model that generates action tokens one after another. Each token is the one with the highest score.

    Each token attends to the prompt and to the tokens before it.
    """

    language: Decoder

    @abstractmethod
    def embed_token(self, token: Tensor) -> Tensor:  # int64 [B, 1] -> [B, 1, C]
        """Return the decoder's input for a generated token."""

    @abstractmethod
    def logits(self, h: Tensor) -> Tensor:  # [B, 1, C] -> [B, 1, vocabulary]
        """Return the scores of the next token, from the output of the final norm."""

    def chosen(self, h: Tensor) -> Tensor:  # [B, 1, C], before the final norm -> int64 [B]
        return self.choose(self.logits(self.language.norm(h)))

    def first(self, context: ReadPrompt) -> DecodedTokens:
        # No memory is needed for keys and values of the last token, because no later token attends to it.
        capacity = max(self.action_tokens.most - 1, 1)

        def empty(x: Tensor) -> Tensor:  # [B, P, Hkv, D] -> [B, T, Hkv, D]
            return x.new_zeros(x.shape[0], capacity, x.shape[2], x.shape[3])

        kv = tuple((empty(k), empty(v)) for k, v in context.kv)
        return DecodedTokens(self.chosen(context.last), context.length.new_zeros(1), kv)

    def next(self, spoken: DecodedTokens, context: ReadPrompt) -> DecodedTokens:
        config, count = self.language.config, spoken.before
        layers: Sequence[DecoderLayer] = self.language.layers  # type: ignore[assignment]
        h = self.embed_token(spoken.token[:, None])
        rotate = Rotation.at(context.length[:, None] + count, config.head_dim, config.rope_theta)
        slots = torch.arange(spoken.kv[0][0].shape[1], device=count.device)  # [T]
        newest, filled = (slots == count)[:, None, None], slots <= count  # [T, 1, 1], [T]
        sees = torch.cat([context.valid, filled.expand(h.shape[0], -1)], dim=1)[:, None]  # [B, 1, P + T]
        own = []
        for layer, prompt, (keys, values) in zip(layers, context.kv, spoken.kv, strict=True):
            q, k, v = layer.project(h, rotate)
            own.append((torch.where(newest, k, keys), torch.where(newest, v, values)))  # [B, T, Hkv, D] each
            h = layer.finish(h, layer.attn.attend(q, prompt, sees, own=own[-1]))
        return DecodedTokens(self.chosen(h), count + 1, tuple(own))
