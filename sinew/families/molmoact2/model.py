"""MolmoAct2 (Fang et al. 2026, arXiv 2605.02881), as LeRobot computes it: flow matching over Molmo2's keys and values.

* A SigLIP 2 tower encodes each view. The hidden states after a few of its layers are joined. Attention pools each
  window of patches, such as 2 x 2, to one token, and a gated MLP projects this token to the width of the language
  model.
* The language model reads the prompt with views, instruction, and the state as one token per value. It is causal,
  except that all tokens of all views attend to each other. An image feature is added to the embedding of its
  placeholder.
* The action expert has one block for each layer of the language model. A block attends to the actions, then to the
  layer's keys and values. Two projections, which all blocks share, convert these keys and values to the width of the
  expert. The solver's time modulates the norms. Euler steps run from noise (t = 0) to actions (t = 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinew.layers.attention import attend, block_mask, key_mask
from sinew.layers.decoder import Decoder, DecoderConfig, KeyValue
from sinew.layers.dit import BiasedAttention
from sinew.layers.linear import Linear
from sinew.layers.norm import modulated_rms, rms_normalize
from sinew.layers.rope import Rotation
from sinew.layers.sizes import check_sizes
from sinew.layers.time_embedding import level_sinusoids
from sinew.layers.vit import VisionTransformer, ViTConfig
from sinew.models.base import Model
from sinew.models.solvers import Solver

SOLVER = Solver(start=0.0, end=1.0)
ROPE_THETA = 10_000.0  # base of the rotary frequencies of the action expert
NORM_EPS = 1e-6  # epsilon of the action expert's norms, except those of queries and keys
PARTS = 9  # shift, scale and gate of the three branches of a block


@dataclass(frozen=True)
class ConnectorConfig:
    """Sizes of the pooling and of the projection behind the vision tower.

    Attributes:
        hidden_size: Width of a pooled token.
        intermediate_size: Inner width of the projection.
        num_heads: Number of attention heads of the pooling.
        window: Rows and columns of the patches that become one token.
        query_mask: True if the query is the mean of the window's patches only, without the padding at the border of
            the grid. False if padding counts as zeros.
        attention_mask: True if the pooling does not attend to padding.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    window: tuple[int, int]
    query_mask: bool = True
    attention_mask: bool = True

    def __post_init__(self) -> None:
        check_sizes(self)
        if self.hidden_size % self.num_heads or min(self.window) < 1:
            raise ValueError(
                f"connector: expected a hidden_size that is a multiple of {self.num_heads} heads, and a window of at"
                f" least one patch, got {self.hidden_size} and {self.window}"
            )


@dataclass(frozen=True)
class ActionExpertConfig:
    """Sizes of the action expert.

    Attributes:
        hidden_size: Width of the hidden states.
        intermediate_size: Inner width of the MLP.
        num_heads: Number of attention heads.
        time_size: Width of the sines and cosines of the solver's time.
        qk_norm_eps: Epsilon of the norms of queries and keys.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    time_size: int
    qk_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        check_sizes(self)
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"expert.hidden_size: expected a multiple of {2 * self.num_heads}, two values for each head, got"
                f" {self.hidden_size}"
            )
        if self.time_size % 2 or self.time_size < 4:
            raise ValueError(f"expert.time_size: expected an even number of at least 4, got {self.time_size}")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


@dataclass(frozen=True)
class MolmoAct2Config:
    """Sizes of the policy.

    Attributes:
        vision: Sizes of the vision tower.
        vision_outputs: Indices of the tower's layers whose hidden states are joined, in this order.
        connector: Sizes of the pooling and projection of image features.
        language: Sizes of the language model.
        expert: Sizes of the action expert.
        vocab_size: Rows of the token table.
        chunk_size: Actions in a chunk.
        max_state_dim: Width of the state. The model reads the state only in the prompt.
        max_action_dim: Width of a padded action.
        image_token: Id of the token to whose embedding an image feature is added.
        view_tokens: Ids of all tokens of a view: placeholders, and marks of its start, its end and its rows.
        skipped_tokens: Ids of tokens that the action expert does not read.
    """

    vision: ViTConfig
    vision_outputs: tuple[int, ...]
    connector: ConnectorConfig
    language: DecoderConfig
    expert: ActionExpertConfig
    vocab_size: int
    chunk_size: int
    max_state_dim: int
    max_action_dim: int
    image_token: int
    view_tokens: tuple[int, ...]
    skipped_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_sizes(self)
        layers = range(self.vision.num_layers)
        if not self.vision_outputs or any(index not in layers for index in self.vision_outputs):
            raise ValueError(
                f"vision_outputs: expected indices of layers, 0 to {len(layers) - 1}, got {self.vision_outputs}"
            )


class JoinedLayers(VisionTransformer):
    """A vision transformer whose output joins the hidden states after several of its layers."""

    def __init__(self, config: ViTConfig, outputs: tuple[int, ...]):
        super().__init__(config)
        self.outputs = outputs

    def encode(self, x: Tensor, rows: int, cols: int) -> Tensor:
        """Encode embedded patches x [B, rows * cols, C] to features [B, rows * cols, layers * C]."""
        x = self.positions(rows, cols) + x
        after = []
        for layer in self.layers:
            x = layer(x)
            after.append(x)
        return torch.cat([after[index] for index in self.outputs], dim=-1)


class PatchPooling(nn.Module):
    """Attention from the mean of each window of patches to the patches of this window."""

    def __init__(self, config: ConnectorConfig, in_size: int):
        super().__init__()
        self.config = config
        self.head_dim = config.hidden_size // config.num_heads
        self.q_proj = Linear(in_size, config.hidden_size)
        self.k_proj = Linear(in_size, config.hidden_size)
        self.v_proj = Linear(in_size, config.hidden_size)
        self.o_proj = Linear(config.hidden_size, config.hidden_size)

    def windows(self, grid: Tensor) -> Tensor:
        """Cut a grid [B, rows, cols, C] into windows [B, windows, patches, C], with zeros for padding.

        The padding is the same on both sides. An odd padding has one more row or column behind the grid.
        """
        sides = zip(self.config.window, grid.shape[1:3], strict=True)
        (top, bottom), (left, right) = (_padding(window, count) for window, count in sides)
        height, width = self.config.window
        grid = F.pad(grid, (0, 0, left, right, top, bottom))
        cut = grid.unflatten(2, (-1, width)).unflatten(1, (-1, height))  # [B, down, h, across, w, C]
        return cut.transpose(2, 3).flatten(3, 4).flatten(1, 2)

    def forward(self, features: Tensor, rows: int, cols: int) -> Tensor:
        """Pool features [B, rows * cols, C] to tokens [B, windows, C']."""
        config, heads = self.config, (-1, self.head_dim)
        patches = self.windows(features.unflatten(1, (rows, cols)))  # [B, W, P, C]
        valid = self.windows(torch.ones_like(features[:1, :, :1]).unflatten(1, (rows, cols)))  # [1, W, P, 1]
        count = valid.sum(dim=2) if config.query_mask else patches.shape[2]
        mean = (patches.sum(dim=2) / count).flatten(0, 1)[:, None]  # [B * W, 1, C]
        flat = patches.flatten(0, 1)  # [B * W, P, C]
        q = self.q_proj(mean).unflatten(-1, heads)
        k, v = (project(flat).unflatten(-1, heads) for project in (self.k_proj, self.v_proj))
        reads = valid > 0 if config.attention_mask else torch.ones_like(valid, dtype=torch.bool)
        mask = reads.expand(features.shape[0], -1, -1, -1).flatten(0, 1).transpose(1, 2)  # [B * W, 1, P]
        return self.o_proj(attend(q, k, v, mask)).unflatten(0, patches.shape[:2])[:, :, 0]


class PatchConnector(nn.Module):
    """The pooling of patches, and a gated MLP to the width of the language model."""

    def __init__(self, config: ConnectorConfig, in_size: int, out_size: int):
        super().__init__()
        self.pool = PatchPooling(config, in_size)
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, out_size, bias=False)

    def forward(self, features: Tensor, rows: int, cols: int) -> Tensor:
        """Convert features [B, rows * cols, C] to image tokens [B, windows, C''] of the language model's width."""
        x = self.pool(features, rows, cols)
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def _padding(window: int, count: int) -> tuple[int, int]:
    """Return the padding before and behind ``count`` rows or columns, which fills up the last window."""
    missing = -count % window
    return missing // 2, missing - missing // 2


class ActionContext(NamedTuple):
    """The results of the prompt that a solver step reads.

    Attributes:
        kv: Keys and values of the prompt for each block, [B, P, heads, D].
        rotation: Rotary positions of the actions.
        own: bool [B, H, H], True if an action attends to another action.
        reads: bool [B, H, P], True if an action attends to a token of the prompt.
    """

    kv: tuple[KeyValue, ...]
    rotation: Rotation
    own: Tensor
    reads: Tensor


class ActionBlock(nn.Module):
    """A block of the action expert: self-attention, attention to the prompt, and a gated MLP.

    The time shifts and scales the input of each branch, and gates its result.
    """

    def __init__(self, config: ActionExpertConfig):
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.head_dim, self.qk_norm_eps = config.head_dim, config.qk_norm_eps
        self.attn = BiasedAttention(size, config.num_heads, config.head_dim, size)
        self.cross_q = Linear(size, size)
        self.cross_o = Linear(size, size)
        self.gate_proj = Linear(size, inner)
        self.up_proj = Linear(size, inner)
        self.down_proj = Linear(inner, size)
        self.modulation = Linear(size, PARTS * size)

    def normalized(self, heads: Tensor) -> Tensor:
        """Normalise queries or keys [B, L, heads, D] per head, without weights."""
        return rms_normalize(heads, self.qk_norm_eps).to(heads.dtype)

    def attend_to_actions(self, x: Tensor, context: ActionContext) -> Tensor:
        (k, v), rotate = self.attn.key_value(x), context.rotation
        q, k = (rotate(self.normalized(heads)) for heads in (self.attn.query(x), k))
        return self.attn.o_proj(attend(q, k, v, context.own))

    def attend_to_prompt(self, x: Tensor, kv: KeyValue, context: ActionContext) -> Tensor:
        q = self.normalized(self.cross_q(x).unflatten(-1, (-1, self.head_dim)))
        return self.cross_o(attend(q, *kv, context.reads))

    def forward(self, x: Tensor, modulation: Tensor, kv: KeyValue, context: ActionContext) -> Tensor:
        """Run the block.

        Args:
            x: [B, H, C].
            modulation: [B, 1, 9 C], shift, scale and gate of each branch.
            kv: Keys and values of the prompt for this block.
            context: The other results of the prompt.

        Returns:
            [B, H, C].
        """
        own_shift, own_scale, own_gate, *rest = modulation.chunk(PARTS, dim=-1)
        prompt_shift, prompt_scale, prompt_gate, shift, scale, gate = rest
        h = modulated_rms(x, own_scale, own_shift, NORM_EPS)
        x = x + (self.attend_to_actions(h, context) * own_gate).to(x.dtype)
        h = modulated_rms(x, prompt_scale, prompt_shift, NORM_EPS)
        x = x + (self.attend_to_prompt(h, kv, context) * prompt_gate).to(x.dtype)
        h = modulated_rms(x, scale, shift, NORM_EPS)
        product = F.silu(self.gate_proj(h)) * self.up_proj(h)
        return x + (self.down_proj(product) * gate).to(x.dtype)


class MolmoAct2(Model):
    """MolmoAct2: flow matching with an action expert that reads each layer of a vision-language model."""

    config_type = MolmoAct2Config
    config: MolmoAct2Config
    solver = SOLVER
    # Both ends of the action expert. LeRobot stores the whole expert in float32, and computes its products in bfloat16.
    float32_modules: ClassVar[tuple[str, ...]] = ("action_in", "action_out", "time_in", "time_out")
    blocks: Sequence[ActionBlock]
    action_mask: Tensor

    def __init__(self, config: MolmoAct2Config):
        super().__init__()
        self.config = config
        size, language = config.expert.hidden_size, config.language
        features = len(config.vision_outputs) * config.vision.hidden_size
        self.vision = JoinedLayers(config.vision, config.vision_outputs)
        self.connector = PatchConnector(config.connector, features, language.hidden_size)
        self.language = Decoder(language, config.vocab_size)
        self.context_k = Linear(language.num_kv_heads * language.head_dim, size, bias=False)
        self.context_v = Linear(language.num_kv_heads * language.head_dim, size, bias=False)
        self.time_in = Linear(config.expert.time_size, size)
        self.time_out = Linear(size, size)
        self.action_in = Linear(config.max_action_dim, size)
        self.blocks = nn.ModuleList(  # type: ignore[assignment]
            ActionBlock(config.expert) for _ in range(language.num_layers)
        )
        self.modulation = Linear(size, 2 * size)
        self.action_out = Linear(size, config.max_action_dim)
        # 1 for values that the robot has, and 0 for the padding after them.
        self.register_buffer("action_mask", torch.zeros(config.max_action_dim))

    @property
    def prefix_depth(self) -> int:
        return self.config.language.num_layers

    def embed_images(self, pixels: Tensor) -> Tensor:
        B, V, _, height, width = pixels.shape
        features = self.vision(pixels.flatten(0, 1))  # [B * V, patches, C]
        return self.connector(features, *self.grid_of(height, width)).unflatten(0, (B, V))

    def embed(self, image_tokens: Tensor, tokens: Tensor, token_mask: Tensor) -> Tensor:
        """Return the language model's input, [B, L, C]. The arguments are those of :meth:`read`."""
        x, flat = self.language.embed_tokens(tokens), image_tokens.flatten(1, 2)  # [B, L, C], [B, N, C]
        placeholder = (tokens == self.config.image_token) & token_mask
        index = (placeholder.long().cumsum(dim=1) - 1).clamp(0, flat.shape[1] - 1)  # [B, L]
        rows = flat.to(x.dtype).gather(1, index[..., None].expand(-1, -1, flat.shape[2]))
        return torch.where(placeholder[..., None], x + rows, x)

    def context_heads(self, heads: Tensor, projection: Linear) -> Tensor:
        """Convert keys or values of a layer, [B, P, Hkv, D], to those of the expert, [B, P, heads, D']."""
        x = projection(heads.flatten(-2))
        return rms_normalize(x, NORM_EPS).to(x.dtype).unflatten(-1, (-1, self.config.expert.head_dim))

    def read(
        self, image_tokens: Tensor, camera_mask: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor
    ) -> ActionContext:
        config, chunk = self.config, self.config.chunk_size
        x = self.embed(image_tokens, tokens, token_mask)
        view = one_of(tokens, config.view_tokens) & token_mask
        mask = block_mask(token_mask, torch.ones_like(token_mask)) | (view[:, :, None] & view[:, None, :])
        _, cache = self.language(x, token_mask.long().cumsum(dim=1) - 1, mask)
        kv = tuple(
            (block.normalized(self.context_heads(k, self.context_k)), self.context_heads(v, self.context_v))
            for block, (k, v) in zip(self.blocks, cache, strict=True)
        )
        actions = torch.ones_like(tokens[:, :1], dtype=torch.bool).expand(-1, chunk)  # [B, H]
        rotation = Rotation.at(actions.long().cumsum(dim=1) - 1, config.expert.head_dim, ROPE_THETA)
        reads = token_mask & ~one_of(tokens, config.skipped_tokens)
        return ActionContext(kv, rotation, key_mask(actions, chunk), key_mask(reads, chunk))

    def cache(self, context: ActionContext) -> Any:
        return context.kv

    def condition(self, t: Tensor) -> Tensor:  # float64 [B] -> [B, C]
        return self.time_out(F.silu(self.time_in(level_sinusoids(t, self.config.expert.time_size))))

    def embed_time(self, t: Tensor) -> Tensor:
        """Return the modulations of all blocks and of the last norm, [B, (9 * blocks + 2) * C]."""
        condition = F.silu(self.condition(t))
        layers = (*(block.modulation for block in self.blocks), self.modulation)
        return torch.cat([layer(condition).float() for layer in layers], dim=-1)

    def act(self, x: Tensor, time_embedding: Tensor, context: ActionContext) -> Tensor:
        size, count = self.config.expert.hidden_size, len(self.blocks)
        ends = (0, *(PARTS * size * (index + 1) for index in range(count)), (PARTS * count + 2) * size)
        *modulations, last = (time_embedding[:, None, start:end] for start, end in pairwise(ends))
        h = self.action_in(x * self.action_mask).to(self.blocks[0].cross_q.dtype)
        for block, modulation, kv in zip(self.blocks, modulations, context.kv, strict=True):
            h = block(h, modulation, kv, context)
        shift, scale = last.chunk(2, dim=-1)
        velocity = self.action_out(modulated_rms(h.float(), scale, shift, NORM_EPS))
        return velocity.float() * self.action_mask


def one_of(tokens: Tensor, ids: Sequence[int]) -> Tensor:
    """Return True for tokens with one of the ids, bool [B, L], for tokens int64 [B, L]."""
    found = torch.zeros_like(tokens, dtype=torch.bool)
    for token in ids:
        found = found | (tokens == token)
    return found
