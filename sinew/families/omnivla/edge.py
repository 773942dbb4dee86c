"""OmniVLA-edge (Hirose et al. 2025, arXiv 2509.19480): small towers and a transformer over one row for each frame of
the history and one for each kind of goal.

* Each frame of the history is a row; a pose, two satellite pictures, a picture of the goal, and words with the newest
  frame are one each. Which of the four are read is the goal's number, one of :data:`goals.GOALS`.
* Words scale and shift what convolutions see in the newest frame, which is larger there (FiLM: Perez et al. 2018).
* The answer is read off the mean of the rows that are there, and off the goal's number: steps of a path, which add up,
  and the heading at each as a cosine and a sine.
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
    """``widths``: channels of the convolutions behind those that words change, which have ``channels`` themselves.
    ``rows``: of the map that words change, which is as wide."""

    channels: int
    blocks: int
    widths: tuple[int, ...]
    rows: int

    def __post_init__(self) -> None:
        check_sizes(self)

    @property
    def out_size(self) -> int:
        """Count of numbers that remain of a frame."""
        rows = self.rows
        for _ in self.widths:
            rows = -(-rows // 2)
        return self.widths[-1] * rows * rows


@dataclass(frozen=True)
class EdgeConfig:
    """Sizes of OmniVLA-edge.

    Attributes:
        goals: The training project's numbers of the supported goals.
        side: Side of a frame.
        large_side: Side of the newest frame together with text; 0 without text.
        head: Blocks of the transformer.
        reduced: Widths of the layers after it.
        max_state_dim: Numbers of all observation steps. The last number of each is the goal's, if there are several.
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
                f"max_state_dim: expected {self.state_dim} numbers of {self.history} moments, got {self.max_state_dim}"
            )
        of_words = {
            "language" in self.kinds,
            self.film is not None,
            self.language is not None,
            self.large_side > 0,
        }
        if len(of_words) > 1:
            raise ValueError(
                "film, language and large_side: expected all of them where words are read, else none"
            )

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of goals that are read."""
        return kinds(self.goals)

    @property
    def cameras(self) -> tuple[str, ...]:
        """Return the cameras that are read, each at every moment."""
        behind = {"image": ("goal",), "satellite": ("satellite", "satellite_goal")}
        return (
            "current",
            *(name for kind in ("image", "satellite") if kind in self.kinds for name in behind[kind]),
        )

    @property
    def state_dim(self) -> int:
        """Count of numbers in the state of one step: a pose, and the goal's number if there are several."""
        return POSE * ("pose" in self.kinds) + (len(self.goals) > 1)


class EdgeContext(NamedTuple):
    """rows: [B, T + K, C]; there: bool [B, T + K], which of them are read; goal: float32 [B, 1], its number."""

    rows: Tensor
    there: Tensor
    goal: Tensor


class ChannelScale(nn.Module):
    """A batch norm of an affine network that cannot be folded, because an activation precedes it."""

    def __init__(self, channels: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels, 1, 1))
        self.bias = nn.Parameter(torch.zeros(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:  # [B, C, h, w]
        return x * self.weight + self.bias


class HalvingConv(nn.Module):
    """A convolution of stride 2, an activation, and the norm behind it."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int = 3):
        super().__init__()
        self.conv = Conv(in_channels, out_channels, kernel, 2)
        self.norm = ChannelScale(out_channels)

    def forward(self, x: Tensor) -> Tensor:  # [B, C, h, w] -> [B, C', ceil(h / 2), ceil(w / 2)]
        return self.norm(F.relu(self.conv(x)))


class FilmBlock(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.mix = Conv(channels + 2, channels, 1)
        self.conv = Conv(channels, channels, 3)

    def forward(self, x: Tensor, places: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        """x: [B, C, h, w]; places: [2, h, w]; scale, shift: [B, C]."""
        x = F.relu(self.mix(torch.cat([x, places.to(x.dtype).expand(x.shape[0], -1, -1, -1)], dim=1)))
        return x + F.relu(scale[..., None, None] * self.conv(x) + shift[..., None, None])


class WordFilm(nn.Module):
    """What words see in a frame. ``places``: [2, rows, rows], column and row of each place of the map, -1 to 1."""

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
        """x: [B, channels, rows, rows], what ``begin`` gives; text: [B, text_size] -> [B, out_size]."""
        places: Tensor = self.places  # type: ignore[assignment]
        changes = self.film(text).unflatten(1, (self.config.blocks, 2, self.config.channels))
        for index, block in enumerate(self.blocks):
            x = block(x, places, changes[:, index, 0], changes[:, index, 1])
        return self.end(x).flatten(1)


class EdgeVision(nn.Module):
    """The towers: of frames, of a frame and a picture of the goal, of two satellite pictures and a frame; and what
    words change."""

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
    """``reads``: [goals, K], 1 where a goal reads a kind."""

    config_type = EdgeConfig
    config: EdgeConfig
    layers: Sequence[MaskedLayer]
    reduce: Sequence[Linear]

    def __init__(self, config: EdgeConfig):
        super().__init__()
        self.config = config
        size, seen = config.head.hidden_size, config.vision.out_channels
        self.vision = EdgeVision(config)
        if config.language is not None:
            self.language = ClipText(config.language)
        self.frame_proj = Linear(seen, size)
        self.pose_proj = Linear(POSE, size) if "pose" in config.kinds else None
        self.satellite_proj = Linear(seen, size) if "satellite" in config.kinds else None
        self.image_proj = Linear(seen, size) if "image" in config.kinds else None
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
        """pixels: [B, T * V, 3, h, w], of each view the large picture above the small one, where there is one ->
        [B, 1, 1, N]: the rows of frames and goals, then the map that words change."""
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
            seen = torch.cat([newest["satellite"], newest["satellite_goal"], newest["current"]], dim=1)
            rows.append(self.satellite_proj(self.vision.satellite(seen))[:, None])
        if self.vision.image is not None and self.image_proj is not None:
            seen = torch.cat([newest["current"], newest["goal"]], dim=1)
            rows.append(self.image_proj(self.vision.image(seen))[:, None])
        found = [torch.cat(rows, dim=1).flatten(1)]
        if self.vision.film is not None:
            found.append(self.vision.film.begin(pixels[:, first, :, : config.large_side]).flatten(1))
        return torch.cat(found, dim=1)[:, None, None]

    def read(
        self, image_tokens: Tensor, camera_mask: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor
    ) -> EdgeContext:
        config, seen = self.config, image_tokens[:, 0, 0]
        newest = state.unflatten(1, (config.history, -1))[:, -1] if config.state_dim else state  # [B, S]
        count = config.history + ("satellite" in config.kinds) + ("image" in config.kinds)
        width = count * config.head.hidden_size
        rows = seen[:, :width].unflatten(1, (count, -1))
        goals = list(rows[:, config.history :].split(1, dim=1))  # satellite, image
        if self.pose_proj is not None:
            goals.insert(0, self.pose_proj(newest[:, :POSE])[:, None])
        if self.vision.film is not None and self.language_proj is not None:
            film = self.vision.film.config
            start = seen[:, width:].unflatten(1, (film.channels, film.rows, film.rows))
            words = self.vision.film(start, self.language(tokens, token_mask))
            goals.append(self.language_proj(words)[:, None])
        rows = torch.cat([rows[:, : config.history], *(row.to(rows.dtype) for row in goals)], dim=1)
        goal = self.goal(seen, newest)  # [B]
        reads: Tensor = self.reads  # type: ignore[assignment]
        there = F.pad(reads.index_select(0, goal) > 0.5, (config.history, 0), value=True)
        return EdgeContext(rows + self.places, there, goal[:, None].float())

    def goal(self, seen: Tensor, newest: Tensor) -> Tensor:  # [B, N], [B, S] -> the goal's number, int64 [B]
        if len(self.config.goals) == 1:
            return torch.full_like(seen[:, 0], self.config.goals[0], dtype=torch.int64)
        return (newest[:, -1] + 0.5).long()  # whole from the start

    def regress(self, context: EdgeContext) -> Tensor:
        x, mask = context.rows, key_mask(context.there, context.rows.shape[1])
        for layer in self.layers:
            x = layer(x, mask)
        there = context.there[..., None].to(x.dtype)
        mean = (x * there).sum(dim=1) / there.sum(dim=1)  # [B, C]
        x = F.relu(self.goal_in(torch.cat([mean, context.goal.to(x.dtype)], dim=1)))
        for linear in self.reduce:
            x = F.relu(linear(x))
        steps = self.action_out(x).float().unflatten(1, (-1, POSE))  # [B, H, 4]
        return torch.cat([steps[..., :2].cumsum(dim=1), F.normalize(steps[..., 2:], dim=-1)], dim=-1)
