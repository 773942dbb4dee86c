"""Qwen2.5-VL as the language model of EO-1 and Wall-X. Its own layers also denoise the actions.

The language model reads views, state and instruction once, causally. In each solver step, the same layers run
over one token per action of the chunk. These tokens attend to the views, the state and the instruction.
Rotary positions have three axes. A text token advances all three axes, and the tokens of a view are on a
grid. Views may have different sizes. They are stored in arrays of one size, with each picture in the top left
corner.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sinew.layers.attention import block_mask, key_mask
from sinew.layers.decoder import Decoder, DecoderConfig, DecoderLayer, KeyValue
from sinew.layers.own_sizes import embed_own_sizes, without_padding
from sinew.layers.qwen25_vit import Qwen25ViT, Qwen25ViTConfig
from sinew.layers.rope import Rotation, rotate_axes
from sinew.layers.sizes import check_sizes
from sinew.models.base import Model

ROW, COLUMN, BEFORE, BEHIND = range(4)  # indices of the four columns in the table of image tokens


@dataclass(frozen=True)
class Qwen25VLConfig:
    """The part of the configuration that EO-1 and Wall-X have in common.

    Attributes:
        vision: Configuration of the vision tower.
        language: Configuration of the language model.
        vocab_size: Rows of the token table (the embedding of the vocabulary).
        chunk_size: Actions in a chunk.
        max_state_dim: Width of the padded state.
        max_action_dim: Width of a padded action.
        image_token: Id of the token that image features replace.
        state_token: Id of the token that the state replaces.
        position_sections: Number of rotary frequencies that turn with time, row and column, in this order.
        frames: Height and width of each view in pixels.
    """

    vision: Qwen25ViTConfig
    language: DecoderConfig
    vocab_size: int
    chunk_size: int
    max_state_dim: int
    max_action_dim: int
    image_token: int
    state_token: int
    position_sections: tuple[int, int, int]
    frames: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        check_sizes(self)
        if sum(self.position_sections) != self.language.head_dim // 2 or min(self.position_sections) < 0:
            raise ValueError(
                f"position_sections: expected three numbers with the sum {self.language.head_dim // 2}, half the"
                f" width of a head, got {self.position_sections}"
            )
        if self.vision.output_size != self.language.hidden_size:
            raise ValueError(
                f"vision.output_size: expected {self.language.hidden_size}, the width of the language model, got"
                f" {self.vision.output_size}"
            )
        unit = self.vision.unit
        if not self.frames or any(side < 1 or side % unit for frame in self.frames for side in frame):
            raise ValueError(f"frames: expected sides that are multiples of {unit} pixels, got {self.frames}")

    @property
    def grids(self) -> tuple[tuple[int, int], ...]:
        """Return rows and columns of the image tokens of each view."""
        return tuple((height // self.vision.unit, width // self.vision.unit) for height, width in self.frames)

    @property
    def image_tokens(self) -> int:
        """Return the number of image tokens of all views together."""
        return sum(rows * cols for rows, cols in self.grids)


class ChunkContext(NamedTuple):
    """The results of the language model for an observation, which each solver step reads.

    Attributes:
        kv: Keys and values of views, state and instruction for each layer, [B, P, Hkv, D].
        rotation: Rotary positions of the chunk's tokens.
        mask: bool [B, H, P + H], True if the action's token attends to the key.
    """

    kv: tuple[KeyValue, ...]
    rotation: Rotation
    mask: Tensor


class Qwen25VL(Model):
    """The part of the model that EO-1 and Wall-X have in common: the input of the language model, its
    positions, and its run over the observation.
    """

    config: Any
    times_per_row = True
    image_places: Tensor

    def __init__(self, config: Qwen25VLConfig):
        super().__init__()
        self.config = config
        self.vision = Qwen25ViT(config.vision)
        self.language = Decoder(config.language, config.vocab_size)
        self.register_buffer("image_places", torch.zeros(config.image_tokens, 4))

    @abstractmethod
    def state_row(self, state: Tensor) -> Tensor:
        """Return the embedding [B, C] of the state's token, from the state, float32 [B, S]."""

    @abstractmethod
    def among(self, rows: Tensor) -> Tensor:
        """Return the attention mask between the tokens of the chunk.

        Args:
            rows: bool [B, H], all True.

        Returns:
            bool [B, H, H]. An entry [b, i, j] is True if the token of action i attends to the token of action j.
        """

    @property
    def views(self) -> int:
        return len(self.config.frames)

    @property
    def frames(self) -> tuple[tuple[int, int], ...]:
        return self.config.frames  # type: ignore[no-any-return]

    @property
    def grid(self) -> tuple[int, int]:
        heights, widths = zip(*self.config.frames, strict=True)
        return self.grid_of(max(heights), max(widths))

    @property
    def decoder_layers(self) -> Sequence[DecoderLayer]:
        """Return the layers that process the prompt and, in each solver step, the actions: the layers of the language
        model.
        """
        return self.language.layers  # type: ignore[return-value]

    def embed_images(self, pixels: Tensor) -> Tensor:
        """Encode each view at its own size.

        Args:
            pixels: [B, V, 3, height, width].

        Returns:
            [B, V, N, C], where N is the largest number of tokens of a view. The tokens of a smaller view are
            followed by zeros.
        """
        return embed_own_sizes(self.vision, pixels, self.config.frames)

    def flat(self, image_tokens: Tensor) -> Tensor:
        """Return the image tokens of all views, one view after the other, [B, N, C]."""
        return without_padding(image_tokens, [rows * cols for rows, cols in self.config.grids])

    def embed(self, image_tokens: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor) -> Tensor:
        """Return the language model's input, [B, L, C]. The arguments are those of :meth:`read`."""
        table, flat = self.language.embed_tokens, self.flat(image_tokens)
        is_placeholder = (tokens == self.config.image_token) & token_mask
        index = (is_placeholder.long().cumsum(dim=1) - 1).clamp(0, flat.shape[1] - 1)  # [B, L]
        rows = flat.to(table.dtype).gather(1, index[..., None].expand(-1, -1, flat.shape[2]))
        x = torch.where(is_placeholder[..., None], rows, table(tokens))
        own = ((tokens == self.config.state_token) & token_mask)[..., None]
        return torch.where(own, self.state_row(state)[:, None].to(x.dtype), x)

    def positions(self, tokens: Tensor, token_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the rotary positions of the prompt.

        A text token advances all axes by one. A view begins where the text before it ends. The text after a view
        continues after the longer side of the view's grid.

        Returns:
            Time, row and column of each token, int64 [B, L, 3], and the position of the next text token, int64 [B].
        """
        image = (tokens == self.config.image_token) & token_mask
        images, texts = image.long().cumsum(dim=1), (token_mask & ~image).long().cumsum(dim=1)
        table = self.image_places.long()
        about = table[(images - 1).clamp(0, table.shape[0] - 1)]  # [B, L, 4]
        view_offset = torch.where(images > 0, about[..., BEHIND], 0)
        start = torch.where(image, texts + about[..., BEFORE], texts - 1 + view_offset)
        row, column = (torch.where(image, about[..., axis], 0) for axis in (ROW, COLUMN))
        following = texts[:, -1] + view_offset[:, -1]
        return torch.stack([start, start + row, start + column], dim=-1), following

    @property
    def axes(self) -> tuple[int, ...]:
        """Return the axis (time, row or column) that turns each rotary frequency."""
        return tuple(axis for axis, count in enumerate(self.config.position_sections) for _ in range(count))

    def rotation(self, positions: Tensor) -> Rotation:  # int64 [B, L, 3]
        language = self.config.language
        return rotate_axes(positions, language.head_dim, language.rope_theta, self.axes)

    def read(
        self, image_tokens: Tensor, camera_mask: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor
    ) -> ChunkContext:
        x = self.embed(image_tokens, tokens, token_mask, state)
        positions, following = self.positions(tokens, token_mask)
        rotate, mask = self.rotation(positions), block_mask(token_mask, torch.ones_like(token_mask))
        kv: list[KeyValue] = []
        layers = self.decoder_layers
        for index, layer in enumerate(layers):
            q, k, v = layer.project(x, rotate)
            kv.append((k, v))
            # The head reads only keys and values, so the last layer does not need an output.
            if index + 1 < len(layers):
                x = layer.finish(x, layer.attn.attend(q, (k, v), mask))
        rows = torch.ones_like(tokens[:, :1], dtype=torch.bool).expand(-1, self.config.chunk_size)  # [B, H]
        at = following[:, None] + rows.long().cumsum(dim=1) - 1
        sees = torch.cat([key_mask(token_mask, rows.shape[1]), self.among(rows)], dim=-1)
        return ChunkContext(tuple(kv), self.rotation(at[..., None].expand(-1, -1, 3)), sees)

    def cache(self, context: ChunkContext) -> Any:
        return context.kv


def image_places(grids: Sequence[tuple[int, int]]) -> list[tuple[int, int, int, int]]:
    """Compute the table that states the position of each image token. The bundle stores the table as the
    buffer ``image_places``.

    Args:
        grids: Rows and columns of the tokens of each view.

    Returns:
        Four numbers for each image token: its row, its column, the number of positions before its view, and
            the number of positions up to the end of its view.
    """
    places, before = [], 0
    for rows, cols in grids:
        behind = before + max(rows, cols)
        places += [(row, col, before, behind) for row in range(rows) for col in range(cols)]
        before = behind
    return places
