"""A speaker whose tokens go through the same decoder as its prompt: OpenVLA, pi0-FAST."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sinew.layers.decoder import Decoder, DecoderLayer, KeyValue
from sinew.layers.rope import Rotation
from sinew.models.base import Speaker


class ReadPrompt(NamedTuple):
    """The prompt as the next tokens read it."""

    kv: tuple[KeyValue, ...]  # of each layer, [B, P, Hkv, D]
    valid: Tensor  # bool [B, P]
    length: Tensor  # int64 [B]: the position of the next token
    last: Tensor  # [B, 1, C]: the last layer's output at the last token of the prompt


class SpokenTokens(NamedTuple):
    token: Tensor  # int64 [B]: the newest
    before: Tensor  # int64 [1]: how many were said before it, which have keys and values
    kv: tuple[KeyValue, ...]  # of each layer, [B, T, Hkv, D], of which ``before`` rows are said


# Of the largest score of a row: a lead beyond which float32 passes of one and of several tokens choose the same. Their
# scores differ by rounding; a test holds that over the fixtures they do by less than a hundredth of it.
CLOSE = 1e-3


class DecoderSpeaker(Speaker):
    """Takes the likeliest token. Each sees the prompt and those before it."""

    language: Decoder
    checks_drafts = True

    @abstractmethod
    def embed_token(self, token: Tensor) -> Tensor:  # int64 [B, n] -> [B, n, C]
        """Return what the decoder reads of tokens that were said."""

    @abstractmethod
    def logits(self, h: Tensor) -> Tensor:  # [B, n, C] -> [B, n, vocabulary]
        """Return the scores of the tokens that follow, of what the final norm gave."""

    def chosen(self, h: Tensor) -> Tensor:  # [B, 1, C], before the final norm -> int64 [B]
        return self.choose(self.logits(self.language.norm(h)))

    def first(self, context: ReadPrompt) -> SpokenTokens:
        room = max(self.action_tokens.most - 1, 1)  # nothing reads the last token

        def empty(x: Tensor) -> Tensor:  # [B, P, Hkv, D] -> [B, T, Hkv, D]
            return x.new_zeros(x.shape[0], room, x.shape[2], x.shape[3])

        kv = tuple((empty(k), empty(v)) for k, v in context.kv)
        return SpokenTokens(self.chosen(context.last), context.length.new_zeros(1), kv)

    def next(self, spoken: SpokenTokens, context: ReadPrompt) -> SpokenTokens:
        h, kv = self._read_behind(spoken, spoken.token[:, None], context)
        return SpokenTokens(self.chosen(h), spoken.before + 1, kv)

    def check(self, spoken: SpokenTokens, context: ReadPrompt, draft: Tensor) -> SpokenTokens:
        h, kv = self._read_behind(spoken, torch.cat([spoken.token[:, None], draft], dim=1), context)
        scores = self.logits(self.language.norm(h)).float()  # [B, n + 1, vocabulary]
        best, ids = scores.topk(2, dim=-1)  # [B, n + 1, 2] each
        sure = best[..., 0] - best[..., 1] > CLOSE * scores.abs().amax(dim=-1)
        right = torch.cat([torch.ones_like(draft[:, :1], dtype=torch.bool), draft == ids[:, :-1, 0]], dim=1)
        count = (sure & right).all(dim=0).long().cumprod(dim=0).sum(dim=0, keepdim=True)  # int64 [1]
        token = torch.cat([spoken.token[:, None], ids[..., 0]], dim=1).index_select(1, count)[:, 0]
        return SpokenTokens(token, spoken.before + count, kv)

    def _read_behind(
        self, spoken: SpokenTokens, tokens: Tensor, context: ReadPrompt
    ) -> tuple[Tensor, tuple[KeyValue, ...]]:
        """Return the last layer's output at the newest token and those of a draft, [B, n, C], and all keys and values
        with theirs. Rows of a draft that is not said stay unread until other tokens take their place."""
        config, count, width = self.language.config, spoken.before, tokens.shape[1]
        layers: Sequence[DecoderLayer] = self.language.layers  # type: ignore[assignment]
        h = self.embed_token(tokens)
        rows = count + torch.arange(width, device=count.device)  # [n]
        rotate = Rotation.at(context.length[:, None] + rows, config.head_dim, config.rope_theta)
        slots = torch.arange(spoken.kv[0][0].shape[1], device=count.device)  # [T]
        here = ((slots >= count) & (slots < count + width))[:, None, None]  # [T, 1, 1]
        said = (slots <= rows[:, None]).expand(h.shape[0], -1, -1)  # [B, n, T]
        sees = torch.cat([context.valid[:, None].expand(-1, width, -1), said], dim=2)  # [B, n, P + T]
        place = (slots - count).clamp(0, width - 1)  # [T], of the row that a slot takes

        def put(new: Tensor, old: Tensor) -> Tensor:  # [B, n, Hkv, D], [B, T, Hkv, D]
            return torch.where(here, new if width == 1 else new[:, place], old)

        own = []
        for layer, prompt, (keys, values) in zip(layers, context.kv, spoken.kv, strict=True):
            q, k, v = layer.project(h, rotate)
            own.append((put(k, keys), put(v, values)))
            h = layer.finish(h, layer.attn.attend(q, prompt, sees, own=own[-1]))
        return h, tuple(own)
