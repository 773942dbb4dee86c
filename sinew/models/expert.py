"""The action expert of SmolVLA and pi: a small transformer that reads the keys and values of a language model."""

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
"""Storage of the language model's head in a bundle.

"" means no head, "own" a separate matrix, and "tied" the token table as the head.
"""


@dataclass(frozen=True)
class FlowConfig:
    """Fields that the configurations of all models with an action expert share. Sizes are in tokens and
    dimensions.

    Attributes:
        vocab_size: Rows of the token table (the embedding of the vocabulary).
        chunk_size: Actions in a chunk.
        max_state_dim: Width of the padded state.
        max_action_dim: Width of a padded action.
        min_period: Shortest period of the time embedding.
        max_period: Longest period of the time embedding.
    """

    vocab_size: int
    chunk_size: int
    max_state_dim: int
    max_action_dim: int
    min_period: float
    max_period: float

    def __post_init__(self) -> None:
        check_sizes(self)
        if not 0 < self.min_period < self.max_period < float("inf"):
            raise ValueError(
                f"min_period, max_period: expected 0 < min_period < max_period, got {self.min_period} and"
                f" {self.max_period}"
            )


class Prefix(NamedTuple):
    """The results of the language model for an observation (image tokens, prompt and state) that the expert
    reads.

    Attributes:
        kv: Keys and values of each expert layer, [B, P, Hkv, D], in the form that the layer reads.
        valid: bool [B, P], False for padding.
        length: int64 [B], number of valid prefix tokens, which is also the position of the first token after
            the prefix.
        state: float32 [B, 1, C], the state's token, for experts that read the state next to the actions (pi0,
            and SmolVLA with ``state_in_head``). None for the other experts.
    """

    kv: tuple[KeyValue, ...]
    valid: Tensor
    length: Tensor
    state: Tensor | None = None


class ExpertContext(NamedTuple):
    """The inputs that are the same in all solver steps: the keys and values of the observation, and the
    positions and masks of the expert's own tokens.

    Attributes:
        kv: Keys and values of each expert layer, [B, P, Hkv, D].
        rotations: Rotary positions of the expert's tokens.
        masks: bool [B, S, keys], True if the token may attend to the key.
        state: float32 [B, 1, C], or None if the expert does not read the state.
    """

    kv: tuple[KeyValue, ...]
    rotations: tuple[Rotation, ...]
    masks: tuple[Tensor, ...]
    state: Tensor | None = None


class ExpertModel(Model):
    """A model with a vision tower, a connector, a language model, and an action expert.

    The expert's layers read the keys and values of the language model.

    :meth:`connect` runs the connector alone, on features of the vision tower. An engine can therefore compute
    the tower itself, for example with patches that it cuts from the raw frames.
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
    expert: Any  # has ``layers``, ``norm`` and ``dtype``
    state_proj: Linear
    lm_head: Linear  # exists only if config.lm_head is "own"
    action_in_proj: Linear
    action_out_proj: Linear
    action_time_mlp_in: Linear
    action_time_mlp_out: Linear

    def fold_sites(self) -> list[FoldSite]:
        sites = [FoldSite(self.vision, "norm", (self.get_submodule("connector"),))]
        # An adaptive norm has no weight that could be multiplied into the next layer.
        if isinstance(self.expert.norm, RMSNorm):
            sites.append(FoldSite(self.expert, "norm", (self.action_out_proj,)))
        return sites

    def cache(self, context: ExpertContext) -> Any:
        return context.kv

    def embed_images(self, pixels: Tensor) -> Tensor:
        B, V, _, height, width = pixels.shape
        features = self.vision(pixels.flatten(0, 1))  # [B * V, patches, C]
        return self.connect(features, *self.grid_of(height, width)).unflatten(0, (B, V))

    @abstractmethod
    def connect(self, features: Tensor, rows: int, cols: int) -> Tensor:
        """Convert the vision tower's features to image tokens, before the language model's scale factor is applied.

        Args:
            features: [N, rows * cols, C].
            rows: Rows of patches.
            cols: Columns of patches.

        Returns:
            [N, tokens, C'].
        """

    @abstractmethod
    def embed_text(self, tokens: Tensor) -> Tensor:
        """Return the embeddings [B, L, C] of tokens, int64 [B, L], as the language model reads them."""

    @abstractmethod
    def embed_prefix(
        self, image_tokens: Tensor, camera_mask: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Embed the prefix, which consists of image tokens, prompt and state. The arguments are those of
        :meth:`read`.

        Returns:
            Embeddings [B, P, C], and ``valid`` and ``opens_block``, bool [B, P]. A token with ``opens_block``
            comes after the instruction, and the instruction does not attend to this token.
        """

    def prefix_mask(self, valid: Tensor, opens_block: Tensor) -> Tensor:
        """Return the attention mask of the prefix, bool [B, P, P], from two results of :meth:`embed_prefix`."""
        return block_mask(valid, opens_block)

    @abstractmethod
    def prefix_of(self, cache: Sequence[KeyValue], valid: Tensor, state: Tensor) -> Prefix:
        """Select the keys and values of the language model that the expert reads.

        Args:
            cache: Keys and values of each layer of the language model.
            valid: bool [B, P], False for padding.
            state: float32 [B, S], normalised and padded.
        """

    def prefix(
        self, image_tokens: Tensor, camera_mask: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor
    ) -> Prefix:
        """Run the language model over the observation. The arguments are those of :meth:`read`.

        Returns:
            The keys, values and masks that the expert reads.
        """
        x, valid, opens_block = self.embed_prefix(image_tokens, camera_mask, tokens, token_mask, state)
        positions = valid.long().cumsum(dim=1) - 1
        _, cache = self.language(x, positions, self.prefix_mask(valid, opens_block))
        return self.prefix_of(cache, valid, state)

    @abstractmethod
    def context(self, prefix: Prefix) -> ExpertContext:
        """Compute the inputs that all solver steps share: the prefix (results of the language model), and the
        rotary positions and masks of the expert's tokens.
        """

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
        """Run the language model once over the observation and the text that follows it.

        The first token of the text has the position after the instruction, and the text is causal. Source: Ma
        et al. 2025, section 6, "special attention matrix".

        Args:
            image_tokens, camera_mask, tokens, token_mask, state: As for :meth:`read`.
            text: int64 [B, N], the tokens generated so far.

        Returns:
            The inputs of the solver steps, and the logits [B, vocabulary] of the token after ``text``.
        """
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

    def continue_text(self, text: TextState, tokens: Tensor) -> TextState:
        """Append tokens to the generated text, and compute their keys and values.

        The text is causal and attends to the views and the instruction, which do not attend to the text. PaliGemma
        uses the same mask for its answers (Beyer et al. 2024, arXiv 2407.07726, section 3).
        """
        B, N = tokens.shape
        steps = torch.arange(N, device=tokens.device)
        own = (steps[:, None] >= steps).expand(B, N, N)
        sees = torch.cat([text.sees[:, None].expand(B, N, -1), own], dim=2)  # [B, N, P + N]
        positions = text.position[:, None] + steps
        h, cache = self.language.extend(self.embed_text(tokens), positions, sees, text.kv)
        here = text.valid.new_ones(B, N)
        valid, seen = (torch.cat([rows, here], dim=1) for rows in (text.valid, text.sees))
        return TextState(cache, valid, seen, text.position + N, h[:, -1], text.state)

    def context_of(self, text: TextState) -> ExpertContext:
        return self.context(self.prefix_of(text.kv, text.valid, text.state))

    def logits(self, h: Tensor) -> Tensor:
        """Return the score of each token, [B, vocabulary], from the last hidden state [B, C] of the language model."""
        h = self.language.norm(h)
        return self.language.embed_tokens.logits(h) if self.config.lm_head == "tied" else self.lm_head(h)

    def velocity(self, x: Tensor, t: Tensor, prefix: Prefix) -> Tensor:
        """Compute the velocity of one solver step directly, for training and tests.

        Args:
            x: float32 [B, H, A], the noisy chunk.
            t: [B] or [B, H], the solver's time.
            prefix: Result of :meth:`prefix`.

        Returns:
            The velocity, float32 [B, H, A].
        """
        return self.act(x, self.embed_time(t), self.context(prefix))

    def state_token(self, state: Tensor) -> Tensor | None:  # [B, S] -> [B, 1, C]
        """Return the state as an input token of the expert.

        Subclasses return None if their expert does not read the state.
        """
        return self.state_proj(state)[:, None]

    def renew(self, context: ExpertContext, state: Tensor) -> ExpertContext:
        return context._replace(state=self.state_token(state)) if self.head_reads_state else context

    def embed_actions(self, x: Tensor, time_embedding: Tensor) -> Tensor:
        """Return expert tokens [B, H, C] for noisy actions [B, H, A] and embedded time [B, C] or [B, H, C]."""
        actions = self.action_in_proj(x)  # [B, H, C]
        both = torch.cat([actions, per_row(time_embedding.to(actions.dtype)).expand_as(actions)], dim=-1)
        return self.action_time_mlp_out(F.silu(self.action_time_mlp_in(both)))

    def decode_actions(self, h: Tensor, *modulation: Modulation) -> Tensor:
        """Return the velocity [B, H, A] from the expert's last hidden states of the actions, [B, H, C]."""
        return self.action_out_proj(self.expert.norm(h, *modulation).float())


def _instruction(valid: Tensor, opens_block: Tensor) -> tuple[Tensor, Tensor]:
    """Find the views and the instruction in a prefix.

    Args:
        valid: bool [B, P], False for padding.
        opens_block: bool [B, P], True for the first token of each attention block after the instruction.

    Returns:
        A mask of the views and the instruction, bool [B, P], and the index of their last token, int64 [B]. The first
        token of a text is computed from this last token.
    """
    instruction = valid & ~opens_block.long().cumsum(dim=1).bool()
    positions = valid.long().cumsum(dim=1)  # counts from 1
    return instruction, (instruction & (positions == instruction.sum(dim=1)[:, None])).long().argmax(dim=1)


def per_row(time_embedding: Tensor) -> Tensor:
    """Return the time embedding with an axis for the actions: [B, H, C], or [B, 1, C] if all actions have the
    same time.

    Args:
        time_embedding: [B, H, C] or [B, C].
    """
    return time_embedding if time_embedding.ndim == 3 else time_embedding[:, None]
