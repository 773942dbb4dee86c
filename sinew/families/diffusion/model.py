"""Diffusion Policy (Chi et al. 2023, arXiv 2303.04137), as LeRobot computes it: a U-Net that denoises a chunk of
actions.

A ResNet and a spatial softmax convert each view to the positions of some keypoints. The condition of the U-Net
contains, for each observation step from the oldest on, the robot's state, the keypoints of each camera, and the
environment's state if there is one. Each block of the U-Net reads a linear map of the condition and of the solver's
time. The part of the map that reads the condition is computed once per observation. The policy does not read prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinew.families.diffusion.unet import UNet, UNetConfig
from sinew.layers.keypoints import KeypointEncoder
from sinew.layers.linear import Linear
from sinew.layers.resnet import ResNetConfig
from sinew.layers.sizes import check_sizes
from sinew.layers.time_embedding import level_sinusoids
from sinew.models.base import Model
from sinew.models.solvers import NoiseLevels, Solver


@dataclass(frozen=True)
class DiffusionConfig:
    """Sizes of Diffusion Policy.

    Attributes:
        vision: Sizes of the ResNet.
        unet: Sizes of the U-Net.
        cameras: Number of cameras.
        encoders: Number of ResNets: 1 for all cameras, or one per camera.
        history: Number of observation steps.
        rows: Number of rows of the feature map of a camera view.
        cols: Number of columns of the feature map of a camera view.
        keypoints: Number of keypoints per view.
        time_size: Width of the time embedding.
        chunk_size: Number of actions that the solver computes.
        max_state_dim: Number of values in the states of all observation steps together.
        max_action_dim: Size of an action.
        environment_dim: Number of values at the end of each state that describe the environment.
    """

    vision: ResNetConfig
    unet: UNetConfig
    cameras: int
    encoders: int
    history: int
    rows: int
    cols: int
    keypoints: int
    time_size: int
    chunk_size: int
    max_state_dim: int
    max_action_dim: int
    environment_dim: int = 0

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
        if not 0 <= self.environment_dim < self.max_state_dim // self.history:
            raise ValueError(
                f"environment_dim: expected less than {self.max_state_dim // self.history}, the size of one state, got"
                f" {self.environment_dim}"
            )
        if self.time_size < 4 or self.time_size % 2:
            raise ValueError(f"time_size: expected an even number of at least 4, got {self.time_size}")
        if self.chunk_size % self.unet.unit:
            raise ValueError(f"chunk_size: expected a multiple of {self.unet.unit}, got {self.chunk_size}")

    @property
    def condition_size(self) -> int:
        """Number of values in the condition."""
        return self.max_state_dim + self.history * self.cameras * 2 * self.keypoints


class DiffusionContext(NamedTuple):
    """The part of the scales and shifts of all U-Net blocks that follows from the observation, and not from the
    solver's time.

    Attributes:
        film: The values of all blocks one after the other, [B, F].
    """

    film: Tensor


class DiffusionPolicy(Model):
    """Diffusion Policy: keypoint encoders and a conditional U-Net."""

    config_type = DiffusionConfig
    config: DiffusionConfig
    solver = Solver("diffusion", levels=NoiseLevels(100))
    vision: Sequence[KeypointEncoder]

    def __init__(self, config: DiffusionConfig):
        super().__init__()
        self.config = config
        size, blocks = config.time_size, sum(config.unet.film_sizes)
        self.vision = nn.ModuleList(  # type: ignore[assignment]
            KeypointEncoder(config.vision, config.keypoints, config.rows, config.cols)
            for _ in range(config.encoders)
        )
        self.time_in = Linear(size, 4 * size)
        self.time_out = Linear(4 * size, size)
        self.time_film = Linear(size, blocks, bias=False)
        self.film = Linear(config.condition_size, blocks)
        self.unet = UNet(config.max_action_dim, config.unet)

    @property
    def views(self) -> int:
        return self.config.history * self.config.cameras

    @property
    def views_alike(self) -> bool:
        return len(self.vision) == 1  # False if each camera has its own encoder

    @property
    def grid(self) -> tuple[int, int]:
        return self.config.rows, self.config.cols

    @property
    def min_tokens(self) -> int:
        return 1

    def embed_images(self, pixels: Tensor) -> Tensor:  # [B, T * V, 3, h, w] -> [B, T * V, 1, 2 * keypoints]
        if len(self.vision) == 1:
            return self.vision[0](pixels.flatten(0, 1)).unflatten(0, pixels.shape[:2])[:, :, None]
        moments = pixels.unflatten(1, (-1, self.config.cameras))  # [B, T, V, 3, h, w]
        features = [
            encoder(moments[:, :, camera].flatten(0, 1)).unflatten(0, moments.shape[:2])
            for camera, encoder in enumerate(self.vision)
        ]
        return torch.stack(features, dim=2).flatten(1, 2)[:, :, None]

    def condition(self, image_tokens: Tensor, state: Tensor) -> Tensor:
        """Build the condition, one observation step after the other.

        Args:
            image_tokens: [B, T * V, 1, C].
            state: [B, T * S].

        Returns:
            Output, [B, condition_size].
        """
        moments = state.unflatten(1, (self.config.history, -1))  # [B, T, S]
        own = moments.shape[2] - self.config.environment_dim
        views = image_tokens.flatten(1).unflatten(1, (self.config.history, -1))  # [B, T, V * C]
        return torch.cat([moments[..., :own], views, moments[..., own:]], dim=-1).flatten(1)

    def read(
        self, image_tokens: Tensor, camera_mask: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor
    ) -> DiffusionContext:
        return DiffusionContext(self.film(F.mish(self.condition(image_tokens, state))).float())

    def embed_time(self, t: Tensor) -> Tensor:
        time = self.time_out(F.mish(self.time_in(level_sinusoids(t, self.config.time_size))))  # [B, C]
        return self.time_film(F.mish(time)).float()

    def act(self, x: Tensor, time_embedding: Tensor, context: DiffusionContext) -> Tensor:
        return self.unet(x, context.film + time_embedding).float()
