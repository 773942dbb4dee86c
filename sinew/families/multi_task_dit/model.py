"""The multi-task diffusion transformer, as LeRobot computes it: a transformer that denoises a chunk of actions.

CLIP's vision tower gives one feature per frame, and CLIP's text encoder gives one feature for the prompt. The condition
contains, for each observation step from the oldest on, the robot's state, the feature of each camera, and the text
feature. Each block scales and shifts its norms and gates its branches by a linear map of the condition and of the
solver's time (adaLN, Peebles and Xie 2023). The map of the condition is computed once per observation. The solver is
that of Diffusion Policy, or flow matching.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinew.families.multi_task_dit.vision import ClipVision, ClipVisionConfig
from sinew.layers.clip_text import ClipText, ClipTextConfig
from sinew.layers.dit import GeluMLP, modulated
from sinew.layers.linear import Embedding, Linear
from sinew.layers.rope import Rotation
from sinew.layers.sizes import check_sizes
from sinew.layers.time_embedding import level_sinusoids
from sinew.layers.vit import BlockConfig, ViTAttention
from sinew.models.base import Model
from sinew.models.solvers import NoiseLevels, Solver

NORM_EPS = 1e-6
# Number of vectors that modulate a block: shift, scale and gate of the attention, then of the MLP.
PARTS = 6


@dataclass(frozen=True)
class MultiTaskDiTConfig:
    """Sizes of the multi-task diffusion transformer.

    Attributes:
        vision: Sizes of CLIP's vision tower.
        language: Sizes of CLIP's text encoder.
        head: Sizes of the transformer over the chunk. The inner width of its MLP is four times its width.
        cameras: Number of cameras.
        encoders: Number of vision towers: 1 for all cameras, or one per camera.
        history: Number of observation steps.
        time_size: Width of the time embedding.
        chunk_size: Number of actions that the solver computes.
        max_state_dim: Number of values in the states of all observation steps together.
        max_action_dim: Size of an action.
        rope_theta: Base of the rotary positions. 0 if there are no rotary positions.
        places: True if learned position embeddings are added to the action tokens.
    """

    vision: ClipVisionConfig
    language: ClipTextConfig
    head: BlockConfig
    cameras: int
    encoders: int
    history: int
    time_size: int
    chunk_size: int
    max_state_dim: int
    max_action_dim: int
    rope_theta: float = 0.0
    places: bool = False

    def __post_init__(self) -> None:
        check_sizes(self)
        if self.encoders not in (1, self.cameras):
            raise ValueError(
                f"encoders: expected 1 or {self.cameras}, one for each camera, got {self.encoders}"
            )
        if self.max_state_dim % self.history:
            raise ValueError(
                f"max_state_dim: expected a multiple of {self.history}, the number of observation steps, got"
                f" {self.max_state_dim}"
            )
        if self.time_size < 4 or self.time_size % 2:
            raise ValueError(f"time_size: expected an even number of at least 4, got {self.time_size}")
        if self.rope_theta < 0 or (self.rope_theta and self.head.hidden_size // self.head.num_heads % 2):
            raise ValueError(
                "rope_theta: expected 0, or a number above 0 together with an even number of channels per head, got"
                f" {self.rope_theta}"
            )
        if self.head.intermediate_size != 4 * self.head.hidden_size:
            raise ValueError(
                f"head.intermediate_size: expected {4 * self.head.hidden_size}, got {self.head.intermediate_size}"
            )

    @property
    def condition_size(self) -> int:
        """Return the number of values in the condition (states, camera features and text features of all observation
        steps).
        """
        features = self.cameras * self.vision.hidden_size + self.language.out_size
        return self.max_state_dim + self.history * features

    @property
    def modulation_size(self) -> int:
        """Return the number of scales, shifts and gates of all blocks together."""
        return self.head.num_layers * PARTS * self.head.hidden_size


class MultiTaskContext(NamedTuple):
    """The results of an observation that all solver steps read.

    Attributes:
        modulation: The part of all scales, shifts and gates that follows from the condition, float32 [B,
            modulation_size].
        rotation: Cosines and sines of the rotary positions. Empty without rotary positions.
    """

    modulation: Tensor
    rotation: tuple[Tensor, ...]


class ModulatedBlock(nn.Module):
    """A transformer block whose norms are scaled and shifted, and whose attention and MLP are multiplied by a gate."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.attn = ViTAttention(config.block(NORM_EPS, "gelu_tanh"))
        self.mlp = GeluMLP(config.hidden_size)

    def forward(self, x: Tensor, modulation: Tensor, rotate: Rotation | None) -> Tensor:
        """Run the block.

        Args:
            x: Input, [B, H, C].
            modulation: Shift, scale and gate of the attention, then of the MLP, [B, 6, C].
            rotate: Rotary positions; None without them.

        Returns:
            Output, [B, H, C].
        """
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = modulation.unbind(dim=1)
        turn = () if rotate is None else (rotate,)
        attended = self.attn(modulated(x, scale, shift, NORM_EPS), *turn)
        x = x + (gate[:, None] * attended).to(x.dtype)
        return x + (mlp_gate[:, None] * self.mlp(modulated(x, mlp_scale, mlp_shift, NORM_EPS))).to(x.dtype)


class MultiTaskDiT(Model):
    """The multi-task diffusion transformer: CLIP encoders, and a transformer that is conditioned on their features."""

    config_type = MultiTaskDiTConfig
    config: MultiTaskDiTConfig
    solver = Solver("diffusion", levels=NoiseLevels(100))
    vision: Sequence[ClipVision]
    layers: Sequence[ModulatedBlock]

    def __init__(self, config: MultiTaskDiTConfig):
        super().__init__()
        self.config = config
        size, time = config.head.hidden_size, config.time_size
        self.vision = nn.ModuleList(ClipVision(config.vision) for _ in range(config.encoders))  # type: ignore[assignment]
        self.language = ClipText(config.language)
        self.time_in = Linear(time, 2 * time)
        self.time_out = Linear(2 * time, time)
        self.time_modulation = Linear(time, config.modulation_size, bias=False)
        self.modulation = Linear(config.condition_size, config.modulation_size)
        self.action_in = Linear(config.max_action_dim, size)
        self.places = Embedding(config.chunk_size, size) if config.places else None
        self.layers = nn.ModuleList(  # type: ignore[assignment]
            ModulatedBlock(config.head) for _ in range(config.head.num_layers)
        )
        self.action_out = Linear(size, config.max_action_dim)

    @property
    def views(self) -> int:
        return self.config.history * self.config.cameras

    @property
    def grid(self) -> tuple[int, int]:
        vision = self.config.vision
        return vision.grid(vision.image_size, vision.image_size)

    def embed_images(self, pixels: Tensor) -> Tensor:  # shapes: [B, T * V, 3, h, w] -> [B, T * V, 1, C]
        if len(self.vision) == 1:
            return self.vision[0](pixels.flatten(0, 1)).unflatten(0, pixels.shape[:2])[:, :, None]
        moments = pixels.unflatten(1, (-1, self.config.cameras))  # [B, T, V, 3, h, w]
        features = [
            tower(moments[:, :, camera].flatten(0, 1)).unflatten(0, moments.shape[:2])
            for camera, tower in enumerate(self.vision)
        ]
        return torch.stack(features, dim=2).flatten(1, 2)[:, :, None]

    def condition(self, image_tokens: Tensor, text: Tensor, state: Tensor) -> Tensor:
        """Build the condition, one observation step after the other.

        Args:
            image_tokens: [B, T * V, 1, C].
            text: [B, C'].
            state: [B, T * S].

        Returns:
            Output, [B, condition_size].
        """
        steps = state.unflatten(1, (self.config.history, -1))  # [B, T, S]
        views = (
            image_tokens.flatten(1).unflatten(1, (self.config.history, -1)).to(steps.dtype)
        )  # [B, T, V * C]
        repeated_text = text.to(steps.dtype)[:, None].expand(-1, steps.shape[1], -1)
        return torch.cat([steps, views, repeated_text], dim=-1).flatten(1)

    def read(
        self, image_tokens: Tensor, camera_mask: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor
    ) -> MultiTaskContext:
        condition = self.condition(image_tokens, self.language(tokens, token_mask), state)
        modulation = self.modulation(F.silu(condition)).float()
        if not self.config.rope_theta:
            return MultiTaskContext(modulation, ())
        config = self.config.head
        rows = torch.ones_like(state[:, :1], dtype=torch.long).expand(-1, self.config.chunk_size)
        places = rows.cumsum(dim=1) - 1
        head_dim = config.hidden_size // config.num_heads
        return MultiTaskContext(modulation, tuple(Rotation.at(places, head_dim, self.config.rope_theta)))

    def embed_time(self, t: Tensor) -> Tensor:
        time = self.time_out(F.gelu(self.time_in(level_sinusoids(t, self.config.time_size))))
        return self.time_modulation(F.silu(F.gelu(time))).float()

    def act(self, x: Tensor, time_embedding: Tensor, context: MultiTaskContext) -> Tensor:
        h = self.action_in(x)
        if self.places is not None:
            h = h + self.places.weight
        shape = (self.config.head.num_layers, PARTS, -1)
        modulations = (context.modulation + time_embedding).unflatten(1, shape)  # [B, layers, 6, C]
        rotate = Rotation(*context.rotation) if context.rotation else None
        for layer, modulation in zip(self.layers, modulations.unbind(dim=1), strict=True):
            h = layer(h, modulation, rotate)
        return self.action_out(h).float()
