"""VQ-BeT (Lee et al. 2024, arXiv 2403.03181), as LeRobot has it: a causal transformer over the newest observations
chooses two codes of a residual code book, and the action chunk is what they decode to plus an offset.

The transformer reads three tokens of each observation step: the keypoints of the camera's frame, the robot's state, and
one learnt token whose output row stands for the action. Only the newest of these rows is read. A code is drawn from
its distribution: the likeliest of ``p / q``, where q is exponential noise. The policy's noise is this q, so noise of
ones gives the most likely codes. There is no language: prompts are not read.
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

NORM_EPS = 1e-5  # torch's default, which the reference leaves as it is
TOKENS = 3  # tokens of an observation step: frame, state, action
LAYERS = 2  # layers of codes: the second corrects the error of the first
SOLVER = Solver("single", noise="exponential")


@dataclass(frozen=True)
class VQBeTConfig:
    """Sizes of a policy.

    Attributes:
        history: observation steps.
        rows, cols: of the network's last map of a frame.
        token_size: width of a token before the transformer, which is ``hidden_size`` wide.
        feature_size: width of a row behind it.
        codes: entries of each of the two code books, ``code_size`` wide.
        decoder_size: width inside the decoder of a code.
        temperature: of the distribution from which codes are drawn.
        action_rows: action steps of a chunk.
        action_dim: numbers of an action step.
        max_state_dim: numbers of the state of all observation steps.
        sequential: the second code is drawn given the first one.
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
                f"max_state_dim: expected a multiple of {self.history} observation steps, got {self.max_state_dim}"
            )
        if not 0 < self.temperature < float("inf"):
            raise ValueError(f"temperature: expected a number above 0, got {self.temperature}")

    @property
    def chunk_size(self) -> int:
        """Return the rows of noise and of the result: those of a chunk, and at least one for each layer of codes."""
        return max(self.action_rows, LAYERS)

    @property
    def max_action_dim(self) -> int:
        """Return the columns of noise and of the result: those of an action, and at least one for each code."""
        return max(self.action_dim, self.codes)

    @property
    def blocks(self) -> BlockConfig:
        return BlockConfig(self.hidden_size, 4 * self.hidden_size, self.num_layers, self.num_heads)


class VQBeTContext(NamedTuple):
    """What an observation leaves for the choice of codes.

    Attributes:
        logits: [B, 2, codes], of each layer; of the second one without what the first code adds in sequence.
        offsets: [B, 2, codes, action_rows * action_dim], what each code adds to the decoded actions.
    """

    logits: Tensor
    offsets: Tensor


class CodeDecoder(nn.Module):
    """Three linear layers from the sum of two codes to a chunk."""

    def __init__(self, config: VQBeTConfig):
        super().__init__()
        self.fc1 = Linear(config.code_size, config.decoder_size)
        self.fc2 = Linear(config.decoder_size, config.decoder_size)
        self.fc3 = Linear(config.decoder_size, config.action_rows * config.action_dim)

    def forward(self, x: Tensor) -> Tensor:  # [B, code_size] -> [B, action_rows * action_dim]
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


class VQBeT(Model):
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

    def embed_images(self, pixels: Tensor) -> Tensor:  # [B, T, 3, h, w] -> [B, T, 1, 2 * keypoints]
        return self.vision(pixels.flatten(0, 1)).unflatten(0, pixels.shape[:2])[:, :, None]

    def embed(self, image_tokens: Tensor, state: Tensor) -> Tensor:
        """image_tokens: [B, T, 1, 2 * keypoints]; state: [B, T * S] -> [B, 3 * T, token_size], oldest step first."""
        images = self.image_proj(image_tokens[:, :, 0])
        states = self.state_proj(state.unflatten(1, (self.config.history, -1)))
        actions = self.action_token.expand(images.shape[0], images.shape[1], -1)
        return torch.stack([images, states.to(images.dtype), actions.to(images.dtype)], dim=2).flatten(1, 2)

    def encode(self, x: Tensor) -> Tensor:  # [B, 3 * T, token_size] -> [B, 3 * T, feature_size]
        x = self.token_proj(x) + self.places.weight
        valid = torch.ones_like(x[..., 0], dtype=torch.bool)
        mask = block_mask(valid, valid)  # causal
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
        """Return the drawn code, int64 [B]. logits and noise: [B, codes]; as ``torch.multinomial`` draws."""
        return ((logits / self.config.temperature).softmax(dim=-1) / noise).argmax(dim=-1)

    def choose(self, logits: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return the code of each layer, int64 [B]. logits and noise: [B, 2, codes]."""
        first = self.draw(logits[:, 0], noise[:, 0])
        second = logits[:, 1]
        if self.after_first is not None:
            second = second + self.after_first(first).float()
        return first, self.draw(second, noise[:, 1])

    def decode(
        self, codes: tuple[Tensor, Tensor]
    ) -> Tensor:  # int64 [B] each -> [B, action_rows * action_dim]
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
