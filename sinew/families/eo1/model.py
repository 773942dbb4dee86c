"""EO-1 (Qu et al. 2025, arXiv 2508.21112), as LeRobot has it: a language model's own layers denoise the actions.

Qwen2.5-VL reads views, state and instruction once. In each step its own layers run over one token for each row of the
chunk, which sees that prefix and the rows before it. Text counts up on all three axes of the rotary positions; the
tokens of a view are on a grid. Views may have different sizes: pixels come in one size, with each view in its top left
corner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinew.layers.attention import block_mask, key_mask
from sinew.layers.decoder import Decoder, DecoderConfig, DecoderLayer, KeyValue
from sinew.layers.linear import Linear
from sinew.layers.own_sizes import embed_own_sizes, without_padding
from sinew.layers.qwen25_vit import Qwen25ViT, Qwen25ViTConfig
from sinew.layers.rope import Rotation, rotate_axes
from sinew.layers.time_embedding import sinusoidal_embedding
from sinew.models.base import Model
from sinew.models.expert import FlowConfig

ROW, COLUMN, BEFORE, BEHIND = range(4)  # columns of the table of image tokens


@dataclass(frozen=True)
class EO1Config(FlowConfig):
    """Sizes of a policy.

    Attributes:
        image_token, state_token: ids of the tokens that image features and the state replace.
        position_sections: how many rotary frequencies turn with time, row and column, in this order.
        frames: height and width of each view in pixels.
        out_layers: linear layers from a hidden state to an action step.
    """

    vision: Qwen25ViTConfig
    language: DecoderConfig
    image_token: int
    state_token: int
    position_sections: tuple[int, int, int]
    frames: tuple[tuple[int, int], ...]
    out_layers: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if sum(self.position_sections) != self.language.head_dim // 2 or min(self.position_sections) < 0:
            raise ValueError(
                f"position_sections: expected a sum of {self.language.head_dim // 2}, got {self.position_sections}"
            )
        unit = self.vision.unit
        if not self.frames or any(side < 1 or side % unit for frame in self.frames for side in frame):
            raise ValueError(f"frames: expected multiples of {unit} pixels, got {self.frames}")
        if not 1 <= self.out_layers <= 8:
            raise ValueError(f"out_layers: expected 1 to 8, got {self.out_layers}")

    @property
    def grids(self) -> tuple[tuple[int, int], ...]:
        """Return rows and columns of the image tokens of each view."""
        return tuple((height // self.vision.unit, width // self.vision.unit) for height, width in self.frames)

    @property
    def image_tokens(self) -> int:
        """Return the image tokens of all views."""
        return sum(rows * cols for rows, cols in self.grids)


class EO1Context(NamedTuple):
    """What an observation leaves for the head.

    Attributes:
        kv: of each layer, keys and values of the prefix, [B, P, Hkv, D].
        rotation: of the chunk's rows.
        mask: what each row of the chunk sees, bool [B, H, P + H].
    """

    kv: tuple[KeyValue, ...]
    rotation: Rotation
    mask: Tensor


class EO1(Model):
    config_type = EO1Config
    config: EO1Config
    float32_modules: ClassVar[tuple[str, ...]] = (
        "state_proj",
        "action_in",
        "action_mix",
        "time_mix",
        "action_time_out",
        "action_out",
    )
    components: ClassVar[Mapping[str, str]] = Model.components
    times_per_row = True
    action_out: Sequence[Linear]

    def __init__(self, config: EO1Config):
        super().__init__()
        self.config = config
        size = config.language.hidden_size
        self.vision = Qwen25ViT(config.vision)
        self.language = Decoder(config.language, config.vocab_size)
        self.state_proj = Linear(config.max_state_dim, size)
        self.action_in = Linear(config.max_action_dim, size)
        self.action_mix = Linear(size, size)
        self.time_mix = Linear(size, size, bias=False)
        self.action_time_out = Linear(size, size)
        widths = [size] * config.out_layers + [config.max_action_dim]
        self.action_out = nn.ModuleList(  # type: ignore[assignment]
            Linear(a, b) for a, b in pairwise(widths)
        )
        self.register_buffer("image_places", torch.zeros(config.image_tokens, 4))

    @property
    def views(self) -> int:
        return len(self.config.frames)

    @property
    def frames(self) -> tuple[tuple[int, int], ...]:
        return self.config.frames

    @property
    def grid(self) -> tuple[int, int]:
        heights, widths = zip(*self.config.frames, strict=True)
        return self.grid_of(max(heights), max(widths))

    def embed_images(self, pixels: Tensor) -> Tensor:
        """pixels: [B, V, 3, height, width] -> [B, V, most tokens of a view, C]; what is behind a view's tokens is 0."""
        return embed_own_sizes(self.vision, pixels, self.config.frames)

    def flat(self, image_tokens: Tensor) -> Tensor:
        """Return the image tokens of all views, one view after the other: [B, N, C]."""
        return without_padding(image_tokens, [rows * cols for rows, cols in self.config.grids])

    def embed(self, image_tokens: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor) -> Tensor:
        """Return the language model's input, [B, L, C]; arguments as in :meth:`read`."""
        table, flat = self.language.embed_tokens, self.flat(image_tokens)
        placed = (tokens == self.config.image_token) & token_mask
        index = (placed.long().cumsum(dim=1) - 1).clamp(0, flat.shape[1] - 1)  # [B, L]
        rows = flat.to(table.dtype).gather(1, index[..., None].expand(-1, -1, flat.shape[2]))
        x = torch.where(placed[..., None], rows, table(tokens))
        own = ((tokens == self.config.state_token) & token_mask)[..., None]
        return torch.where(own, self.state_proj(state)[:, None].to(x.dtype), x)

    def positions(self, tokens: Tensor, token_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return time, row and column of each token, int64 [B, L, 3], and the position of the next text, int64 [B].

        Text counts by one on all axes. A view begins where the text before it ends, and the text after it continues
        behind the longer side of its grid.
        """
        image = (tokens == self.config.image_token) & token_mask
        images, texts = image.long().cumsum(dim=1), (token_mask & ~image).long().cumsum(dim=1)
        table: Tensor = self.image_places.long()  # type: ignore[operator]
        about = table[(images - 1).clamp(0, table.shape[0] - 1)]  # [B, L, 4]
        passed = torch.where(images > 0, about[..., BEHIND], 0)
        start = torch.where(image, texts + about[..., BEFORE], texts - 1 + passed)
        row, column = (torch.where(image, about[..., axis], 0) for axis in (ROW, COLUMN))
        following = texts[:, -1] + passed[:, -1]
        return torch.stack([start, start + row, start + column], dim=-1), following

    @property
    def axes(self) -> tuple[int, ...]:
        """Return which axis turns each rotary frequency: time, row and column, in sections."""
        return tuple(axis for axis, count in enumerate(self.config.position_sections) for _ in range(count))

    def rotation(self, positions: Tensor) -> Rotation:  # int64 [B, L, 3]
        language = self.config.language
        return rotate_axes(positions, language.head_dim, language.rope_theta, self.axes)

    def read(
        self, image_tokens: Tensor, camera_mask: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor
    ) -> EO1Context:
        x = self.embed(image_tokens, tokens, token_mask, state)
        positions, following = self.positions(tokens, token_mask)
        rotate, mask = self.rotation(positions), block_mask(token_mask, torch.ones_like(token_mask))
        kv: list[KeyValue] = []
        layers: Sequence[DecoderLayer] = self.language.layers  # type: ignore[assignment]
        for index, layer in enumerate(layers):
            q, k, v = layer.project(x, rotate)
            kv.append((k, v))
            if index + 1 < len(layers):  # the head reads keys and values alone
                x = layer.finish(x, layer.attn.attend(q, (k, v), mask))
        rows = torch.ones_like(tokens[:, :1], dtype=torch.bool).expand(-1, self.config.chunk_size)  # [B, H]
        at = following[:, None] + rows.long().cumsum(dim=1) - 1
        sees = torch.cat([key_mask(token_mask, rows.shape[1]), block_mask(rows, rows)], dim=-1)
        return EO1Context(tuple(kv), self.rotation(at[..., None].expand(-1, -1, 3)), sees)

    def cache(self, context: EO1Context) -> Any:
        return context.kv

    def embed_time(self, t: Tensor) -> Tensor:
        config = self.config
        size = config.language.hidden_size
        return self.time_mix(sinusoidal_embedding(t, size, config.min_period, config.max_period))

    def embed_actions(self, x: Tensor, time_embedding: Tensor) -> Tensor:  # [B, H, A] -> [B, H, C]
        time = time_embedding if time_embedding.ndim == 3 else time_embedding[:, None]
        return self.action_time_out(F.silu(self.action_mix(self.action_in(x)) + time))

    def decode_actions(self, h: Tensor) -> Tensor:  # [B, H, C] -> [B, H, A]
        h = self.language.norm(h)
        for layer in self.action_out:
            h = layer(h)
        return h.float()

    def act(self, x: Tensor, time_embedding: Tensor, context: EO1Context) -> Tensor:
        h = self.embed_actions(x, time_embedding).to(self.language.norm.dtype)
        layers: Sequence[DecoderLayer] = self.language.layers  # type: ignore[assignment]
        for layer, kv in zip(layers, context.kv, strict=True):
            q, k, v = layer.project(h, context.rotation)
            h = layer.finish(h, layer.attn.attend(q, kv, context.mask, own=(k, v)))
        return self.decode_actions(h)


def image_places(grids: Sequence[tuple[int, int]]) -> list[tuple[int, int, int, int]]:
    """Return row and column of each image token, and what the views before it, and those with it, add to positions."""
    found, before = [], 0
    for rows, cols in grids:
        behind = before + max(rows, cols)
        found += [(row, col, before, behind) for row in range(rows) for col in range(cols)]
        before = behind
    return found
