"""OmniVLA-edge (Hirose et al. 2025, arXiv 2509.19480): small vision towers and a transformer, for navigation.

* Each frame of the history is one token. Each kind of goal is one token too: a pose, two satellite pictures, a picture
  of the goal, and a text with the newest frame. The number of the goal (:data:`goals.GOALS`) defines which of the four
  goal tokens are read.
* A convolutional network reads the newest frame in a larger size. The text scales and shifts its features (FiLM: Perez
  et al. 2018).
* The output layers read the mean of the available tokens, and the goal's number. They return the steps of a path, which
  are summed up, and the heading at each step as cosine and sine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinew.families.omnivla.efficientnet import EfficientNet, EfficientNetConfig
from sinew.families.omnivla.goals import GOALS, POSE, check_goals, kinds
from sinew.layers.attention import key_mask
from sinew.layers.clip_text import NORM_EPS, ClipText, ClipTextConfig
from sinew.layers.linear import Linear
from sinew.layers.resnet import Conv
from sinew.layers.sizes import check_sizes
from sinew.layers.vit import BlockConfig, MaskedLayer
from sinew.models.base import Regression


@dataclass(frozen=True)
class FilmConfig:
    """Sizes of the FiLM network, which reads a camera frame and the text. The text scales and shifts its features.

    Attributes:
        channels: Channels of the features that the text changes.
        blocks: Number of FiLM blocks.
        widths: Channels of the convolutions after the FiLM blocks.
        rows: Number of rows, and number of columns, of the feature map that the text changes.
    """

    channels: int
    blocks: int
    widths: tuple[int, ...]
    rows: int

    def __post_init__(self) -> None:
        check_sizes(self)

    @property
    def out_size(self) -> int:
        """Number of features that the network returns per frame."""
        rows = self.rows
        for _ in self.widths:
            rows = -(-rows // 2)
        return self.widths[-1] * rows * rows


@dataclass(frozen=True)
class EdgeConfig:
    """Sizes of OmniVLA-edge.

    Attributes:
        vision: Sizes of the EfficientNet towers.
        goals: Numbers of the supported goals in the training project.
        history: Number of observation steps.
        side: Side of a frame in pixels.
        head: Sizes of the transformer blocks.
        reduced: Widths of the output layers after the transformer.
        chunk_size: Steps of a path.
        max_state_dim: Number of values in the states of all observation steps together. If there are several goals, the
            last value of each state is the goal's number.
        large_side: Side of the newest frame in pixels, for goals with text. 0 without text.
        film: Sizes of the FiLM network. None without text.
        language: Sizes of the text encoder. None without text.
        max_action_dim: Size of an action.
    """

    vision: EfficientNetConfig
    goals: tuple[int, ...]
    history: int
    side: int
    head: BlockConfig
    reduced: tuple[int, ...]
    chunk_size: int
    max_state_dim: int = 0
    large_side: int = 0
    film: FilmConfig | None = None
    language: ClipTextConfig | None = None
    max_action_dim: int = POSE

    def __post_init__(self) -> None:
        check_sizes(self)
        check_goals(self.goals)
        if self.max_action_dim != POSE:
            raise ValueError(f"max_action_dim: expected {POSE}, got {self.max_action_dim}")
        if self.max_state_dim != self.history * self.state_dim:
            raise ValueError(
                f"max_state_dim: expected {self.state_dim} values for each of {self.history} observation steps, got"
                f" {self.max_state_dim}"
            )
        text_fields = {
            "language" in self.kinds,
            self.film is not None,
            self.language is not None,
            self.large_side > 0,
        }
        if len(text_fields) > 1:
            raise ValueError(
                "film, language and large_side: expected all three for goals with text, and none of them otherwise"
            )

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of goals that the policy reads."""
        return kinds(self.goals)

    @property
    def cameras(self) -> tuple[str, ...]:
        """Return the names of the cameras, each of which has a frame at every observation step."""
        behind = {"image": ("goal",), "satellite": ("satellite", "satellite_goal")}
        return (
            "current",
            *(name for kind in ("image", "satellite") if kind in self.kinds for name in behind[kind]),
        )

    @property
    def state_dim(self) -> int:
        """Size of the state of one observation step: a pose, and the goal's number if there are several goals."""
        return POSE * ("pose" in self.kinds) + (len(self.goals) > 1)


class EdgeContext(NamedTuple):
    """The tokens of an observation that the transformer reads.

    Attributes:
        rows: [B, T + K, C], the tokens of frames and goals.
        there: bool [B, T + K], True for tokens of frames, and for tokens of the goal kinds that the requested goal
            uses.
        goal: float32 [B, 1], the goal's number.
    """

    rows: Tensor
    there: Tensor
    goal: Tensor


class ChannelScale(nn.Module):
    """A frozen batch norm, computed as a multiplication and an addition. It cannot be merged into the convolution,
    because an activation comes between them."""

    def __init__(self, channels: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels, 1, 1))
        self.bias = nn.Parameter(torch.zeros(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:  # [B, C, h, w]
        return x * self.weight + self.bias


class HalvingConv(nn.Module):
    """A convolution with stride 2, followed by an activation and a norm."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int = 3):
        super().__init__()
        self.conv = Conv(in_channels, out_channels, kernel, 2)
        self.norm = ChannelScale(out_channels)

    def forward(self, x: Tensor) -> Tensor:  # shapes: [B, C, h, w] -> [B, C', ceil(h / 2), ceil(w / 2)]
        return self.norm(F.relu(self.conv(x)))


class FilmBlock(nn.Module):
    """A residual block of convolutions. The text scales and shifts its features."""

    def __init__(self, channels: int):
        super().__init__()
        self.mix = Conv(channels + 2, channels, 1)
        self.conv = Conv(channels, channels, 3)

    def forward(self, x: Tensor, places: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        """Run the block.

        Args:
            x: [B, C, h, w].
            places: [2, h, w], positions of the map.
            scale: [B, C].
            shift: [B, C].
        """
        x = F.relu(self.mix(torch.cat([x, places.to(x.dtype).expand(x.shape[0], -1, -1, -1)], dim=1)))
        return x + F.relu(scale[..., None, None] * self.conv(x) + shift[..., None, None])


class WordFilm(nn.Module):
    """The FiLM network, which extracts features of a frame that depend on the text.

    Attributes:
        places: [2, rows, rows], column and row of each position of the map, from -1 to 1.
    """

    blocks: Sequence[FilmBlock]

    def __init__(self, config: FilmConfig, text_size: int):
        super().__init__()
        width = config.channels
        self.config = config
        self.begin = nn.Sequential(
            HalvingConv(3, width, 5), HalvingConv(width, width), HalvingConv(width, width)
        )
        self.film = Linear(text_size, 2 * config.blocks * width)
        self.register_buffer("places", torch.zeros(2, config.rows, config.rows))
        self.blocks = nn.ModuleList(FilmBlock(width) for _ in range(config.blocks))  # type: ignore[assignment]
        self.end = nn.Sequential(*(HalvingConv(*widths) for widths in pairwise((width, *config.widths))))

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        """Run the FiLM blocks and the last convolutions.

        Args:
            x: [B, channels, rows, rows], result of ``begin``.
            text: [B, text_size].

        Returns:
            Output, [B, out_size].
        """
        places: Tensor = self.places  # type: ignore[assignment]
        changes = self.film(text).unflatten(1, (self.config.blocks, 2, self.config.channels))
        for index, block in enumerate(self.blocks):
            x = block(x, places, changes[:, index, 0], changes[:, index, 1])
        return self.end(x).flatten(1)


class EdgeVision(nn.Module):
    """The vision networks of OmniVLA-edge.

    Attributes:
        frames: Tower for one frame.
        image: Tower for a frame and a picture of the goal.
        satellite: Tower for two satellite pictures and a frame.
        film: FiLM network for a frame and a text.
    """

    def __init__(self, config: EdgeConfig):
        super().__init__()
        tower = config.vision
        self.frames = EfficientNet(tower)
        self.image = EfficientNet(tower, 6) if "image" in config.kinds else None
        self.satellite = EfficientNet(tower, 9) if "satellite" in config.kinds else None
        self.film = (
            WordFilm(config.film, config.language.out_size) if config.film and config.language else None
        )


class OmniVLAEdge(Regression):
    """The model of OmniVLA-edge: vision networks, a text encoder, a transformer and output layers.

    Attributes:
        reads: [goals, K], 1 if a goal (row) uses a kind of input (column), else 0.
    """

    config_type = EdgeConfig
    config: EdgeConfig
    layers: Sequence[MaskedLayer]
    reduce: Sequence[Linear]

    def __init__(self, config: EdgeConfig):
        super().__init__()
        self.config = config
        size, features = config.head.hidden_size, config.vision.out_channels
        self.vision = EdgeVision(config)
        if config.language is not None:
            self.language = ClipText(config.language)
        self.frame_proj = Linear(features, size)
        self.pose_proj = Linear(POSE, size) if "pose" in config.kinds else None
        self.satellite_proj = Linear(features, size) if "satellite" in config.kinds else None
        self.image_proj = Linear(features, size) if "image" in config.kinds else None
        self.language_proj = Linear(config.film.out_size, size) if config.film else None
        rows = len(config.kinds)
        self.places = nn.Parameter(torch.zeros(config.history + rows, size))
        self.register_buffer("reads", torch.zeros(len(GOALS), rows))
        block = config.head.block(NORM_EPS, "gelu")
        self.layers = nn.ModuleList(MaskedLayer(block) for _ in range(config.head.num_layers))  # type: ignore[assignment]
        sizes = (size, *config.reduced)
        self.goal_in = Linear(size + 1, size)
        self.reduce = nn.ModuleList(Linear(*each) for each in pairwise(sizes))  # type: ignore[assignment]
        self.action_out = Linear(sizes[-1], config.chunk_size * POSE)

    @property
    def views(self) -> int:
        return self.config.history * len(self.config.cameras)

    @property
    def min_tokens(self) -> int:
        return 2 if self.config.language else 1

    def embed_images(self, pixels: Tensor) -> Tensor:
        """Encode all views.

        Args:
            pixels: [B, T * V, 3, h, w]. With text, each view has a large picture above the small one.

        Returns:
            [B, 1, 1, N]: the tokens of frames and goals, followed by the feature map that the text changes.
        """
        config, names = self.config, self.config.cameras
        count, first = len(names), pixels.shape[1] - len(names)

        def small(view: int) -> Tensor:  # [B, 3, side, side]
            return pixels[:, view, :, config.large_side :, : config.side]

        newest = {name: small(first + index) for index, name in enumerate(names)}
        frames = torch.stack(
            [*map(small, range(0, first, count)), newest["current"]], dim=1
        )  # [B, T, 3, side, side]
        rows = [self.frame_proj(self.vision.frames(frames.flatten(0, 1))).unflatten(0, frames.shape[:2])]
        if self.vision.satellite is not None and self.satellite_proj is not None:
            pictures = torch.cat([newest["satellite"], newest["satellite_goal"], newest["current"]], dim=1)
            rows.append(self.satellite_proj(self.vision.satellite(pictures))[:, None])
        if self.vision.image is not None and self.image_proj is not None:
            pictures = torch.cat([newest["current"], newest["goal"]], dim=1)
            rows.append(self.image_proj(self.vision.image(pictures))[:, None])
        parts = [torch.cat(rows, dim=1).flatten(1)]
        if self.vision.film is not None:
            parts.append(self.vision.film.begin(pixels[:, first, :, : config.large_side]).flatten(1))
        return torch.cat(parts, dim=1)[:, None, None]

    def read(
        self, image_tokens: Tensor, camera_mask: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor
    ) -> EdgeContext:
        config, features = self.config, image_tokens[:, 0, 0]
        newest = state.unflatten(1, (config.history, -1))[:, -1] if config.state_dim else state  # [B, S]
        count = config.history + ("satellite" in config.kinds) + ("image" in config.kinds)
        width = count * config.head.hidden_size
        rows = features[:, :width].unflatten(1, (count, -1))
        goals = list(rows[:, config.history :].split(1, dim=1))  # satellite goal and image goal, if present
        if self.pose_proj is not None:
            goals.insert(0, self.pose_proj(newest[:, :POSE])[:, None])
        if self.vision.film is not None and self.language_proj is not None:
            film = self.vision.film.config
            start = features[:, width:].unflatten(1, (film.channels, film.rows, film.rows))
            text_features = self.vision.film(start, self.language(tokens, token_mask))
            goals.append(self.language_proj(text_features)[:, None])
        rows = torch.cat([rows[:, : config.history], *(row.to(rows.dtype) for row in goals)], dim=1)
        goal = self.goal(features, newest)  # [B]
        reads: Tensor = self.reads  # type: ignore[assignment]
        available = F.pad(reads.index_select(0, goal) > 0.5, (config.history, 0), value=True)
        return EdgeContext(rows + self.places, available, goal[:, None].float())

    def goal(
        self, features: Tensor, newest: Tensor
    ) -> Tensor:  # input shapes [B, N] and [B, S]; returns the goal's number, int64 [B]
        if len(self.config.goals) == 1:
            return torch.full_like(features[:, 0], self.config.goals[0], dtype=torch.int64)
        return (newest[:, -1] + 0.5).long()  # the number is whole, so this rounds correctly

    def regress(self, context: EdgeContext) -> Tensor:
        x, mask = context.rows, key_mask(context.there, context.rows.shape[1])
        for layer in self.layers:
            x = layer(x, mask)
        available = context.there[..., None].to(x.dtype)
        mean = (x * available).sum(dim=1) / available.sum(dim=1)  # [B, C]
        x = F.relu(self.goal_in(torch.cat([mean, context.goal.to(x.dtype)], dim=1)))
        for linear in self.reduce:
            x = F.relu(linear(x))
        steps = self.action_out(x).float().unflatten(1, (-1, POSE))  # [B, H, 4]
        return torch.cat([steps[..., :2].cumsum(dim=1), F.normalize(steps[..., 2:], dim=-1)], dim=-1)
