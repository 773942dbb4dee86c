"""X-VLA (Zheng et al. 2025, arXiv 2510.10274), as LeRobot computes it.

* Florence-2's vision tower encodes each view. The mean of the features and the features themselves become tokens.
* Florence-2's text encoder (BART's encoder) reads the first view and the prompt. The other views go directly to the
  head. The prompt is padded to a fixed length, and the encoder also reads the padding.
* In each solver step one transformer reads noisy actions, the encoded tokens, and learned tokens of one robot
  ("domain"). It predicts the actions themselves, which are mixed with noise again for the next step
  (:class:`sinew.models.solvers.Solver`, "renoise").

A checkpoint has first and last layers and learned tokens for many domains, and a bundle has those of one domain. The
model does not read gripper values: their columns in the first layers are zero. A sigmoid maps the gripper outputs to 0
to 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinew.families.xvla.davit import DaViT, DaViTConfig
from sinew.layers.fold_sites import FoldSite
from sinew.layers.linear import Embedding, Linear
from sinew.layers.norm import LayerNorm
from sinew.layers.sizes import check_sizes
from sinew.layers.time_embedding import cosines_then_sines
from sinew.layers.vit import BlockConfig, ViTAttention, ViTConfig, ViTLayer, ViTMLP
from sinew.models.base import Model
from sinew.models.solvers import Solver

NORM_EPS = 1e-5  # default of torch; the reference implementation uses the default too
LONGEST_PERIOD = 100  # longest period of the time embedding, divided by 2 pi


@dataclass(frozen=True)
class XVLAConfig:
    """Sizes of an X-VLA model.

    Attributes:
        vision: Sizes of the vision tower.
        language: Sizes of the text encoder.
        head: Sizes of the transformer that denoises the actions.
        vocab_size: Number of rows of the token table, which has one row per token id.
        rows: Number of rows of the feature map of a camera view.
        cols: Number of columns of the feature map of a camera view.
        views: Number of views in training. Zeros replace missing views.
        text_places: Largest number of tokens that the text encoder can read.
        places: Largest number of tokens that the head can read, not counting the learned tokens.
        prompt_tokens: Length to which prompts are padded with ``pad_token``.
        chunk_size: Actions in a chunk.
        max_state_dim: Width of the padded state.
        max_action_dim: Width of a padded action.
        time_size: Width of the time embedding.
        domain_tokens: Number of learned tokens of the robot.
        pad_token: Id of the padding token.
        grippers: Indices of gripper values in an action. The model does not read them, and their output goes through a
            sigmoid.
    """

    vision: DaViTConfig
    language: BlockConfig
    head: BlockConfig
    vocab_size: int
    rows: int
    cols: int
    views: int
    text_places: int
    places: int
    prompt_tokens: int
    chunk_size: int
    max_state_dim: int
    max_action_dim: int
    time_size: int
    domain_tokens: int = 0
    pad_token: int = 0
    grippers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_sizes(self)
        if self.time_size % 2:
            raise ValueError(f"time_size: expected an even number, got {self.time_size}")
        if self.pad_token >= self.vocab_size:
            raise ValueError(f"pad_token: expected an id below {self.vocab_size}, got {self.pad_token}")
        text_tokens = self.view_tokens + self.prompt_tokens
        if text_tokens > self.text_places:
            raise ValueError(
                f"text_places: expected at least {text_tokens}, for one view and the prompt, got {self.text_places}"
            )
        head_tokens = self.chunk_size + text_tokens + (self.views - 1) * self.view_tokens
        if head_tokens > self.places:
            raise ValueError(
                f"places: expected at least {head_tokens}, for actions, views and prompt, got {self.places}"
            )
        if list(self.grippers) != sorted({g for g in self.grippers if 0 <= g < self.max_action_dim}):
            raise ValueError(
                f"grippers: expected increasing indices from 0 to {self.max_action_dim - 1}, got {list(self.grippers)}"
            )

    @property
    def view_tokens(self) -> int:
        """Return the number of tokens of a view: one for the mean and one for each feature."""
        return 1 + self.rows * self.cols


class XVLAContext(NamedTuple):
    """The results of an observation that each solver step reads.

    Attributes:
        rows: Tokens of the head that stay constant over the steps, [B, K, C].
        state: Projected state, which is added to each action token, [B, 1, C].
    """

    rows: Tensor
    state: Tensor


class Connector(nn.Module):
    """Converts the features of a camera view to tokens. It adds position embeddings, and projects and normalises the
    features and their mean."""

    def __init__(self, config: XVLAConfig):
        super().__init__()
        width, size = config.vision.widths[-1], config.language.hidden_size
        self.register_buffer("places", torch.zeros(config.rows * config.cols, width))
        self.proj = Linear(width, size, bias=False)
        self.norm = LayerNorm(size, eps=NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:  # input shape [B, N, C], output shape [B, 1 + N, C']
        x = x + self.places  # type: ignore[operator]
        return self.norm(self.proj(torch.cat([x.mean(dim=1, keepdim=True), x], dim=1)))


class TextLayer(nn.Module):
    """A transformer layer whose norms come after the residual additions."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.attn = ViTAttention(config)
        self.norm1 = LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = ViTMLP(config)
        self.norm2 = LayerNorm(config.hidden_size, eps=config.norm_eps)

    def forward(self, x: Tensor) -> Tensor:  # [B, L, C]
        x = self.norm1(x + self.attn(x))
        return self.norm2(x + self.mlp(x))


class TextEncoder(nn.Module):
    """BART's encoder (Lewis et al. 2019, arXiv 1910.13461) over embeddings of image and text. Every token
    attends to every token, including padding.
    """

    layers: Sequence[TextLayer]

    def __init__(self, config: XVLAConfig):
        super().__init__()
        size, block = config.language.hidden_size, config.language.block(NORM_EPS, "gelu")
        self.embed_tokens = Embedding(config.vocab_size, size)
        self.places = nn.Parameter(torch.zeros(config.text_places, size))
        self.norm = LayerNorm(size, eps=NORM_EPS)
        self.layers = nn.ModuleList(TextLayer(block) for _ in range(config.language.num_layers))  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:  # [B, L, C]
        x = self.norm(x + self.places[: x.shape[1]])
        for layer in self.layers:
            x = layer(x)
        return x


class XVLA(Model):
    """X-VLA: Florence-2 and a transformer that denoises the actions."""

    config_type = XVLAConfig
    config: XVLAConfig
    per_embodiment: ClassVar[tuple[str, ...]] = (
        *("action_in_proj", "state_proj", "time_proj", "action_out_proj", "domain_rows"),
        *("language_proj", "view_proj"),
    )
    solver = Solver("renoise")
    layers: Sequence[ViTLayer]

    def __init__(self, config: XVLAConfig):
        super().__init__()
        self.config = config
        size, block = config.head.hidden_size, config.head.block(NORM_EPS, "gelu_tanh")
        self.vision = DaViT(config.vision)
        self.connector = Connector(config)
        self.language = TextEncoder(config)
        self.language_proj = Linear(config.language.hidden_size, size)
        self.view_proj = Linear(config.language.hidden_size, size)
        self.places = nn.Parameter(torch.zeros(config.places, size))
        rows = torch.zeros(config.domain_tokens, size)
        self.domain_rows = nn.Parameter(rows) if config.domain_tokens else None
        self.state_proj = Linear(config.max_state_dim, size, bias=False)
        self.time_proj = Linear(config.time_size, size, bias=False)
        self.action_in_proj = Linear(config.max_action_dim, size)
        self.layers = nn.ModuleList(ViTLayer(block) for _ in range(config.head.num_layers))  # type: ignore[assignment]
        self.norm = LayerNorm(size, eps=NORM_EPS)
        self.action_out_proj = Linear(size, config.max_action_dim)

    @property
    def grid(self) -> tuple[int, int]:
        return self.config.rows, self.config.cols

    def fold_sites(self) -> list[FoldSite]:
        return [FoldSite(self, "norm", (self.action_out_proj,))]

    @property
    def head_reads_state(self) -> bool:
        return True

    def renew(self, context: XVLAContext, state: Tensor) -> XVLAContext:
        return context._replace(state=self.state_proj(state)[:, None])

    def embed_images(
        self, pixels: Tensor
    ) -> Tensor:  # input shape [B, V, 3, height, width], output shape [B, V, 1 + rows * cols, C]
        return self.connector(self.vision(pixels.flatten(0, 1))).unflatten(0, pixels.shape[:2])

    def views_of(self, image_tokens: Tensor, camera_mask: Tensor) -> Tensor:
        """Return the tokens of all camera views that the policy was trained with, [B, views, N, C]. Tokens of
        missing views are zeros."""
        available = image_tokens.masked_fill(~camera_mask[:, :, None, None], 0.0)
        return F.pad(available, (0, 0, 0, 0, 0, self.config.views - image_tokens.shape[1]))

    def filled(self, tokens: Tensor, token_mask: Tensor) -> Tensor:
        """Return the token ids of the prompt, padded to the same length as in training, int64 [B, prompt_tokens]."""
        spare, pad = self.config.prompt_tokens - tokens.shape[1], self.config.pad_token
        return F.pad(tokens.masked_fill(~token_mask, pad), (0, spare), value=pad)

    def embed_text(self, first: Tensor, tokens: Tensor) -> Tensor:
        """Return the text encoder's input, [B, L, C].

        Args:
            first: [B, N, C], tokens of the first view.
            tokens: int64 [B, prompt_tokens].
        """
        return torch.cat(
            [first.to(self.language.embed_tokens.dtype), self.language.embed_tokens(tokens)], dim=1
        )

    def head_rows(self, text: Tensor, others: Tensor) -> Tensor:
        """Return the head's tokens that stay constant over the solver steps, [B, K, C'].

        Args:
            text: [B, L, C], output of the text encoder.
            others: [B, V, N, C], tokens of the views after the first. The learned tokens of the domain come last.
        """
        B, H = text.shape[0], self.config.chunk_size
        rows = torch.cat([self.language_proj(text), self.view_proj(others.flatten(1, 2))], dim=1)
        rows = rows + self.places[H : H + rows.shape[1]]
        return (
            rows if self.domain_rows is None else torch.cat([rows, self.domain_rows.expand(B, -1, -1)], dim=1)
        )

    def read(
        self, image_tokens: Tensor, camera_mask: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor
    ) -> XVLAContext:
        views = self.views_of(image_tokens, camera_mask)
        text = self.language(self.embed_text(views[:, 0], self.filled(tokens, token_mask)))
        return XVLAContext(self.head_rows(text, views[:, 1:]), self.state_proj(state)[:, None])

    def embed_time(self, t: Tensor) -> Tensor:
        return self.time_proj(cosines_then_sines(t, self.config.time_size, LONGEST_PERIOD))

    def embed_actions(self, x: Tensor, time_embedding: Tensor, context: XVLAContext) -> Tensor:
        """Return the head's tokens of noisy actions [B, H, A], without position embeddings, [B, H, C]."""
        return self.action_in_proj(x) + context.state + time_embedding[:, None]

    def act(self, x: Tensor, time_embedding: Tensor, context: XVLAContext) -> Tensor:
        H = x.shape[1]
        h = self.embed_actions(x, time_embedding, context) + self.places[:H]
        h = torch.cat([h, context.rows.to(h.dtype)], dim=1)
        for layer in self.layers:
            h = layer(h)
        return self.closed(self.action_out_proj(self.norm(h[:, :H])).float())

    def closed(self, actions: Tensor) -> Tensor:
        """Apply a sigmoid to the gripper values of the actions [B, H, A], and return the actions."""
        parts, start = [], 0
        for index in self.config.grippers:
            parts += [actions[..., start:index], actions[..., index : index + 1].sigmoid()]
            start = index + 1
        return torch.cat([*parts, actions[..., start:]], dim=-1) if parts else actions
