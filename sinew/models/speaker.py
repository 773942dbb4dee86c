"""A speaker whose tokens go through the same decoder as its prompt: OpenVLA, pi0-FAST."""

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
    """The prompt as the next tokens read it."""

    kv: tuple[KeyValue, ...]  # for each layer, [B, P, Hkv, D]
    valid: Tensor  # bool [B, P]
    length: Tensor  # int64 [B]: the position of the next token
    last: Tensor  # [B, 1, C]: the last layer's output at the last token of the prompt


class DecodedTokens(NamedTuple):
    token: Tensor  # int64 [B]: the newest
    before: Tensor  # int64 [1]: how many were said before it, which have keys and values
    kv: tuple[KeyValue, ...]  # for each layer, [B, T, Hkv, D], with ``before`` generated rows


class DecoderSpeaker(AutoregressiveModel):
    """Takes the likeliest token. Each sees the prompt and those before it."""

    language: Decoder

    @abstractmethod
    def embed_token(self, token: Tensor) -> Tensor:  # int64 [B, 1] -> [B, 1, C]
        """Return the decoder's input for a generated token."""

    @abstractmethod
    def logits(self, h: Tensor) -> Tensor:  # [B, 1, C] -> [B, 1, vocabulary]
        """Return the scores of the token that follows, of what the final norm gave."""

    def chosen(self, h: Tensor) -> Tensor:  # [B, 1, C], before the final norm -> int64 [B]
        return self.choose(self.logits(self.language.norm(h)))

    def first(self, context: ReadPrompt) -> DecodedTokens:
        room = max(self.action_tokens.most - 1, 1)  # nothing reads the last token

        def empty(x: Tensor) -> Tensor:  # [B, P, Hkv, D] -> [B, T, Hkv, D]
            return x.new_zeros(x.shape[0], room, x.shape[2], x.shape[3])

        kv = tuple((empty(k), empty(v)) for k, v in context.kv)
        return DecodedTokens(self.chosen(context.last), context.length.new_zeros(1), kv)

    def next(self, spoken: DecodedTokens, context: ReadPrompt) -> DecodedTokens:
        config, count = self.language.config, spoken.before
        layers: Sequence[DecoderLayer] = self.language.layers  # type: ignore[assignment]
        h = self.embed_token(spoken.token[:, None])
        rotate = Rotation.at(context.length[:, None] + count, config.head_dim, config.rope_theta)
        slots = torch.arange(spoken.kv[0][0].shape[1], device=count.device)  # [T]
        here, said = (slots == count)[:, None, None], slots <= count  # [T, 1, 1], [T]
        sees = torch.cat([context.valid, said.expand(h.shape[0], -1)], dim=1)[:, None]  # [B, 1, P + T]
        own = []
        for layer, prompt, (keys, values) in zip(layers, context.kv, spoken.kv, strict=True):
            q, k, v = layer.project(h, rotate)
            own.append((torch.where(here, k, keys), torch.where(here, v, values)))  # [B, T, Hkv, D] each
            h = layer.finish(h, layer.attn.attend(q, prompt, sees, own=own[-1]))
        return DecodedTokens(self.chosen(h), count + 1, tuple(own))
