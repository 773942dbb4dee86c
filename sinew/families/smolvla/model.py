"""SmolVLA (Shukor et al. 2025, arXiv 2506.01844), as LeRobot 0.6 computes it.

* A SigLIP tower, a pixel shuffle and one linear layer encode each 512 x 512 view as 64 tokens.
* The first layers of a small language model read the prefix [views | instruction | state]. The prefix is one
  bidirectional block, except that only the state attends to the state.
* An action expert with a smaller width converts noisy actions to velocities of flow matching. Its layers alternate.
  Self layers attend causally to the actions, and to the keys and values of a language model layer. Cross layers attend
  only to the prefix, whose keys and values they project again.

The reference always uses a rotary base of 10,000 and ignores the language model's configuration. The converter writes
this value to the bundle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinew.layers.attention import key_mask
from sinew.layers.connector import PixelShuffleConnector
from sinew.layers.decoder import Decoder, DecoderConfig, DecoderLayer, KeyValue, decoder_norm
from sinew.layers.linear import Linear, rounded
from sinew.layers.rope import Rotation
from sinew.layers.time_embedding import sinusoidal_embedding
from sinew.layers.vit import VisionTransformer, ViTConfig
from sinew.models.expert import ExpertContext, ExpertModel, FlowConfig, LMHead, Prefix


@dataclass(frozen=True)
class SmolVLAConfig(FlowConfig):
    """Sizes and options of SmolVLA.

    Attributes:
        vision: Sizes of the SigLIP tower.
        language: Sizes of the language model.
        expert: Sizes of the action expert.
        pixel_shuffle: One image token is made from a square of patches. This is the number of patches along its side.
        self_attn_every_n_layers: Layer i of the expert is a self layer if i % n == 0. 0 means that there is no self
            layer.
        prefix_length: Shorter prefixes are padded at the end to this length. 0 means no padding.
        image_start_tokens: Ids of the tokens before each camera view. May be empty.
        image_end_tokens: Ids of the tokens after each camera view. May be empty.
        state_in_head: True if the state is a token of the expert, before the actions, instead of the last token of the
            prefix. A newer state then needs no new prefix. For streams (docs/stream.md); LeRobot has no such option.
        rolling: True if the policy was trained with one time per action, and on action windows that a newer state
            contradicts. For streams; LeRobot has no such option.
        lm_head: How the language head, which generates text, is stored: "", "own" or "tied" (the same tensor as the
            token table).
    """

    vision: ViTConfig
    language: DecoderConfig
    expert: DecoderConfig
    pixel_shuffle: int
    self_attn_every_n_layers: int = 0
    prefix_length: int = 0
    image_start_tokens: tuple[int, ...] = ()
    image_end_tokens: tuple[int, ...] = ()
    state_in_head: bool = False
    rolling: bool = False
    lm_head: LMHead = ""

    def __post_init__(self) -> None:
        if self.rolling and not self.state_in_head:
            raise ValueError("rolling: requires state_in_head; set both to true")
        if self.language.num_layers % self.expert.num_layers:
            raise ValueError(
                f"language.num_layers: expected a multiple of {self.expert.num_layers}, the number of expert layers,"
                f" got {self.language.num_layers}"
            )
        super().__post_init__()
        for index in range(self.language.num_layers):
            if self.is_self_layer(index) and index % self.stride:
                raise ValueError(
                    f"self_attn_every_n_layers: language layer {index} has self-attention but no expert layer; use a"
                    f" multiple of {self.stride}"
                )

    @property
    def stride(self) -> int:
        """Number of language model layers for each layer of the expert.

        Expert layer e reads the keys and values of language layer e * stride.
        """
        return self.language.num_layers // self.expert.num_layers

    def is_self_layer(self, index: int) -> bool:
        """Return True if the layer of the expert that belongs to language layer ``index`` is a self layer, which
        attends to the actions."""
        return self.self_attn_every_n_layers > 0 and index % self.self_attn_every_n_layers == 0


class SmolVLAExpert(nn.Module):
    """The action expert of SmolVLA. Its self layers attend to the prefix (views, instruction and state) and to the
    actions. Its cross layers attend only to the prefix.
    """

    layers: Sequence[DecoderLayer]

    def __init__(self, config: SmolVLAConfig):
        super().__init__()
        kv_size = config.language.num_kv_heads * config.language.head_dim
        self.is_self = [config.is_self_layer(e * config.stride) for e in range(config.expert.num_layers)]
        self.layers = nn.ModuleList(  # type: ignore[assignment]
            DecoderLayer(config.expert, None if is_self else kv_size) for is_self in self.is_self
        )
        self.norm = decoder_norm(config.expert)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the hidden states."""
        return self.norm.dtype


class SmolVLA(ExpertModel):
    """SmolVLA: the vision-language model SmolVLM2, and an action expert. Some layers of the expert attend to the
    prefix (views, instruction and state) and to the actions, and the others only to the prefix.
    """

    config_type = SmolVLAConfig
    fold_sites = ExpertModel.fold_sites

    def __init__(self, config: SmolVLAConfig):
        super().__init__()
        self.config = config
        width, expert_width = config.language.hidden_size, config.expert.hidden_size
        self.vision = VisionTransformer(config.vision)
        self.connector = PixelShuffleConnector(config.vision.hidden_size, width, config.pixel_shuffle)
        self.language = Decoder(config.language, config.vocab_size)
        if config.lm_head == "own":
            self.lm_head = Linear(width, config.vocab_size, bias=False)
        self.expert = SmolVLAExpert(config)
        self.state_proj = Linear(config.max_state_dim, expert_width if config.state_in_head else width)
        self.action_in_proj = Linear(config.max_action_dim, expert_width)
        self.action_time_mlp_in = Linear(2 * expert_width, expert_width)
        self.action_time_mlp_out = Linear(expert_width, expert_width)
        self.action_out_proj = Linear(expert_width, config.max_action_dim)

    def connect(self, features: Tensor, rows: int, cols: int) -> Tensor:
        return self.connector(features, rows, cols)

    def embed_text(self, tokens: Tensor) -> Tensor:
        return self.language.embed_tokens(tokens) * self.config.language.hidden_size**0.5

    def embed_prefix(
        self, image_tokens: Tensor, camera_mask: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        B, V, _, C = image_tokens.shape
        embed = self.language.embed_tokens
        # The reference scales image tokens by a factor that is rounded to their dtype, and text tokens by the exact
        # factor.
        scaled = image_tokens * rounded(C**0.5, image_tokens.dtype)
        pieces: list[Tensor] = []
        valid: list[Tensor] = []

        def add(piece: Tensor, mask: Tensor) -> None:  # [B, n, C], bool [B] or [B, n]
            pieces.append(piece)
            valid.append(mask if mask.ndim == 2 else mask[:, None].expand(B, piece.shape[1]))

        def add_special(ids: tuple[int, ...]) -> None:
            # Special tokens are not scaled, in contrast to text tokens.
            if ids:
                add(embed.rows(ids).expand(B, -1, -1), always)

        always = torch.ones(B, dtype=torch.bool, device=state.device)
        for view in range(V):
            add_special(self.config.image_start_tokens)
            add(scaled[:, view], camera_mask[:, view])
            add_special(self.config.image_end_tokens)
        add(self.embed_text(tokens), token_mask)
        if not self.head_reads_state:
            add(self.state_proj(state)[:, None], always)

        x, ok = torch.cat(pieces, dim=1), torch.cat(valid, dim=1)
        opens_block = torch.zeros_like(ok)
        if not self.head_reads_state:
            # The state is the last token. It attends to all earlier tokens, and no earlier token attends to it.
            opens_block[:, -1] = True
        if (missing := self.config.prefix_length - x.shape[1]) > 0:
            x = F.pad(x, (0, 0, 0, missing))
            ok, opens_block = F.pad(ok, (0, missing)), F.pad(opens_block, (0, missing))
        return x, ok, opens_block

    def prefix_of(self, cache: Sequence[KeyValue], valid: Tensor, state: Tensor) -> Prefix:
        token = self.state_token(state) if self.head_reads_state else None
        return Prefix(kv=self.expert_kv(cache), valid=valid, length=valid.sum(dim=1), state=token)

    def expert_kv(self, cache: Sequence[KeyValue]) -> tuple[KeyValue, ...]:
        """Return the keys and values that each expert layer reads.

        Cross layers project the language model's rotated keys and its values again, without another rotation. The
        result does not depend on the solver's time, so it is computed once per observation.
        """
        result: list[KeyValue] = []
        for e, (layer, is_self) in enumerate(zip(self.expert.layers, self.expert.is_self, strict=True)):
            k, v = cache[e * self.config.stride]  # [B, P, Hkv, D]
            result.append((k, v) if is_self else layer.attn.key_value(k.flatten(2), v.flatten(2)))
        return tuple(result)

    @property
    def prefix_depth(self) -> int:
        return (len(self.expert.layers) - 1) * self.config.stride + 1

    @property
    def head_reads_state(self) -> bool:
        return self.config.state_in_head

    def embed_time(self, t: Tensor) -> Tensor:  # input shape [B], output shape [B, C], [B, H] -> [B, H, C]
        config = self.config
        return sinusoidal_embedding(t, config.expert.hidden_size, config.min_period, config.max_period)

    def context(self, prefix: Prefix) -> ExpertContext:
        """Return the inputs of the solver steps: the results of the language model (prefix), and the rotary positions
        and masks, first those of the self layers, then those of the cross layers.
        """
        config = self.config.expert
        # The expert's tokens are the actions, after a token for the state if there is one.
        H = self.config.chunk_size + (prefix.state is not None)
        B, device = prefix.valid.shape[0], prefix.valid.device
        steps = torch.arange(H, device=device)[None]
        after_prefix = Rotation.at(prefix.length[:, None] + steps, config.head_dim, config.rope_theta)
        from_zero = Rotation.at(steps, config.head_dim, config.rope_theta)
        sees_prefix = key_mask(prefix.valid, H)  # [B, H, P]
        causal = torch.ones(H, H, dtype=torch.bool, device=device).tril().expand(B, H, H)
        sees_both = torch.cat([sees_prefix, causal], dim=-1)  # [B, H, P + H]
        return ExpertContext(prefix.kv, (after_prefix, from_zero), (sees_both, sees_prefix), prefix.state)

    def act(self, x: Tensor, time_embedding: Tensor, context: ExpertContext) -> Tensor:
        cache, (after_prefix, from_zero), (sees_both, sees_prefix), state = context
        h = self.embed_actions(x, time_embedding)
        if state is not None:
            h = torch.cat([state, h], dim=1)
        h = h.to(self.expert.dtype)  # [B, S, C], S = H or 1 + H
        for layer, is_self, kv in zip(self.expert.layers, self.expert.is_self, cache, strict=True):
            if is_self:
                q, k, v = layer.project(h, after_prefix)
                attended = layer.attn.attend(q, kv, sees_both, own=(k, v))
            else:
                attended = layer.attn.attend(layer.query(h, from_zero), kv, sees_prefix)
            h = layer.finish(h, attended)
        return self.decode_actions(h if state is None else h[:, 1:])
