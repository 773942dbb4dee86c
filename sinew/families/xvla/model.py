"""X-VLA (Zheng et al. 2025, arXiv 2510.10274), as LeRobot runs it.

* Florence-2's tower sees each view: the mean of its features and the features themselves become tokens.
* Florence-2's text encoder (BART's) reads the first view and the prompt; the other views go past it. The prompt is
  filled up to a fixed length, and what fills it is read.
* One transformer reads noisy actions, what was encoded, and learned tokens of one robot ("domain"), in every step. It
  says the actions themselves, which are mixed with the noise again (:class:`sinew.models.solvers.Solver`, "renoise").

Upstream's files hold first and last layers and tokens of many domains; a bundle has those of one. A gripper's numbers
are not read: its columns in the first layers are zero. Its answer goes through a sigmoid.
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

NORM_EPS = 1e-5  # torch's default, which the reference leaves as it is
LONGEST = 100  # period of the time's waves, over 2 pi


@dataclass(frozen=True)
class XVLAConfig:
    """Sizes of an X-VLA model.

    Attributes:
        rows: Rows of a view's features.
        cols: Columns of a view's features.
        views: Views of training; zeros replace missing ones.
        text_places: Most tokens of the text encoder.
        places: Most tokens of the head, without learned tokens.
        prompt_tokens: Length to which prompts are filled up with ``pad_token``.
        domain_tokens: Learned tokens of the robot.
        grippers: Numbers of an action that are not read, and output through a sigmoid.
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
            raise ValueError(f"pad_token: expected one of {self.vocab_size} tokens, got {self.pad_token}")
        read = self.view_tokens + self.prompt_tokens
        if read > self.text_places:
            raise ValueError(
                f"text_places: expected {read} or more, a view's and a prompt's, got {self.text_places}"
            )
        seen = self.chunk_size + read + (self.views - 1) * self.view_tokens
        if seen > self.places:
            raise ValueError(
                f"places: expected {seen} or more, those of actions, views and prompt, got {self.places}"
            )
        if list(self.grippers) != sorted({g for g in self.grippers if 0 <= g < self.max_action_dim}):
            raise ValueError(
                f"grippers: expected rising numbers from 0 to {self.max_action_dim - 1}, got {list(self.grippers)}"
            )

    @property
    def view_tokens(self) -> int:
        """Return the number of tokens of a view: the mean, and one of each feature."""
        return 1 + self.rows * self.cols


class XVLAContext(NamedTuple):
    """Tokens of the head that each step finds as they are, [B, K, C], and the state's share of those of the actions,
    [B, 1, C]."""

    rows: Tensor
    state: Tensor


class Connector(nn.Module):
    """Features with their places -> their mean, then themselves, projected and normed."""

    def __init__(self, config: XVLAConfig):
        super().__init__()
        width, size = config.vision.widths[-1], config.language.hidden_size
        self.register_buffer("places", torch.zeros(config.rows * config.cols, width))
        self.proj = Linear(width, size, bias=False)
        self.norm = LayerNorm(size, eps=NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:  # [B, N, C] -> [B, 1 + N, C']
        x = x + self.places  # type: ignore[operator]
        return self.norm(self.proj(torch.cat([x.mean(dim=1, keepdim=True), x], dim=1)))


class TextLayer(nn.Module):
    """A block with norms behind its branches."""

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
    """BART's encoder (Lewis et al. 2019, arXiv 1910.13461) over rows of any kind, all of which are read."""

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
    ) -> Tensor:  # [B, V, 3, height, width] -> [B, V, 1 + rows * cols, C]
        return self.connector(self.vision(pixels.flatten(0, 1))).unflatten(0, pixels.shape[:2])

    def views_of(self, image_tokens: Tensor, camera_mask: Tensor) -> Tensor:
        """Return the tokens of all views that training had, [B, views, N, C]: zeros for those that are missing."""
        seen = image_tokens.masked_fill(~camera_mask[:, :, None, None], 0.0)
        return F.pad(seen, (0, 0, 0, 0, 0, self.config.views - image_tokens.shape[1]))

    def filled(self, tokens: Tensor, token_mask: Tensor) -> Tensor:
        """Return the prompt as it was trained, int64 [B, prompt_tokens], padding included."""
        spare, pad = self.config.prompt_tokens - tokens.shape[1], self.config.pad_token
        return F.pad(tokens.masked_fill(~token_mask, pad), (0, spare), value=pad)

    def embed_text(self, first: Tensor, tokens: Tensor) -> Tensor:
        """first: tokens of the first view, [B, N, C]; tokens: int64 [B, prompt_tokens] -> [B, L, C]."""
        return torch.cat(
            [first.to(self.language.embed_tokens.dtype), self.language.embed_tokens(tokens)], dim=1
        )

    def head_rows(self, text: Tensor, others: Tensor) -> Tensor:
        """text: [B, L, C], encoded; others: [B, V, N, C], views behind the first -> [B, K, C'], domain's behind."""
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
        return self.time_proj(cosines_then_sines(t, self.config.time_size, LONGEST))

    def embed_actions(self, x: Tensor, time_embedding: Tensor, context: XVLAContext) -> Tensor:
        """Return the head's tokens of noisy actions [B, H, A], without their places: [B, H, C]."""
        return self.action_in_proj(x) + context.state + time_embedding[:, None]

    def act(self, x: Tensor, time_embedding: Tensor, context: XVLAContext) -> Tensor:
        H = x.shape[1]
        h = self.embed_actions(x, time_embedding, context) + self.places[:H]
        h = torch.cat([h, context.rows.to(h.dtype)], dim=1)
        for layer in self.layers:
            h = layer(h)
        return self.closed(self.action_out_proj(self.norm(h[:, :H])).float())

    def closed(self, actions: Tensor) -> Tensor:
        """Return the actions with those numbers that are grippers' through a sigmoid, [B, H, A]."""
        parts, start = [], 0
        for index in self.config.grippers:
            parts += [actions[..., start:index], actions[..., index : index + 1].sigmoid()]
            start = index + 1
        return torch.cat([*parts, actions[..., start:]], dim=-1) if parts else actions
