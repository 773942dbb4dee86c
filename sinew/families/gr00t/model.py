"""GR00T N1.5, N1.6 and N1.7 (NVIDIA, arXiv 2503.14734, and the branches of Isaac-GR00T).

A vision-language model reads views and instruction. A diffusion transformer (:mod:`.head`) converts noise to an action
chunk and attends to the features of the last used language layer. Four Euler steps run from noise (t = 0) to actions (t
= 1). The time is rounded down to one of a thousand values. The prompt contains a placeholder token for every image
token, so the prompt template defines the position of the views.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from sinew.families.gr00t.head import Head, HeadConfig, HeadContext
from sinew.layers.attention import block_mask
from sinew.layers.connector import UnshuffleConnector
from sinew.layers.decoder import Decoder, DecoderConfig
from sinew.layers.fold_sites import FoldSite
from sinew.layers.linear import Linear
from sinew.layers.qwen_vit import QwenViT, QwenViTConfig
from sinew.layers.rope import Rotation, rotate_axes
from sinew.layers.sizes import check_sizes
from sinew.layers.vit import ResizedPositions, VisionTransformer, ViTConfig
from sinew.models.base import Model
from sinew.models.solvers import Solver

SOLVER = Solver(start=0.0, end=1.0)


@dataclass(frozen=True)
class Gr00tConfig:
    """Fields that the configurations of all GR00T versions share. Sizes are in tokens and dimensions.

    Attributes:
        language: Sizes of the language model.
        head: Sizes of the action head.
        vocab_size: Number of rows of the token table, which has one row per token id.
        chunk_size: Actions in a chunk.
        max_state_dim: Width of the padded state.
        max_action_dim: Width of a padded action.
        image_token: Id of the prompt token in whose place the model puts an image token.
        rows: Number of rows of the grid of image tokens of a camera view.
        cols: Number of columns of the grid of image tokens of a camera view.
    """

    language: DecoderConfig
    head: HeadConfig
    vocab_size: int
    chunk_size: int
    max_state_dim: int
    max_action_dim: int
    image_token: int
    rows: int
    cols: int

    def __post_init__(self) -> None:
        check_sizes(self)


@dataclass(frozen=True)
class Gr00tQwenConfig(Gr00tConfig):
    """Sizes of GR00T N1.7.

    Attributes:
        vision: Sizes of Qwen3-VL's tower.
        position_sections: Three numbers: how many rotary frequencies encode the time, the row and the column of a
            token.
    """

    vision: QwenViTConfig
    position_sections: tuple[int, int, int]


@dataclass(frozen=True)
class Gr00tEagleConfig(Gr00tConfig):
    """Sizes of GR00T N1.5 and N1.6.

    Attributes:
        vision: Sizes of the SigLIP tower.
        unshuffle: One image token is made from a square of patches. This is the number of patches along its side. 1
            means that every patch is an image token (N1.5).
    """

    vision: ViTConfig
    unshuffle: int


class Gr00t(Model):
    """The base class of all GR00T versions: it puts image tokens into the prompt, and runs the language model and the
    head.
    """

    solver = SOLVER
    per_embodiment: ClassVar[tuple[str, ...]] = (
        "head.state_encoder",
        "head.action_encoder",
        "head.action_decoder",
    )

    def __init__(self, config: Gr00tConfig):
        super().__init__()
        self.config = config
        self.language = Decoder(config.language, config.vocab_size)
        self.head = Head(config.head, config.max_state_dim, config.max_action_dim)

    def read(
        self, image_tokens: Tensor, camera_mask: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor
    ) -> HeadContext:
        """Run the language model, and compute the results that the head reads in each solver step. The arguments are
        those of ``Model.read``. ``tokens`` contains a placeholder for each image token.
        """
        is_image, valid = self.seen(image_tokens, camera_mask, tokens, token_mask)
        return self.head.context(self.features(image_tokens, is_image, tokens, valid), is_image, valid, state)

    def seen(
        self, image_tokens: Tensor, camera_mask: Tensor, tokens: Tensor, token_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute masks of the tokens to which the language model may attend.

        Returns:
            Two masks, bool [B, L] each: the image tokens of the available views, and all valid tokens.
        """
        is_placeholder = (tokens == self.config.image_token) & token_mask  # [B, L]
        count = image_tokens.shape[2]
        view = ((is_placeholder.long().cumsum(dim=1) - 1) // count).clamp(0, image_tokens.shape[1] - 1)
        is_image = is_placeholder & camera_mask.gather(1, view)
        return is_image, token_mask & (is_image | ~is_placeholder)

    @property
    def grid(self) -> tuple[int, int]:
        side = self.patches_per_side
        return self.config.rows * side, self.config.cols * side

    @property
    @abstractmethod
    def patches_per_side(self) -> int:
        """Number of patches along the side of the square of patches that becomes one image token."""

    @abstractmethod
    def features(self, image_tokens: Tensor, is_image: Tensor, tokens: Tensor, valid: Tensor) -> Tensor:
        """Compute the language model's features that the head reads, [B, L, C]."""

    def embed(self, image_tokens: Tensor, is_image: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        """Return the language model's input [B, L, C], and the "taps". Taps are features of earlier layers of the
        vision tower, which are later added to the outputs of the language model's first layers.

        The taps are zero at all tokens except image tokens.
        """
        table = self.language.embed_tokens
        flat = image_tokens.flatten(1, 2).to(table.dtype)  # [B, V * N, (1 + taps) * C]
        is_placeholder = tokens == self.config.image_token
        index = (is_placeholder.long().cumsum(dim=1) - 1).clamp(0, flat.shape[1] - 1)  # [B, L]
        rows = flat.gather(1, index[..., None].expand(-1, -1, flat.shape[2]))
        x, *taps = rows.split(self.config.language.hidden_size, dim=-1)
        mask = is_image[..., None]
        return (torch.where(mask, x, table(tokens)), *(torch.where(mask, tap, 0.0) for tap in taps))

    def decode(self, x: Tensor, rotate: Rotation, valid: Tensor, taps: Sequence[Tensor] = ()) -> Tensor:
        """Run the layers of the language model.

        Args:
            x: Input, [B, L, C].
            rotate: Rotary positions.
            valid: bool [B, L], False for padding.
            taps: Tensors that are added to the outputs of the first layers.

        Returns:
            Hidden states before any final norm, [B, L, C].
        """
        mask = block_mask(valid, torch.ones_like(valid))
        for index, layer in enumerate(self.language.layers):
            x, _ = layer(x, rotate, mask)
            if index < len(taps):
                x = x + taps[index]
        return x

    def embed_time(self, t: Tensor) -> Tensor:
        """Return the embedding of the solver's time, rounded down to a step of the time table.

        The rounding uses double precision, as in the reference.
        """
        return self.head.embed_time((t * self.config.head.buckets).long())

    def act(self, x: Tensor, time_embedding: Tensor, context: HeadContext) -> Tensor:
        return self.head.velocity(x, time_embedding, context)


class Gr00tEagle(Gr00t):
    """N1.5 and N1.6: Eagle (SigLIP and Qwen3) as the backbone. The head reads the output of the language model's
    final norm."""

    config_type = Gr00tEagleConfig

    def __init__(self, config: Gr00tEagleConfig):
        super().__init__(config)
        width = config.language.hidden_size
        if config.unshuffle == 1:
            self.vision: VisionTransformer = VisionTransformer(config.vision)
            self.connector: nn.Module = Linear(config.vision.hidden_size, width)
        else:
            self.vision = ResizedPositions(config.vision)
            self.connector = UnshuffleConnector(config.vision.hidden_size, width, config.unshuffle)

    @property
    def patches_per_side(self) -> int:
        return self.config.unshuffle

    def fold_sites(self) -> list[FoldSite]:
        return [FoldSite(self.vision, "norm", (self.connector,))] if self.config.unshuffle == 1 else []

    def embed_images(self, pixels: Tensor) -> Tensor:
        """Encode pixels, float32 [B, V, 3, height, width], to image tokens [B, V, tokens, C]."""
        patch = self.config.vision.patch_size
        rows, cols = (side // patch for side in pixels.shape[-2:])
        return self.connect(self.vision(pixels.flatten(0, 1)), rows, cols).unflatten(0, pixels.shape[:2])

    def connect(self, features: Tensor, rows: int, cols: int) -> Tensor:
        return (
            self.connector(features) if self.config.unshuffle == 1 else self.connector(features, rows, cols)
        )

    def features(self, image_tokens: Tensor, is_image: Tensor, tokens: Tensor, valid: Tensor) -> Tensor:
        """Return the normalised hidden states of the last used language layer, [B, L, C]."""
        config = self.config.language
        (x,) = self.embed(image_tokens, is_image, tokens)
        rotate = Rotation.at(valid.long().cumsum(dim=1) - 1, config.head_dim, config.rope_theta)
        return self.language.norm(self.decode(x, rotate, valid))


class Gr00tQwen(Gr00t):
    """N1.7: Qwen3-VL as the backbone. The head reads the output of the last layer that is used, without a final
    norm."""

    config_type: ClassVar[type] = Gr00tQwenConfig

    def __init__(self, config: Gr00tQwenConfig):
        super().__init__(config)
        self.vision = QwenViT(config.vision)
        del self.language.norm

    @property
    def patches_per_side(self) -> int:
        return self.config.vision.merge

    def embed_images(self, pixels: Tensor) -> Tensor:
        """Encode pixels, float32 [B, V, 3, height, width], to image tokens [B, V, tokens, (1 + taps) * C]. Each token
        also contains the features of the earlier layers (taps).
        """
        return self.vision(pixels.flatten(0, 1)).unflatten(0, pixels.shape[:2])

    def features(self, image_tokens: Tensor, is_image: Tensor, tokens: Tensor, valid: Tensor) -> Tensor:
        """Return the hidden states of the last used language layer, [B, L, C]."""
        config = self.config.language
        x, *taps = self.embed(image_tokens, is_image, tokens)
        rotate = rotate_axes(self.positions(is_image, valid), config.head_dim, config.rope_theta, self.axes())
        return self.decode(x, rotate, valid, taps)

    def positions(self, is_image: Tensor, valid: Tensor) -> Tensor:
        """Return time, row and column of every token, int64 [B, L, 3].

        A text token advances all axes by one. An image starts at the end of the text before it. Its tokens have the
        same time and form a grid, and the text after an image continues after the longer side of the grid.
        """
        rows, cols = self.config.rows, self.config.cols
        images, texts = is_image.long().cumsum(dim=1), (valid & ~is_image).long().cumsum(dim=1)
        earlier = torch.where(is_image, images - 1, images)  # number of image tokens before this token
        inside = torch.where(is_image, earlier % (rows * cols), 0)
        start = torch.where(is_image, texts, texts - 1) + earlier // (rows * cols) * max(rows, cols)
        return torch.stack([start, start + inside // cols, start + inside % cols], dim=-1)

    def axes(self) -> tuple[int, ...]:
        """Return for each rotary frequency the axis that it encodes: time, row or column.

        Row and column each take every third of the first frequencies. All other frequencies encode the time.
        """
        _, rows, cols = self.config.position_sections
        half = self.config.language.head_dim // 2
        return tuple(
            1 if f % 3 == 1 and f < 3 * rows else 2 if f % 3 == 2 and f < 3 * cols else 0 for f in range(half)
        )
