"""The action expert of SmolVLA and pi, which reads the keys and values of a language model's prefix."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sinew.layers.decoder import KeyValue
from sinew.layers.joints import Joint
from sinew.layers.linear import Linear
from sinew.layers.norm import Modulation, RMSNorm
from sinew.layers.rope import Rotation
from sinew.layers.sizes import check_sizes
from sinew.layers.vit import VisionTransformer
from sinew.models.base import Model


@dataclass(frozen=True)
class FlowConfig:
    """The fields that the configurations of these models share. Sizes in tokens and dimensions."""

    vocab_size: int
    chunk_size: int
    max_state_dim: int
    max_action_dim: int
    min_period: float  # of the time embedding
    max_period: float

    def __post_init__(self) -> None:
        check_sizes(self)
        if not 0 < self.min_period < self.max_period < float("inf"):
            raise ValueError(f"periods {self.min_period} to {self.max_period} are not a range")


class Prefix(NamedTuple):
    """The part of an observation that the expert reads.

    kv:    per expert layer, keys and values [B, P, Hkv, D] in the form in which that layer reads them.
    valid: bool [B, P], False where the prefix is padding.
    length: int64 [B], number of valid prefix tokens: the position of the first token after it.
    state: float32 [B, 1, C], the state's token, for experts that read it beside their actions (pi0; SmolVLA with
           ``state_in_head``).
    """

    kv: tuple[KeyValue, ...]
    valid: Tensor
    length: Tensor
    state: Tensor | None = None


class Context(NamedTuple):
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
    times_per_row = True
    vision: VisionTransformer
    expert: Any  # layers: Sequence of decoder layers; norm; dtype
    state_proj: Linear
    action_in_proj: Linear
    action_out_proj: Linear
    action_time_mlp_in: Linear
    action_time_mlp_out: Linear

    def joints(self) -> list[Joint]:
        found = [Joint(self.vision, "norm", (self.get_submodule("connector"),))]
        if isinstance(self.expert.norm, RMSNorm):  # an adaptive norm has no weight to fold
            found.append(Joint(self.expert, "norm", (self.action_out_proj,)))
        return found

    def cache(self, context: Context) -> Any:
        return context.kv

    def embed_images(self, pixels: Tensor) -> Tensor:
        B, V, _, height, width = pixels.shape
        patch = self.config.vision.patch_size
        features = self.vision(pixels.flatten(0, 1))  # [B * V, patches, C]
        return self.connect(features, height // patch, width // patch).unflatten(0, (B, V))

    @abstractmethod
    def connect(self, features: Tensor, rows: int, cols: int) -> Tensor:
        """Turn the vision tower's features [N, rows * cols, C] -> image tokens [N, tokens, C'], unscaled."""

    @abstractmethod
    def prefix(
        self, image_tokens: Tensor, camera_mask: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor
    ) -> Prefix:
        """Run the language model over the observation. Arguments as in :meth:`read`."""

    @abstractmethod
    def context(self, prefix: Prefix) -> Context:
        """Add what a step takes from the prefix's length and mask alone: rotations and masks."""

    def read(
        self, image_tokens: Tensor, camera_mask: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor
    ) -> Context:
        return self.context(self.prefix(image_tokens, camera_mask, tokens, token_mask, state))

    def velocity(self, x: Tensor, t: Tensor, prefix: Prefix) -> Tensor:
        """x: float32 [B, H, A]; t: [B] or [B, H] -> float32 [B, H, A]: one step, for training and tests."""
        return self.act(x, self.moment(t), self.context(prefix))

    def state_token(self, state: Tensor) -> Tensor | None:  # [B, S] -> [B, 1, C]
        """Return the state as a token of the expert, where the expert reads it."""
        return self.state_proj(state)[:, None]

    def renew(self, context: Context, state: Tensor) -> Context:
        return context._replace(state=self.state_token(state)) if self.head_reads_state else context

    def embed_actions(self, x: Tensor, moment: Tensor) -> Tensor:
        """Noisy actions [B, H, A] and embedded time [B, C] or [B, H, C] -> expert tokens [B, H, C]."""
        actions = self.action_in_proj(x)  # [B, H, C]
        both = torch.cat([actions, per_row(moment.to(actions.dtype)).expand_as(actions)], dim=-1)
        return self.action_time_mlp_out(F.silu(self.action_time_mlp_in(both)))

    def decode_actions(self, h: Tensor, *modulation: Modulation) -> Tensor:
        """Return the velocity [B, H, A] of the actions' last hidden states in the expert, [B, H, C]."""
        return self.action_out_proj(self.expert.norm(h, *modulation).float())


def per_row(moment: Tensor) -> Tensor:
    """Return the moment of every row, [B, H, C], or the one of all, [B, 1, C], of [B, H, C] or [B, C]."""
    return moment if moment.ndim == 3 else moment[:, None]
