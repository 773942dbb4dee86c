"""The action expert of SmolVLA and pi, which reads the keys and values of a language model's prefix."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sinew.layers.attention import block_mask
from sinew.layers.decoder import Decoder, KeyValue
from sinew.layers.fold_sites import FoldSite
from sinew.layers.linear import Linear
from sinew.layers.norm import Modulation, RMSNorm
from sinew.layers.rope import Rotation
from sinew.layers.sizes import check_sizes
from sinew.layers.vit import VisionTransformer
from sinew.models.base import Model, TextState

LMHead = Literal["", "own", "tied"]
"""The language model's head: not kept, a matrix of its own, or the token table once more."""


@dataclass(frozen=True)
class FlowConfig:
    """The fields that the configurations of these models share. Sizes in tokens and dimensions."""

    vocab_size: int
    chunk_size: int
    max_state_dim: int
    max_action_dim: int
    min_period: float  # shortest period of the time embedding
    max_period: float

    def __post_init__(self) -> None:
        check_sizes(self)
        if not 0 < self.min_period < self.max_period < float("inf"):
            raise ValueError(f"periods {self.min_period} to {self.max_period} are not a range")


class Prefix(NamedTuple):
    """The part of an observation that the expert reads.

    Attributes:
        kv: For each expert layer, keys and values [B, P, Hkv, D] in the form of that layer.
        valid: bool [B, P], False for padding.
        length: int64 [B], number of valid prefix tokens: the position of the first token after it.
        state: float32 [B, 1, C], the state's token, for experts that read it beside their actions (pi0; SmolVLA with
            ``state_in_head``).
    """

    kv: tuple[KeyValue, ...]
    valid: Tensor
    length: Tensor
    state: Tensor | None = None


class ExpertContext(NamedTuple):
    """The context of a step: the prefix, and the positions and masks of the expert's own tokens."""

    kv: tuple[KeyValue, ...]
    rotations: tuple[Rotation, ...]
    masks: tuple[Tensor, ...]  # bool [B, S, keys], True = may see
    state: Tensor | None = None


class ExpertModel(Model):
    """Vision tower, connector, language model, and an expert whose layers read the language model's.

    The connector is called by :meth:`connect` on the tower's features alone, which lets an engine write patches of
    raw frames into the tower itself.
    """

    float32_modules: ClassVar[tuple[str, ...]] = (
        "state_proj",
        "action_in_proj",
        "action_out_proj",
        "action_time_mlp_in",
        "action_time_mlp_out",
    )
    components: ClassVar[Mapping[str, str]] = {**Model.components, "lm_head": "language"}
    times_per_row = True
    vision: VisionTransformer
    language: Decoder
    expert: Any  # layers: Sequence of decoder layers; norm; dtype
    state_proj: Linear
    lm_head: Linear  # where it is the bundle's own
    action_in_proj: Linear
    action_out_proj: Linear
    action_time_mlp_in: Linear
    action_time_mlp_out: Linear

    def fold_sites(self) -> list[FoldSite]:
        found = [FoldSite(self.vision, "norm", (self.get_submodule("connector"),))]
        if isinstance(self.expert.norm, RMSNorm):  # an adaptive norm has no weight to fold
            found.append(FoldSite(self.expert, "norm", (self.action_out_proj,)))
        return found

    def cache(self, context: ExpertContext) -> Any:
        return context.kv

    def embed_images(self, pixels: Tensor) -> Tensor:
        B, V, _, height, width = pixels.shape
        features = self.vision(pixels.flatten(0, 1))  # [B * V, patches, C]
        return self.connect(features, *self.grid_of(height, width)).unflatten(0, (B, V))

    @abstractmethod
    def connect(self, features: Tensor, rows: int, cols: int) -> Tensor:
        """Turn the vision tower's features [N, rows * cols, C] -> image tokens [N, tokens, C'], unscaled."""

    @abstractmethod
    def embed_text(self, tokens: Tensor) -> Tensor:
        """Return the rows of tokens, int64 [B, L] -> [B, L, C], as the language model reads them."""

    @abstractmethod
    def embed_prefix(
        self, image_tokens: Tensor, camera_mask: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Embed the prefix. Arguments as in :meth:`read`.

        Returns:
            Embeddings [B, P, C], valid and opens_block, bool [B, P]. A row that opens a block comes after the
                instruction, which does not attend to it.
        """

    def prefix_mask(self, valid: Tensor, opens_block: Tensor) -> Tensor:
        """Return the attention mask of the prefix, bool [B, P, P]. Arguments of :meth:`embed_prefix`."""
        return block_mask(valid, opens_block)

    @abstractmethod
    def prefix_of(self, cache: Sequence[KeyValue], valid: Tensor, state: Tensor) -> Prefix:
        """Return the part of the language model's keys and values that the expert reads. valid: bool [B, P]."""

    def prefix(
        self, image_tokens: Tensor, camera_mask: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor
    ) -> Prefix:
        """Run the language model over the observation. Arguments as in :meth:`read`."""
        x, valid, opens_block = self.embed_prefix(image_tokens, camera_mask, tokens, token_mask, state)
        positions = valid.long().cumsum(dim=1) - 1
        _, cache = self.language(x, positions, self.prefix_mask(valid, opens_block))
        return self.prefix_of(cache, valid, state)

    @abstractmethod
    def context(self, prefix: Prefix) -> ExpertContext:
        """Add what a step takes from the prefix's length and mask alone: rotations and masks."""

    def read(
        self, image_tokens: Tensor, camera_mask: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor
    ) -> ExpertContext:
        return self.context(self.prefix(image_tokens, camera_mask, tokens, token_mask, state))

    @property
    def has_lm_head(self) -> bool:
        return bool(self.config.lm_head)

    def read_text(
        self,
        image_tokens: Tensor,
        camera_mask: Tensor,
        tokens: Tensor,
        token_mask: Tensor,
        state: Tensor,
        text: Tensor,
    ) -> tuple[ExpertContext, Tensor]:
        """Run the language model once over the observation and the text behind it (Ma et al. 2025, section 6: a
        special attention matrix). The text goes on at the position behind the instruction, and is causal."""
        x, valid, opens_block = self.embed_prefix(image_tokens, camera_mask, tokens, token_mask, state)
        (B, P), N = valid.shape, text.shape[1]
        positions = valid.long().cumsum(dim=1) - 1
        instruction, last = _instruction(valid, opens_block)
        start = instruction.sum(dim=1)  # [B]
        steps = torch.arange(N, device=x.device)
        sees = torch.zeros(B, P + N, P + N, dtype=torch.bool, device=x.device)  # [query, key]
        sees[:, :P, :P] = block_mask(valid, opens_block)
        sees[:, P:, :P] = instruction[:, None]
        sees[:, P:, P:] = steps[:, None] >= steps
        x = torch.cat([x, self.embed_text(text).to(x.dtype)], dim=1)
        h, cache = self.language(x, torch.cat([positions, start[:, None] + steps], dim=1), sees)
        row = h[:, -1] if N else h[torch.arange(B, device=h.device), last]  # [B, C]
        context = self.context(self.prefix_of([(k[:, :P], v[:, :P]) for k, v in cache], valid, state))
        return context, self.logits(row)

    def begin_text(
        self, image_tokens: Tensor, camera_mask: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor
    ) -> TextState:
        x, valid, opens_block = self.embed_prefix(image_tokens, camera_mask, tokens, token_mask, state)
        instruction, last = _instruction(valid, opens_block)
        positions = valid.long().cumsum(dim=1) - 1
        h, cache = self.language(x, positions, self.prefix_mask(valid, opens_block))
        row = h[torch.arange(len(h), device=h.device), last]  # [B, C]
        return TextState(tuple(cache), valid, instruction, instruction.sum(dim=1), row, state)

    def continue_text(self, said: TextState, tokens: Tensor) -> TextState:
        """The text is causal, and sees the views and the instruction, which do not see it: the mask of PaliGemma's
        answers (Beyer et al. 2024, arXiv 2407.07726, section 3)."""
        B, N = tokens.shape
        steps = torch.arange(N, device=tokens.device)
        own = (steps[:, None] >= steps).expand(B, N, N)
        sees = torch.cat([said.sees[:, None].expand(B, N, -1), own], dim=2)  # [B, N, P + N]
        positions = said.position[:, None] + steps
        h, cache = self.language.extend(self.embed_text(tokens), positions, sees, said.kv)
        here = said.valid.new_ones(B, N)
        valid, seen = (torch.cat([rows, here], dim=1) for rows in (said.valid, said.sees))
        return TextState(cache, valid, seen, said.position + N, h[:, -1], said.state)

    def context_of(self, said: TextState) -> ExpertContext:
        return self.context(self.prefix_of(said.kv, said.valid, said.state))

    def logits(self, h: Tensor) -> Tensor:
        """Return the score of each token, [B, vocabulary], of the language model's last hidden state [B, C]."""
        h = self.language.norm(h)
        return self.language.embed_tokens.logits(h) if self.config.lm_head == "tied" else self.lm_head(h)

    def velocity(self, x: Tensor, t: Tensor, prefix: Prefix) -> Tensor:
        """x: float32 [B, H, A]; t: [B] or [B, H] -> float32 [B, H, A]: one step, for training and tests."""
        return self.act(x, self.embed_time(t), self.context(prefix))

    def state_token(self, state: Tensor) -> Tensor | None:  # [B, S] -> [B, 1, C]
        """Return the state as a token of the expert, where the expert reads it."""
        return self.state_proj(state)[:, None]

    def renew(self, context: ExpertContext, state: Tensor) -> ExpertContext:
        return context._replace(state=self.state_token(state)) if self.head_reads_state else context

    def embed_actions(self, x: Tensor, time_embedding: Tensor) -> Tensor:
        """Noisy actions [B, H, A] and embedded time [B, C] or [B, H, C] -> expert tokens [B, H, C]."""
        actions = self.action_in_proj(x)  # [B, H, C]
        both = torch.cat([actions, per_row(time_embedding.to(actions.dtype)).expand_as(actions)], dim=-1)
        return self.action_time_mlp_out(F.silu(self.action_time_mlp_in(both)))

    def decode_actions(self, h: Tensor, *modulation: Modulation) -> Tensor:
        """Return the velocity [B, H, A] of the actions' last hidden states in the expert, [B, H, C]."""
        return self.action_out_proj(self.expert.norm(h, *modulation).float())


def _instruction(valid: Tensor, opens_block: Tensor) -> tuple[Tensor, Tensor]:
    """Return which rows of a prefix are views and instruction, bool [B, P], and the last of them, int64 [B], from
    which the first token of a text is computed.

    valid, opens_block: bool [B, P].
    """
    found = valid & ~opens_block.long().cumsum(dim=1).bool()
    positions = valid.long().cumsum(dim=1)  # from 1 on
    return found, (found & (positions == found.sum(dim=1)[:, None])).long().argmax(dim=1)


def per_row(time_embedding: Tensor) -> Tensor:
    """Return the time embedding of every row, [B, H, C], or the one of all, [B, 1, C], of [B, H, C] or [B, C]."""
    return time_embedding if time_embedding.ndim == 3 else time_embedding[:, None]
