"""Small models that differ from SmolVLA and pi in the features that engines depend on. They compute nothing
meaningful.

* ``TwoTowers``: two vision towers for six channels, a bidirectional language model with action slots after the prompt,
  and a head that is called once (as OpenVLA-OFT).
* ``HiddenStates``: one tower, a causal language model whose hidden states are the context, and a transformer head with
  cross-attention to them. The solver time runs from 0 to 1 (as GR00T).
* ``Ternary``: ``TwoTowers`` with ternary layers.
* ``Speaking``: a causal language model that generates a chunk token by token and may stop early (as pi0-FAST).
* ``Convolutions``: no language, no attention, and other names than the other models. It has convolutions with buffers
  for a fixed number of views, and a convolutional head that runs its own table of steps (as Diffusion Policy).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinew.core import SinewError
from sinew.core.fields import Side
from sinew.layers.attention import attend, block_mask
from sinew.layers.decoder import Decoder, DecoderConfig
from sinew.layers.linear import Embedding, Linear
from sinew.layers.norm import LayerNorm
from sinew.layers.vit import VisionTransformer, ViTConfig
from sinew.models.base import Model, Regression
from sinew.models.solvers import Solver
from sinew.models.speaker import DecoderSpeaker, ReadPrompt
from sinew.steps import registry
from sinew.steps.action_tokens.base import ActionTokens

SIDE, PATCH = 16, 8
TOWER = ViTConfig(32, 48, 2, 4, SIDE, PATCH, 1e-6)
LANGUAGE = DecoderConfig(
    hidden_size=40,
    intermediate_size=56,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    norm_eps=1e-6,
    rope_theta=1e4,
)


@dataclass(frozen=True)
class Config:
    chunk_size: int = 6
    max_state_dim: int = 5
    max_action_dim: int = 7
    vocab_size: int = 50
    vision: ViTConfig = TOWER
    language: DecoderConfig = LANGUAGE


class TernaryLinear(Linear):
    """A linear layer with weights of -1, 0 and 1 times one scale for the whole matrix."""

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight.abs().mean()
        weight = (self.weight / scale).round().clamp(-1, 1) * scale
        return F.linear(x.to(weight.dtype), weight, self.bias)


class Slots(NamedTuple):
    """The context that the head reads: hidden states of the action slots, [B, H, A * C]."""

    hidden: Tensor


class TwoTowers(Regression):
    config_type = Config

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        width = config.language.hidden_size
        self.vision = nn.ModuleList([VisionTransformer(config.vision), VisionTransformer(config.vision)])
        self.connector = nn.Sequential(
            Linear(2 * config.vision.hidden_size, width), nn.GELU(), Linear(width, width)
        )
        self.language = Decoder(config.language, config.vocab_size)
        self.proprio = Linear(config.max_state_dim, width)
        self.head = nn.Sequential(
            LayerNorm(config.max_action_dim * width),
            Linear(config.max_action_dim * width, 64),
            nn.ReLU(),
            Linear(64, config.max_action_dim),
        )

    @property
    def channels(self) -> int:
        return 6

    def embed_images(self, pixels: Tensor) -> Tensor:
        B, V = pixels.shape[:2]
        halves = pixels.flatten(0, 1).chunk(2, dim=1)  # two halves, [B * V, 3, height, width] each
        features = [tower(half) for tower, half in zip(self.vision, halves, strict=True)]
        return self.connector(torch.cat(features, dim=-1)).unflatten(0, (B, V))

    def read(
        self, image_tokens: Tensor, camera_mask: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor
    ) -> Slots:
        B, V, N, C = image_tokens.shape
        slots = self.config.chunk_size * self.config.max_action_dim
        embed = self.language.embed_tokens
        zeros = image_tokens.new_zeros(B, slots, C)
        x = torch.cat([image_tokens.flatten(1, 2), self.proprio(state)[:, None], embed(tokens), zeros], dim=1)
        here = torch.ones(B, 1, dtype=torch.bool, device=state.device)
        valid = torch.cat(
            [camera_mask.repeat_interleave(N, dim=1), here, token_mask, here.expand(B, slots)], dim=1
        )
        positions = valid.long().cumsum(dim=1) - 1
        x, _ = self.language(x, positions, block_mask(valid, torch.zeros_like(valid)))
        # The first action slot reads the last token of the prompt. With padding on the left, this token is directly
        # before the slot.
        hidden = self.language.norm(x[:, -slots - 1 : -1])
        return Slots(hidden.unflatten(1, (self.config.chunk_size, -1)).flatten(2))

    def regress(self, context: Slots) -> Tensor:
        return self.head(context.hidden).float()


class Conditioning(NamedTuple):
    """The context: hidden states [B, P, C] with their mask [B, P], and the token of the state [B, 1, D].

    The mask occurs twice, and one of both is an input that is passed through.
    """

    hidden: Tensor
    valid: Tensor
    state: Tensor
    again: dict[str, Tensor]
    nothing: None = None


class HiddenStates(Model):
    config_type = Config
    solver = Solver(start=0.0, end=1.0)
    WIDTH, HEADS = 48, 2  # the head size is 24, which no kernel supports

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        width, D = config.language.hidden_size, self.WIDTH
        self.vision = VisionTransformer(config.vision)
        self.connector = Linear(config.vision.hidden_size, width)
        self.language = Decoder(config.language, config.vocab_size)
        self.encode = nn.Sequential(Linear(config.max_state_dim, D), nn.ReLU(), Linear(D, D))
        self.buckets = Embedding(1000, D)
        self.actions_in = Linear(config.max_action_dim, D)
        self.blocks = nn.ModuleList(Block(D, width) for _ in range(2))
        self.actions_out = Linear(D, config.max_action_dim)

    def embed_images(self, pixels: Tensor) -> Tensor:
        return self.connector(self.vision(pixels.flatten(0, 1))).unflatten(0, pixels.shape[:2])

    def read(
        self, image_tokens: Tensor, camera_mask: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor
    ) -> Conditioning:
        x = torch.cat([image_tokens.flatten(1, 2), self.language.embed_tokens(tokens)], dim=1)
        seen = camera_mask.repeat_interleave(image_tokens.shape[2], dim=1)
        valid = torch.cat([seen, token_mask], dim=1)
        positions = valid.long().cumsum(dim=1) - 1
        x, _ = self.language(x, positions, block_mask(valid, torch.ones_like(valid)))
        return Conditioning(self.language.norm(x), valid, self.encode(state)[:, None], {"valid": valid})

    def embed_time(self, t: Tensor) -> Tensor:  # maps float64 [B] to [B, D]
        return self.buckets((t * 1000).long())

    def act(self, x: Tensor, time_embedding: Tensor, context: Conditioning) -> Tensor:
        h = torch.cat([context.state, self.actions_in(x)], dim=1)
        for block in self.blocks:
            h = block(h, time_embedding, context.hidden, context.again["valid"])
        return self.actions_out(h[:, -self.config.chunk_size :]).float()


class Block(nn.Module):
    """A block with cross-attention, whose norm the time modulates."""

    def __init__(self, width: int, context: int):
        super().__init__()
        self.modulate = Linear(width, 2 * width)
        self.q, self.k, self.v = Linear(width, width), Linear(context, width), Linear(context, width)
        self.out = Linear(width, width)

    def forward(self, h: Tensor, time_embedding: Tensor, hidden: Tensor, valid: Tensor) -> Tensor:
        scale, shift = self.modulate(F.silu(time_embedding))[:, None].chunk(2, dim=-1)
        n = F.layer_norm(h, h.shape[-1:]) * (1 + scale) + shift
        heads = (HiddenStates.HEADS, -1)
        q, k, v = (part.unflatten(-1, heads) for part in (self.q(n), self.k(hidden), self.v(hidden)))
        return h + self.out(attend(q, k, v, valid[:, None].expand(-1, h.shape[1], -1)))


@dataclass(frozen=True)
class Counted(ActionTokens):
    """An action tokenizer: a token is a number, and missing numbers are zero."""

    most: Side
    end: int
    rows: Side
    dims: Side
    kind: Literal["counted"] = field(default="counted", kw_only=True)

    def chunk(self, said: np.ndarray) -> np.ndarray:
        if said[:1].tolist() == [self.end + 1]:
            raise SinewError(f"said: the first token must not be {self.end + 1}")
        found = np.zeros(self.rows * self.dims, np.float32)
        found[: len(said)] = said[: len(found)]
        return found.reshape(self.rows, self.dims)


@dataclass(frozen=True)
class Speech(Config):
    most: int = 12
    end: int = -1


class Speaking(DecoderSpeaker):
    config_type = Speech

    def __init__(self, config: Speech):
        super().__init__()
        self.config = config
        self.vision = VisionTransformer(config.vision)
        self.connector = Linear(config.vision.hidden_size, config.language.hidden_size)
        self.language = Decoder(config.language, config.vocab_size)
        self.lm_head = Linear(config.language.hidden_size, config.vocab_size, bias=False)

    @property
    def action_tokens(self) -> Counted:
        config = self.config
        return Counted(config.most, config.end, config.chunk_size, config.max_action_dim)

    def embed_images(self, pixels: Tensor) -> Tensor:
        return self.connector(self.vision(pixels.flatten(0, 1))).unflatten(0, pixels.shape[:2])

    def read(
        self, image_tokens: Tensor, camera_mask: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor
    ) -> ReadPrompt:
        x = torch.cat([image_tokens.flatten(1, 2), self.language.embed_tokens(tokens)], dim=1)
        seen = camera_mask.repeat_interleave(image_tokens.shape[2], dim=1)
        valid = torch.cat([seen, token_mask], dim=1)
        positions = valid.long().cumsum(dim=1) - 1
        h, kv = self.language(x, positions, block_mask(valid, torch.ones_like(valid)))
        return ReadPrompt(tuple(kv), valid, valid.sum(dim=1), h[:, -1:])  # the padding is on the left

    def embed_token(self, token: Tensor) -> Tensor:
        return self.language.embed_tokens(token)

    def logits(self, h: Tensor) -> Tensor:
        return self.lm_head(h)


class Ternary(TwoTowers):
    """``TwoTowers`` with ternary layers in the language model."""

    def __init__(self, config: Config):
        super().__init__(config)
        for module in list(self.language.layers.modules()):
            if type(module) is Linear:
                module.__class__ = TernaryLinear


class EveryField(HiddenStates):
    """``HiddenStates`` with all optional fields of the layers that SmolVLA and pi do not use."""

    CONFIG = Config(
        vision=replace(TOWER, activation="gelu", prefix_tokens=3, layer_scale=True, final_norm=False),
        language=replace(
            LANGUAGE, activation="relu2", norm="gemma_rms", qkv_bias=True, qk_norm=True, sub_norms=True
        ),
    )


@dataclass(frozen=True)
class Trajectory:
    """A configuration without vocabulary and without chunk_size, which follows from other sizes."""

    views: int = 2
    rows: int = 8
    action: int = 3
    state: int = 5
    width: int = 16


class Condition(NamedTuple):
    """The context: a vector [B, C] that modulates the head."""

    rows: Tensor


class Convolutions(Model):
    config_type = Trajectory
    solver = Solver("table", table=((60.0, 0.0, 1.0), (30.0, 0.0, 1.0), (0.0, 0.0, 1.0)))

    def __init__(self, config: Trajectory):
        super().__init__()
        self.config = config
        C = config.width
        self.vision = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, C, 3, 2, 1)
        )
        places = torch.linspace(-1, 1, SIDE // 4)
        self.register_buffer("places", torch.cartesian_prod(places, places))  # shape [h w / 16, 2]
        self.connector = Linear(2 * C, C)
        self.film = Linear(config.state + (config.views + 1) * C, 2 * C)
        self.down, self.up = nn.Conv1d(config.action, C, 3, 2, 1), nn.ConvTranspose1d(C, C, 4, 2, 1)
        self.norm, self.out = nn.GroupNorm(4, C), nn.Conv1d(C, config.action, 1)

    @property
    def noise_shape(self) -> tuple[int, int]:
        return self.config.rows, self.config.action

    @property
    def state_size(self) -> int:
        return self.config.state

    @property
    def views(self) -> int:
        return self.config.views

    def embed_images(self, pixels: Tensor) -> Tensor:  # maps [B, V, 3, h, w] to [B, V, 1, C]
        maps = self.vision(pixels.flatten(0, 1)).flatten(2).softmax(dim=-1)  # shape [B * V, C, h w / 16]
        points = (maps @ self.places).flatten(1)  # shape [B * V, 2 C]
        return self.connector(points).unflatten(0, pixels.shape[:2])[:, :, None]

    def read(
        self, image_tokens: Tensor, camera_mask: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor
    ) -> Condition:
        return Condition(torch.cat([state, image_tokens.flatten(1)], dim=-1))

    def embed_time(
        self, t: Tensor
    ) -> Tensor:  # maps [B] to [B, C + 1]; the last value is a weight of the noise
        angle = t.float()[:, None] * torch.exp(-torch.arange(self.config.width // 2, device=t.device))
        return torch.cat([angle.sin(), angle.cos(), t.float()[:, None] / 100], dim=-1)

    def act(self, x: Tensor, time_embedding: Tensor, context: Condition) -> Tensor:
        """Run one step. The time embedding has only one row, also for a larger batch."""
        time, noisy = time_embedding[:, :-1].expand(x.shape[0], -1), time_embedding[:, -1:, None]
        scale, shift = self.film(torch.cat([time, context.rows], dim=-1))[..., None].chunk(2, dim=1)
        h = F.mish(self.norm(self.up(scale * self.down(x.transpose(1, 2)) + shift)))  # shape [B, C, H]
        output = self.out(h).transpose(1, 2)
        return (x - noisy * output).clamp(-1, 1) + noisy * output


registry.ACTION_TOKENS["counted"] = f"{__name__}:Counted"
KINDS: dict[str, type[TwoTowers] | type[HiddenStates] | type[Convolutions] | type[Speaking]] = {
    "two towers": TwoTowers,
    "hidden states": HiddenStates,
    "speaking": Speaking,
    "ternary": Ternary,
    "every field": EveryField,
    "convolutions": Convolutions,
}


def make(kind: str, seed: int = 0, **sizes: int) -> Model:
    """Make a model of one kind.

    Args:
        kind: Key of the table of models.
        seed: Seed of the weights. Norms are far from one and biases far from zero, so that each weight has an effect.
        sizes: Fields of the configuration.
    """
    generator = torch.Generator().manual_seed(seed)
    cls = KINDS[kind]
    model: Model = (
        cls(replace(getattr(cls, "CONFIG", cls.config_type()), **sizes)).eval().requires_grad_(False)
    )
    for parameter in model.parameters():
        scale = 1.0 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
        parameter.data = scale * torch.randn(parameter.shape, generator=generator) + (parameter.ndim == 1)
    return model
