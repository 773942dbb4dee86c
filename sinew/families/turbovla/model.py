"""TurboVLA (2026, arXiv 2607.27205): two encoders with cross-attention, and a decoder that returns the whole chunk.

DINOv3 encodes each view, and BERT encodes the instruction. In each fusion layer the patches attend to the text and the
text attends to the patches, with the same scores. Then ACT's decoder attends to the patches, the text and the state,
and returns the action chunk in one pass. There is no observation history and no noise. The decoder also attends to the
padding of the instruction, so the padded length changes the result: the prompt always has ``text_rows`` tokens,
including padding.
Source: H-EmbodVis/TurboVLA (``turbovla/models``), in its LIBERO form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinew.families.turbovla.text import Bert, BertConfig, PostNormLayer
from sinew.families.turbovla.vision import NORM_EPS, DINOv3, PatchProjection
from sinew.layers.attention import attend, key_mask
from sinew.layers.fold_sites import FoldSite
from sinew.layers.linear import Embedding, Linear
from sinew.layers.norm import LayerNorm
from sinew.layers.sizes import check_sizes
from sinew.layers.vit import BlockConfig, ViTAttention, ViTConfig
from sinew.models.base import Regression


@dataclass(frozen=True)
class TurboVLAConfig:
    """Sizes of a TurboVLA model.

    Attributes:
        vision: Sizes of DINOv3.
        language: Sizes of BERT.
        rope_theta: Base of the rotary periods in the vision tower.
        projection_size: Inner width of the projection of patches.
        num_views: Number of cameras.
        text_rows: Tokens of every prompt, including padding.
        hidden_size: Width of the fusion layers and of the decoder.
        num_heads: Heads of the decoder. Fusion and text layers have half as many.
        fusion_size: Width of the attention in fusion layers, and inner width of the MLP in text layers.
        fusion_layers: Number of fusion layers. A text layer follows each fusion layer.
        decoder_layers: Layers of the decoder.
        intermediate_size: Inner width of the decoder's MLP.
        state_tokens: Number of tokens that represent the state.
        state_hidden_size: Inner width of the state encoder.
        action_hidden_size: Inner width of the projection to actions.
        chunk_size: Actions in a chunk.
        max_state_dim: Size of the state.
        max_action_dim: Size of an action.
    """

    vision: ViTConfig
    language: BertConfig
    rope_theta: float
    projection_size: int
    num_views: int
    text_rows: int
    hidden_size: int
    num_heads: int
    fusion_size: int
    fusion_layers: int
    decoder_layers: int
    intermediate_size: int
    state_tokens: int
    state_hidden_size: int
    action_hidden_size: int
    chunk_size: int
    max_state_dim: int
    max_action_dim: int

    def __post_init__(self) -> None:
        check_sizes(self)
        if self.hidden_size % self.num_heads or self.fusion_size % self.fusion_heads:
            raise ValueError(
                f"hidden_size, fusion_size: expected multiples of {self.num_heads} and {self.fusion_heads}, their"
                f" numbers of heads, got {self.hidden_size} and {self.fusion_size}"
            )
        if self.hidden_size % self.fusion_heads or self.vision.hidden_size % (4 * self.vision.num_heads):
            raise ValueError(
                f"hidden_size, vision.hidden_size: expected multiples of {self.fusion_heads} and"
                f" {4 * self.vision.num_heads}, got {self.hidden_size} and {self.vision.hidden_size}"
            )
        if not 1 < self.text_rows <= self.language.positions:
            raise ValueError(f"text_rows: expected 2 to {self.language.positions}, got {self.text_rows}")

    @property
    def fusion_heads(self) -> int:
        return max(1, self.num_heads // 2)

    @property
    def text_blocks(self) -> BlockConfig:
        return BlockConfig(self.hidden_size, self.fusion_size, self.fusion_layers, self.fusion_heads)


class TurboVLAContext(NamedTuple):
    """The results of the encoders that each decoder layer attends to, computed once per observation.

    Attributes:
        keys: Keys of each decoder layer, [B, K, H, D].
        values: Values of each decoder layer, [B, K, H, D].
        valid: bool [B, K], False for missing keys.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    valid: Tensor


class FusionLayer(nn.Module):
    """Attention from patches to text and from text to patches. ``v`` means vision and ``l`` means language.

    The result of the attention is added to the normalised input, and not to the input itself as in other transformers.
    """

    def __init__(self, config: TurboVLAConfig):
        super().__init__()
        size, inner = config.hidden_size, config.fusion_size
        self.head_dim = inner // config.fusion_heads
        self.norm_v, self.norm_l = LayerNorm(size, eps=NORM_EPS), LayerNorm(size, eps=NORM_EPS)
        self.v_proj, self.l_proj = Linear(size, inner), Linear(size, inner)
        self.values_v_proj, self.values_l_proj = Linear(size, inner), Linear(size, inner)
        self.out_v_proj, self.out_l_proj = Linear(inner, size), Linear(inner, size)
        self.gamma_v, self.gamma_l = nn.Parameter(torch.ones(size)), nn.Parameter(torch.ones(size))

    def forward(self, v: Tensor, l: Tensor, text_mask: Tensor) -> tuple[Tensor, Tensor]:  # noqa: E741
        """Run the layer.

        Args:
            v: [B, K, C], the patches.
            l: [B, L, C], the text.
            text_mask: bool [B, L], False for tokens that the patches must not attend to.

        Returns:
            The updated patches and text.
        """
        v, l = self.norm_v(v), self.norm_l(l)  # noqa: E741
        parts = self.v_proj(v), self.l_proj(l), self.values_v_proj(v), self.values_l_proj(l)
        vision_heads, text_heads, values_v, values_l = (
            part.unflatten(-1, (-1, self.head_dim)) for part in parts
        )
        everything = torch.ones_like(v[..., 0], dtype=torch.bool)
        to_v = self.out_v_proj(attend(vision_heads, text_heads, values_l, key_mask(text_mask, v.shape[1])))
        to_l = self.out_l_proj(attend(text_heads, vision_heads, values_v, key_mask(everything, l.shape[1])))
        return v + self.gamma_v * to_v, l + self.gamma_l * to_l


class CrossAttention(nn.Module):
    """The attention of the decoder's tokens to the patches, the text and the state."""

    def __init__(self, size: int, num_heads: int):
        super().__init__()
        self.head_dim = size // num_heads
        self.q_proj, self.k_proj = Linear(size, size), Linear(size, size)
        self.v_proj, self.o_proj = Linear(size, size), Linear(size, size)

    def inputs(self) -> tuple[nn.Module, ...]:
        # Only the query projection comes directly after a norm. Keys and values are computed from the encoder's output,
        # which is not normalised.
        return (self.q_proj,)

    def key_value(self, memory: Tensor) -> tuple[Tensor, Tensor]:  # [B, K, C] -> [B, K, H, D] each
        heads = (-1, self.head_dim)
        return self.k_proj(memory).unflatten(-1, heads), self.v_proj(memory).unflatten(-1, heads)

    def forward(self, x: Tensor, kv: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """Attend from x [B, H, C] to the result of :meth:`key_value`.

        Args:
            x: Input, [B, H, C].
            kv: Keys and values, [B, K, H, D] each.
            mask: bool [B, H, K], True if the query may attend to the key.

        Returns:
            Output, [B, H, C].
        """
        return self.o_proj(attend(self.q_proj(x).unflatten(-1, (-1, self.head_dim)), *kv, mask))


class MemoryLayer(nn.Module):
    """A decoder layer like torch's ``TransformerDecoderLayer`` with ``norm_first=True``."""

    def __init__(self, config: TurboVLAConfig):
        super().__init__()
        size = config.hidden_size
        blocks = BlockConfig(size, config.intermediate_size, config.decoder_layers, config.num_heads)
        self.norm1 = LayerNorm(size, eps=NORM_EPS)
        self.attn = ViTAttention(blocks.block(NORM_EPS, "gelu"))
        self.norm2 = LayerNorm(size, eps=NORM_EPS)
        self.cross = CrossAttention(size, config.num_heads)
        self.norm3 = LayerNorm(size, eps=NORM_EPS)
        self.fc1 = Linear(size, config.intermediate_size)
        self.fc2 = Linear(config.intermediate_size, size)

    def fold_sites(self) -> list[FoldSite]:
        return [
            FoldSite(self, "norm1", (self.attn,)),
            FoldSite(self, "norm2", (self.cross,)),
            FoldSite(self, "norm3", (self.fc1,)),
        ]

    def forward(self, x: Tensor, kv: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """Run the layer.

        Args:
            x: Input, [B, H, C].
            kv: Keys and values of the encoder's output, [B, K, H, D] each.
            mask: bool [B, H, K], True if the query may attend to the key.

        Returns:
            Output, [B, H, C].
        """
        x = x + self.attn(self.norm1(x))
        x = x + self.cross(self.norm2(x), kv, mask)
        return x + self.fc2(F.relu(self.fc1(self.norm3(x))))


class StateEncoder(nn.Module):
    """Encodes the state as tokens that the decoder attends to."""

    def __init__(self, config: TurboVLAConfig):
        super().__init__()
        size, count = config.hidden_size, config.state_tokens
        self.input_norm = LayerNorm(config.max_state_dim, eps=NORM_EPS)
        self.fc1 = Linear(config.max_state_dim, config.state_hidden_size)
        self.fc2 = Linear(config.state_hidden_size, count * size)
        self.places = nn.Parameter(torch.zeros(count, size))
        self.output_norm = LayerNorm(size, eps=NORM_EPS)

    def fold_sites(self) -> list[FoldSite]:
        return [FoldSite(self, "input_norm", (self.fc1,))]

    def forward(self, state: Tensor) -> Tensor:  # input shape [B, S], output shape [B, state_tokens, C]
        x = self.fc2(F.gelu(self.fc1(self.input_norm(state))))
        return self.output_norm(x.unflatten(-1, self.places.shape) + self.places)


class ActionProjection(nn.Module):
    """Three linear layers that convert the decoder's output to actions in [-1, 1]."""

    def __init__(self, in_size: int, hidden_size: int, out_size: int):
        super().__init__()
        self.fc1 = Linear(in_size, hidden_size)
        self.fc2 = Linear(hidden_size, hidden_size)
        self.fc3 = Linear(hidden_size, out_size)

    def forward(self, x: Tensor) -> Tensor:  # input shape [B, H, C], output shape [B, H, A]
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x))))).tanh()


class TurboVLA(Regression):
    """TurboVLA: DINOv3, BERT, fusion layers and a decoder."""

    config_type = TurboVLAConfig
    config: TurboVLAConfig
    fusion: Sequence[FusionLayer]
    text_layers: Sequence[PostNormLayer]
    decoder: Sequence[MemoryLayer]

    def __init__(self, config: TurboVLAConfig):
        super().__init__()
        self.config = config
        size, count = config.hidden_size, config.fusion_layers
        self.vision = DINOv3(config.vision, config.rope_theta)
        self.connector = PatchProjection(config.vision.hidden_size, config.projection_size, size)
        self.view_places = nn.Parameter(torch.zeros(config.num_views, size))
        self.language = Bert(config.language, size)
        self.fusion = nn.ModuleList(FusionLayer(config) for _ in range(count))  # type: ignore[assignment]
        self.text_layers = nn.ModuleList(  # type: ignore[assignment]
            PostNormLayer(config.text_blocks, NORM_EPS, F.relu) for _ in range(count)
        )
        self.state = StateEncoder(config)
        self.queries = Embedding(config.chunk_size, size)
        self.decoder = nn.ModuleList(MemoryLayer(config) for _ in range(config.decoder_layers))  # type: ignore[assignment]
        self.action_proj = ActionProjection(size, config.action_hidden_size, config.max_action_dim)

    @property
    def views(self) -> int:
        return self.config.num_views

    @property
    def grid(self) -> tuple[int, int]:
        return self.config.vision.side, self.config.vision.side

    def embed_images(self, pixels: Tensor) -> Tensor:  # shapes: [B, V, 3, height, width] -> [B, V, N, C]
        x = self.connector(self.vision(pixels.flatten(0, 1))).unflatten(0, pixels.shape[:2])
        return x + self.view_places[:, None]

    def fuse(self, image_tokens: Tensor, tokens: Tensor, token_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Run the fusion layers. The arguments are those of :meth:`read`.

        Returns:
            Patches [B, V * N, C] and text [B, L, C].
        """
        layout = self.language.layout(tokens, token_mask)
        v, text = image_tokens.flatten(1, 2), self.language(tokens, layout)
        for fusion, layer in zip(self.fusion, self.text_layers, strict=True):
            v, text = fusion(v, text, layout.words)
            text = layer(text, layout.sees)
        return v, text

    def remember(self, v: Tensor, text: Tensor, token_mask: Tensor, state: Tensor) -> TurboVLAContext:
        """Compute the decoder's keys and values from the patches, the text and the state.

        Args:
            v: [B, V * N, C], the patches.
            text: [B, L, C].
            token_mask: As in :meth:`read`.
            state: As in :meth:`read`.
        """
        memory = torch.cat([v, text, self.state(state).to(v.dtype)], dim=1)
        keys, values = zip(*(layer.cross.key_value(memory) for layer in self.decoder), strict=True)
        patches, state_token = (
            torch.ones_like(v[..., 0], dtype=torch.bool),
            torch.ones_like(token_mask[:, :1]),
        )
        valid = torch.cat([patches, token_mask, state_token.expand(-1, self.config.state_tokens)], dim=1)
        return TurboVLAContext(keys, values, valid)

    def read(
        self, image_tokens: Tensor, camera_mask: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor
    ) -> TurboVLAContext:
        return self.remember(*self.fuse(image_tokens, tokens, token_mask), token_mask, state)

    def decode(self, context: TurboVLAContext) -> Tensor:
        """Run the decoder, and return its output [B, H, C], one row per action."""
        x = self.queries.weight.expand(context.valid.shape[0], -1, -1)
        mask = key_mask(context.valid, x.shape[1])
        for layer, *kv in zip(self.decoder, context.keys, context.values, strict=True):
            x = layer(x, (kv[0], kv[1]), mask)
        return x

    def regress(self, context: TurboVLAContext) -> Tensor:
        return self.action_proj(self.decode(context)).float()
