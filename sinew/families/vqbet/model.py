"""VQ-BeT (Lee et al. 2024, arXiv 2403.03181), as LeRobot computes it: a transformer that chooses codes of action
chunks.

A causal transformer over the newest observations chooses two codes of a residual code book. The action chunk is the
decoded sum of the two codes plus an offset. The transformer reads three tokens of each observation step: the keypoints
of the camera frame, the robot's state, and a learned action token. Only the output at the newest action token is used.
A code is sampled from its distribution p as the largest value of ``p / q``, where q is exponential noise. The policy's
noise is this q, so noise of ones gives the most likely codes. The policy does not read prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinew.layers.attention import block_mask
from sinew.layers.keypoints import KeypointEncoder
from sinew.layers.linear import Embedding, Linear
from sinew.layers.norm import LayerNorm
from sinew.layers.resnet import ResNetConfig
from sinew.layers.sizes import check_sizes
from sinew.layers.vit import BlockConfig, MaskedLayer
from sinew.models.base import Model
from sinew.models.solvers import Solver

NORM_EPS = 1e-5  # default of torch; the reference implementation uses the default too
TOKENS = 3  # tokens of an observation step: frame, state, action
LAYERS = 2  # number of code books; the second one corrects the error of the first one
SOLVER = Solver("single", noise="exponential")


@dataclass(frozen=True)
class VQBeTConfig:
    """Sizes of VQ-BeT.

    Attributes:
        vision: Sizes of the ResNet.
        history: Number of observation steps.
        rows: Rows of a frame's features.
        cols: Columns of a frame's features.
        keypoints: Number of keypoints per frame.
        token_size: Width of a token before the transformer.
        hidden_size: Width of the transformer.
        num_layers: Layers of the transformer.
        num_heads: Attention heads.
        feature_size: Width of a token after the transformer.
        codes: Entries of each of the two code books.
        code_size: Width of a code.
        decoder_size: Inner width of the decoder of codes.
        temperature: Temperature of the distribution of codes.
        action_rows: Actions in a chunk.
        action_dim: Size of an action.
        max_state_dim: Number of values in the states of all observation steps together.
        sequential: True if the second code depends on the first code.
    """

    vision: ResNetConfig
    history: int
    rows: int
    cols: int
    keypoints: int
    token_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    feature_size: int
    codes: int
    code_size: int
    decoder_size: int
    temperature: float
    action_rows: int
    action_dim: int
    max_state_dim: int
    sequential: bool = False

    def __post_init__(self) -> None:
        check_sizes(self)
        if self.max_state_dim % self.history:
            raise ValueError(
                f"max_state_dim: expected a multiple of {self.history}, the number of observation steps, got"
                f" {self.max_state_dim}"
            )
        if not 0 < self.temperature < float("inf"):
            raise ValueError(f"temperature: expected a number above 0, got {self.temperature}")

    @property
    def chunk_size(self) -> int:
        """Return the number of rows of the noise and of the result. The noise and the result have the same shape.

        There must be at least one row for each action and one for each code book.
        """
        return max(self.action_rows, LAYERS)

    @property
    def max_action_dim(self) -> int:
        """Return the number of columns of the noise and of the result.

        There must be at least as many columns as an action has values, and as a code book has codes.
        """
        return max(self.action_dim, self.codes)

    @property
    def blocks(self) -> BlockConfig:
        return BlockConfig(self.hidden_size, 4 * self.hidden_size, self.num_layers, self.num_heads)


class VQBeTContext(NamedTuple):
    """The results of an observation from which the codes and the actions are computed.

    Attributes:
        logits: [B, 2, codes], scores of each code book. With ``sequential``, the scores of the second code book do
            not include the first code's contribution.
        offsets: [B, 2, codes, action_rows * action_dim], the offset that each code adds to the decoded actions.
    """

    logits: Tensor
    offsets: Tensor


class CodeDecoder(nn.Module):
    """Three linear layers that decode the sum of two codes to a chunk."""

    def __init__(self, config: VQBeTConfig):
        super().__init__()
        self.fc1 = Linear(config.code_size, config.decoder_size)
        self.fc2 = Linear(config.decoder_size, config.decoder_size)
        self.fc3 = Linear(config.decoder_size, config.action_rows * config.action_dim)

    def forward(self, x: Tensor) -> Tensor:  # shapes: [B, code_size] -> [B, action_rows * action_dim]
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


class VQBeT(Model):
    """VQ-BeT: a keypoint encoder, a causal transformer, and two code books."""

    config_type = VQBeTConfig
    config: VQBeTConfig
    solver = SOLVER
    layers: Sequence[MaskedLayer]
    books: Sequence[Embedding]

    def __init__(self, config: VQBeTConfig):
        super().__init__()
        self.config = config
        size, features = config.token_size, config.feature_size
        self.vision = KeypointEncoder(config.vision, config.keypoints, config.rows, config.cols)
        self.image_proj = Linear(2 * config.keypoints, size)
        self.state_proj = Linear(config.max_state_dim // config.history, size)
        self.action_token = nn.Parameter(torch.zeros(size))
        self.token_proj = Linear(size, config.hidden_size)
        self.places = Embedding(TOKENS * config.history, config.hidden_size)
        block = config.blocks.block(NORM_EPS, "gelu")
        self.layers = nn.ModuleList(MaskedLayer(block) for _ in range(config.num_layers))  # type: ignore[assignment]
        self.norm = LayerNorm(config.hidden_size, eps=NORM_EPS)
        self.feature_proj = Linear(config.hidden_size, features, bias=False)
        self.code_proj = Linear(features, LAYERS * config.codes)
        self.after_first = Embedding(config.codes, config.codes) if config.sequential else None
        self.offset_proj = Linear(features, LAYERS * config.codes * config.action_rows * config.action_dim)
        self.books = nn.ModuleList(  # type: ignore[assignment]
            Embedding(config.codes, config.code_size) for _ in range(LAYERS)
        )
        self.decoder = CodeDecoder(config)

    @property
    def views(self) -> int:
        return self.config.history

    @property
    def grid(self) -> tuple[int, int]:
        return self.config.rows, self.config.cols

    @property
    def min_tokens(self) -> int:
        return 1

    @property
    def chooses_tokens(self) -> bool:
        return True

    def embed_images(self, pixels: Tensor) -> Tensor:  # shapes: [B, T, 3, h, w] -> [B, T, 1, 2 * keypoints]
        return self.vision(pixels.flatten(0, 1)).unflatten(0, pixels.shape[:2])[:, :, None]

    def embed(self, image_tokens: Tensor, state: Tensor) -> Tensor:
        """Build the transformer's input, the oldest observation step first.

        Args:
            image_tokens: [B, T, 1, 2 * keypoints].
            state: [B, T * S].

        Returns:
            Output, [B, 3 * T, token_size].
        """
        images = self.image_proj(image_tokens[:, :, 0])
        states = self.state_proj(state.unflatten(1, (self.config.history, -1)))
        actions = self.action_token.expand(images.shape[0], images.shape[1], -1)
        return torch.stack([images, states.to(images.dtype), actions.to(images.dtype)], dim=2).flatten(1, 2)

    def encode(self, x: Tensor) -> Tensor:  # shapes: [B, 3 * T, token_size] -> [B, 3 * T, feature_size]
        x = self.token_proj(x) + self.places.weight
        valid = torch.ones_like(x[..., 0], dtype=torch.bool)
        mask = block_mask(valid, valid)  # causal mask
        for layer in self.layers:
            x = layer(x, mask)
        return self.feature_proj(self.norm(x))

    def read(
        self, image_tokens: Tensor, camera_mask: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor
    ) -> VQBeTContext:
        feature = self.encode(self.embed(image_tokens, state))[:, -1]  # [B, feature_size]
        shape = (LAYERS, self.config.codes)
        return VQBeTContext(
            self.code_proj(feature).float().unflatten(-1, shape),
            self.offset_proj(feature).float().unflatten(-1, (*shape, -1)),
        )

    def embed_time(self, t: Tensor) -> Tensor:
        return torch.zeros(t.shape[0], 1, device=t.device)

    def draw(self, logits: Tensor, noise: Tensor) -> Tensor:
        """Sample one code for each row of the batch, in the same way as ``torch.multinomial``. Return int64 [B].

        Args:
            logits: [B, codes].
            noise: [B, codes], exponential noise.
        """
        return ((logits / self.config.temperature).softmax(dim=-1) / noise).argmax(dim=-1)

    def choose(self, logits: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Sample one code from each of the two code books. Return their indices, int64 [B] each.

        Args:
            logits: [B, 2, codes].
            noise: [B, 2, codes], exponential noise.
        """
        first = self.draw(logits[:, 0], noise[:, 0])
        second = logits[:, 1]
        if self.after_first is not None:
            second = second + self.after_first(first).float()
        return first, self.draw(second, noise[:, 1])

    def decode(
        self, codes: tuple[Tensor, Tensor]
    ) -> Tensor:  # input shape of both codes [B], int64; output shape [B, action_rows * action_dim]
        first, second = (book(code) for book, code in zip(self.books, codes, strict=True))
        return self.decoder(first + second).float()

    def act(self, x: Tensor, time_embedding: Tensor, context: VQBeTContext) -> Tensor:
        config = self.config
        codes = self.choose(context.logits, x[:, :LAYERS, : config.codes])
        actions = self.decode(codes)
        for layer, code in enumerate(codes):
            table = context.offsets[:, layer]  # [B, codes, action_rows * action_dim]
            row = code[:, None, None].expand(-1, 1, table.shape[2])
            actions = actions + table.gather(1, row)[:, 0]
        rows = actions.unflatten(1, (config.action_rows, -1))
        spare = config.max_action_dim - config.action_dim, config.chunk_size - config.action_rows
        return F.pad(rows, (0, spare[0], 0, spare[1]))
