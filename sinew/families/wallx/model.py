"""Wall-X (X Square Robot), as LeRobot computes it: the language model's own layers denoise the actions.

Qwen2.5-VL reads views, state and instruction once (:mod:`sinew.models.qwen25_vl`). In each solver step the same
layers run over one token per action of the chunk. Such a token attends to the views, the state, the instruction and
all actions. All tokens share the attention weights of a layer. The feed-forward part has two experts (separate MLPs):
one for prompt tokens, and one for action tokens. The expert for action tokens may read and write only the first
channels. Euler steps run from noise (t = 0) to actions (t = 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinew.layers.attention import key_mask
from sinew.layers.decoder import DecoderConfig, GatedMLP, decoder_norm
from sinew.layers.fold_sites import FoldSite
from sinew.layers.linear import Linear
from sinew.layers.time_embedding import level_sinusoids
from sinew.models.qwen25_vl import ChunkContext, Qwen25VL, Qwen25VLConfig
from sinew.models.solvers import Solver

SOLVER = Solver(start=0.0, end=1.0)


@dataclass(frozen=True)
class WallXConfig(Qwen25VLConfig):
    """Sizes of Wall-X. ``language`` has the sizes of the expert for prompt tokens.

    Attributes:
        expert_width: The expert for action tokens reads and writes only this many channels, the first ones.
        expert_intermediate_size: Inner width of the expert for action tokens.
    """

    expert_width: int
    expert_intermediate_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.expert_width > self.language.hidden_size:
            raise ValueError(
                f"expert_width: expected at most {self.language.hidden_size}, got {self.expert_width}"
            )
        if self.language.hidden_size % 2 or self.language.hidden_size < 4:
            raise ValueError(
                f"hidden_size: expected an even number of at least 4, got {self.language.hidden_size}"
            )


class ActionExpert(nn.Module):
    """The feed-forward part of a decoder layer for action tokens: x + mlp(norm(x)), over the first channels only.

    The norm is a copy of the layer's norm. So only one MLP reads the result of each norm, and an engine may merge the
    norm's scale into the weights of that MLP.
    """

    def __init__(self, config: DecoderConfig, width: int, intermediate_size: int):
        super().__init__()
        self.rest = config.hidden_size - width
        self.norm = decoder_norm(config)
        self.mlp = GatedMLP(replace(config, hidden_size=width, intermediate_size=intermediate_size))

    def fold_sites(self) -> list[FoldSite]:
        return [] if self.rest else [FoldSite(self, "norm", (self.mlp,))]

    def forward(self, x: Tensor) -> Tensor:  # [B, H, C]
        h = self.norm(x)
        if not self.rest:
            return x + self.mlp(h)
        return x + F.pad(self.mlp(h[..., : -self.rest]), (0, self.rest))


class WallX(Qwen25VL):
    """Wall-X: Qwen2.5-VL with a second feed-forward expert for action tokens."""

    config_type = WallXConfig
    config: WallXConfig
    solver = SOLVER
    float32_modules: ClassVar[tuple[str, ...]] = (
        "state_proj",
        "action_in",
        "action_mix",
        "time_mix",
        "action_time_out",
        "action_out",
    )
    experts: Sequence[ActionExpert]
    state_mask: Tensor
    action_mask: Tensor

    def __init__(self, config: WallXConfig):
        super().__init__(config)
        language = config.language
        size = language.hidden_size
        self.experts = nn.ModuleList(  # type: ignore[assignment]
            ActionExpert(language, config.expert_width, config.expert_intermediate_size)
            for _ in range(language.num_layers)
        )
        self.state_proj = Linear(2 * config.max_state_dim, size, bias=False)
        self.action_in = Linear(2 * config.max_action_dim, size, bias=False)
        self.action_mix = Linear(size, size, bias=False)
        self.time_mix = Linear(size, size, bias=False)
        self.action_time_out = Linear(size, size, bias=False)
        self.action_out = Linear(size, config.max_action_dim, bias=False)
        # A mask is 1 for values that the robot has, and 0 for the padding after them.
        self.register_buffer("state_mask", torch.zeros(config.max_state_dim))
        self.register_buffer("action_mask", torch.zeros(config.max_action_dim))

    def fold_sites(self) -> list[FoldSite]:
        return [FoldSite(self.language, "norm", (self.action_out,))]

    def state_row(self, state: Tensor) -> Tensor:
        # The reference rounds the state to the dtype of the hidden states, and computes the product in the dtype of the
        # weight.
        return self.state_proj(masked(state.to(self.language.embed_tokens.dtype), self.state_mask))

    def among(self, rows: Tensor) -> Tensor:
        return key_mask(rows, rows.shape[1])

    def embed_time(self, t: Tensor) -> Tensor:
        return self.time_mix(level_sinusoids(t, self.config.language.hidden_size))

    def embed_actions(self, x: Tensor, time_embedding: Tensor) -> Tensor:  # shapes: [B, H, A] -> [B, H, C]
        time = time_embedding if time_embedding.ndim == 3 else time_embedding[:, None]
        actions = self.action_in(masked(x, self.action_mask))
        return self.action_time_out(F.silu(self.action_mix(actions) + time))

    def act(self, x: Tensor, time_embedding: Tensor, context: ChunkContext) -> Tensor:
        h = self.embed_actions(x, time_embedding).to(self.language.embed_tokens.dtype)
        for layer, expert, kv in zip(self.decoder_layers, self.experts, context.kv, strict=True):
            q, k, v = layer.project(h, context.rotation)
            h = expert(h + layer.attn.output(layer.attn.attend(q, kv, context.mask, own=(k, v))))
        return self.action_out(self.language.norm(h)).float()


def masked(vector: Tensor, mask: Tensor) -> Tensor:
    """Append the mask of a padded vector to the vector: [..., D] and [D] -> [..., 2 D]."""
    return torch.cat([vector, mask.to(vector.dtype).expand_as(vector)], dim=-1)
