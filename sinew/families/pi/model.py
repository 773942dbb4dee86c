"""pi0 (Black et al. 2024, arXiv 2410.24164) and pi0.5 (2025, arXiv 2504.16054), as openpi and LeRobot compute them.

* A SigLIP-So400m tower and one linear layer encode each 224 x 224 view as 256 unscaled tokens.
* A Gemma language model reads the prefix [views | prompt] as one bidirectional block.
* With memory (MEM, arXiv 2603.03596, as in LeRobot), the tower of pi0.5 reads several frames of each view and returns
  features of the newest frame. The state of each observation step is a token between views and prompt.
* An action expert with the same number of layers reads the keys and values of each layer in addition to its own. It
  computes the velocity of flow matching, and the solver integrates the velocity to an action chunk. pi0 gives the
  expert a state token, which attends to the prefix and itself, and mixes the solver's time into the action tokens.
  pi0.5 writes the state into the prompt, and the time modulates the norms of the expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinew.families.pi.video import VideoTransformer, check_frames
from sinew.layers.attention import key_mask
from sinew.layers.decoder import (
    AdaptiveDecoderLayer,
    Decoder,
    DecoderConfig,
    DecoderLayer,
    KeyValue,
    decoder_norm,
)
from sinew.layers.linear import Linear, rounded
from sinew.layers.norm import AdaRMSNorm, Modulation
from sinew.layers.rope import Rotation
from sinew.layers.sizes import check_sizes
from sinew.layers.time_embedding import sinusoidal_embedding
from sinew.layers.vit import VisionTransformer, ViTConfig
from sinew.models.expert import ExpertContext, ExpertModel, FlowConfig, LMHead, Prefix


@dataclass(frozen=True)
class PI0Config(FlowConfig):
    """Sizes of pi0.

    Attributes:
        vision: Sizes of the SigLIP tower.
        language: Sizes of the Gemma language model.
        expert: Sizes of the action expert.
        lm_head: How the language head of PaliGemma, which generates text, is stored: "", "own" or "tied". In openpi it
            is the same tensor as the token table ("tied").
    """

    vision: ViTConfig
    language: DecoderConfig
    expert: DecoderConfig
    lm_head: LMHead = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        shared = ("num_layers", "num_kv_heads", "head_dim")
        if any(getattr(self.language, name) != getattr(self.expert, name) for name in shared):
            raise ValueError(f"language, expert: expected the same {', '.join(shared)} in both")


class PiExpert(nn.Module):
    """The action expert: Gemma layers and a final norm."""

    layers: Sequence[Any]  # the type is DecoderLayer or AdaptiveDecoderLayer

    def __init__(self, config: DecoderConfig, adaptive: bool):
        super().__init__()
        layer = AdaptiveDecoderLayer if adaptive else DecoderLayer
        self.layers = nn.ModuleList(layer(config) for _ in range(config.num_layers))  # type: ignore[assignment]
        self.norm: Any = AdaRMSNorm(config.hidden_size, config.norm_eps) if adaptive else decoder_norm(config)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the hidden states. The projections and norms before and after the layers may have a
        dtype with more bits."""
        return self.layers[0].mlp.down_proj.dtype


class PI0(ExpertModel):
    """pi0: flow matching with a Gemma action expert, which reads the keys and values of PaliGemma."""

    config_type = PI0Config
    float32_modules = (*ExpertModel.float32_modules, "time_mlp_in", "time_mlp_out")
    fold_sites = ExpertModel.fold_sites
    adaptive = False
    # The state token attends to the prefix and to itself, and never to the actions.
    has_state_token = True

    def __init__(self, config: PI0Config):
        super().__init__()
        self.config = config
        width = config.expert.hidden_size
        self.vision = self.tower()
        self.connector = Linear(config.vision.hidden_size, config.language.hidden_size)
        self.language = Decoder(config.language, config.vocab_size)
        if config.lm_head == "own":
            self.lm_head = Linear(config.language.hidden_size, config.vocab_size, bias=False)
        self.expert = PiExpert(config.expert, self.adaptive)
        self.action_in_proj = Linear(config.max_action_dim, width)
        self.action_out_proj = Linear(width, config.max_action_dim)
        self.add_time_modules(width)

    def tower(self) -> VisionTransformer:
        return VisionTransformer(self.config.vision)

    def add_time_modules(self, width: int) -> None:
        self.state_proj = Linear(self.config.max_state_dim, width)
        self.action_time_mlp_in = Linear(2 * width, width)
        self.action_time_mlp_out = Linear(width, width)

    def connect(self, features: Tensor, rows: int, cols: int) -> Tensor:
        return self.connector(features)

    def embed_text(self, tokens: Tensor) -> Tensor:
        table = self.language.embed_tokens
        # Gemma multiplies its embeddings by the square root of their width, rounded to their dtype.
        return table(tokens) * rounded(self.config.language.hidden_size**0.5, table.dtype)

    def embed_prefix(
        self, image_tokens: Tensor, camera_mask: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        N, dtype = image_tokens.shape[2], self.language.embed_tokens.dtype
        x = torch.cat([image_tokens.flatten(1, 2).to(dtype), self.embed_text(tokens)], dim=1)
        valid = torch.cat([camera_mask.repeat_interleave(N, dim=1), token_mask], dim=1)
        return x, valid, torch.zeros_like(valid)

    def prefix_mask(self, valid: Tensor, opens_block: Tensor) -> Tensor:
        return key_mask(valid, valid.shape[1])  # every token of the prefix attends to every valid token

    def prefix_of(self, cache: Sequence[KeyValue], valid: Tensor, state: Tensor) -> Prefix:
        return Prefix(tuple(cache), valid, valid.sum(dim=1), self.state_token(state))

    @property
    def head_reads_state(self) -> bool:
        return self.has_state_token

    @property
    def prefix_depth(self) -> int:
        return len(self.expert.layers)

    def embed_time(
        self,
        t: Tensor,
        # Input shape [B] or [B, H]. Output shape for pi0: [B, C] or [B, H, C]. Output shape for pi0.5: [B, norms, 3C]
        # or [B, norms, H, 3C].
    ) -> Tensor:
        return self.sinusoids(t)

    def sinusoids(self, t: Tensor) -> Tensor:  # input shape [...], output shape [..., C]
        width = self.config.expert.hidden_size
        return sinusoidal_embedding(t, width, self.config.min_period, self.config.max_period)

    def context(self, prefix: Prefix) -> ExpertContext:
        config, H = self.config.expert, self.config.chunk_size
        B, device = prefix.valid.shape[0], prefix.valid.device
        S = H if prefix.state is None else 1 + H
        steps = torch.arange(S, device=device)
        rotate = Rotation.at(prefix.length[:, None] + steps, config.head_dim, config.rope_theta)
        # All tokens attend to the prefix. The state token attends to itself, and the actions attend to the state token
        # and to each other.
        if prefix.state is None:
            sees = key_mask(torch.cat([prefix.valid, prefix.valid.new_ones(B, S)], dim=1), S)
        else:
            own = torch.ones(S, S, dtype=torch.bool, device=device)
            own[: S - H, S - H :] = False
            sees = torch.cat([key_mask(prefix.valid, S), own.expand(B, S, S)], dim=-1)
        return ExpertContext(prefix.kv, (rotate,), (sees,), prefix.state)

    def modulations(self, time_embedding: Tensor) -> tuple[list[tuple], tuple]:
        """Return, for each layer and for the final norm, the arguments that depend on the solver's time (scale, shift
        and gate). pi0's norms have no such arguments.
        """
        return [()] * len(self.expert.layers), ()

    def act(self, x: Tensor, time_embedding: Tensor, context: ExpertContext) -> Tensor:
        cache, (rotate,), (sees,), state = context
        h = self.embed_actions(x, time_embedding)
        if state is not None:
            h = torch.cat([state, h], dim=1)
        h = h.to(self.expert.dtype)  # [B, S, C], S = H or 1 + H
        per_layer, final = self.modulations(time_embedding)
        for layer, modulation, kv in zip(self.expert.layers, per_layer, cache, strict=True):
            q, k, v = layer.project(h, rotate, *modulation)
            attended = layer.attn.attend(q, kv, sees, own=(k, v))
            h = layer.finish(h, attended, *modulation)
        if state is not None:
            h = h[:, 1:]
        return self.decode_actions(h, *final)


@dataclass(frozen=True)
class Memory:
    """Sizes of pi0.5's memory.

    Attributes:
        moments: Number of observation steps that the policy reads, including the newest.
        cameras: Number of views of each step.
        temporal_every: Every n-th layer of the tower attends across frames. 0 means that the tower reads only the
            newest frames.
        states: True if the state of each step is a token of the prefix.
    """

    moments: int
    cameras: int
    temporal_every: int = 0
    states: bool = False

    def __post_init__(self) -> None:
        check_sizes(self)


@dataclass(frozen=True)
class PI05Config(PI0Config):
    """Sizes of pi0.5.

    Attributes:
        memory: Sizes of the memory. None if the policy reads only the newest observation.
    """

    memory: Memory | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.memory is not None and self.memory.temporal_every:
            check_frames(self.vision, self.memory.temporal_every)


class PI05(PI0):
    """pi0.5: pi0 with the state in the prompt and the solver's time in the norms of the expert."""

    config_type = PI05Config
    config: PI05Config
    float32_modules = (*PI0.float32_modules, "proprio_history_proj")
    adaptive = True
    has_state_token = False
    fold_sites = ExpertModel.fold_sites

    def tower(self) -> VisionTransformer:
        memory = self.config.memory
        if memory is None or not memory.temporal_every:
            return super().tower()
        return VideoTransformer(self.config.vision, memory.temporal_every)

    def add_time_modules(self, width: int) -> None:
        self.time_mlp_in = Linear(width, width)
        self.time_mlp_out = Linear(width, width)
        if self.config.memory is not None and self.config.memory.states:
            self.proprio_history_proj = Linear(self.config.max_state_dim, self.config.language.hidden_size)

    @property
    def moments(self) -> tuple[int, int] | None:
        memory = self.config.memory
        return None if memory is None else (memory.moments, memory.cameras)

    @property
    def state_size(self) -> int:
        memory = self.config.memory
        return (1 if memory is None else memory.moments) * self.config.max_state_dim

    def embed_images(self, pixels: Tensor) -> Tensor:
        """Encode the frames.

        Args:
            pixels: [B, moments * V, 3, height, width], with V views per observation step.

        Returns:
            Image tokens of the newest step, [B, V, tokens, C].
        """
        memory = self.config.memory
        if memory is None:
            return super().embed_images(pixels)
        if not isinstance(self.vision, VideoTransformer):
            return super().embed_images(pixels[:, -memory.cameras :])
        frames = pixels.unflatten(1, (-1, memory.cameras)).transpose(1, 2)  # [B, V, moments, 3, h, w]
        features = self.vision.watch(frames.flatten(0, 1))  # [B * V, patches, C]
        size = pixels.shape[-2:]
        return self.connect(features, *self.grid_of(*size)).unflatten(0, frames.shape[:2])

    def embed_prefix(
        self, image_tokens: Tensor, camera_mask: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Embed the prefix (views, states and prompt). If the policy has memory, ``camera_mask`` is True for the
        observation steps that exist. All views of the newest step must exist.
        """
        memory = self.config.memory
        if memory is None:
            return super().embed_prefix(image_tokens, camera_mask, tokens, token_mask, state)
        T, V = memory.moments, memory.cameras
        views = torch.ones(image_tokens.shape[:2], dtype=torch.bool, device=tokens.device)
        x, valid, opens = super().embed_prefix(image_tokens, views, tokens, token_mask, state)
        if not memory.states:
            return x, valid, opens
        states = self.proprio_history_proj(state.unflatten(1, (T, -1))).to(x.dtype)  # [B, T, C]
        count = camera_mask.sum(dim=1, keepdim=True) // V  # [B, 1]
        exists = torch.arange(T, device=tokens.device) >= T - count  # [B, T]; the newest step is the last
        N = V * image_tokens.shape[2]
        x = torch.cat([x[:, :N], states, x[:, N:]], dim=1)
        valid = torch.cat([valid[:, :N], exists, valid[:, N:]], dim=1)
        return x, valid, torch.zeros_like(valid)

    def state_token(self, state: Tensor) -> None:
        return None  # pi0.5 has no state token here, because its prompt contains the state

    def embed_actions(self, x: Tensor, time_embedding: Tensor) -> Tensor:
        return self.action_in_proj(x)

    def condition(self, t: Tensor) -> Tensor:  # input shape [...], output shape [..., C]
        return F.silu(self.time_mlp_out(F.silu(self.time_mlp_in(self.sinusoids(t)))))

    def embed_time(self, t: Tensor) -> Tensor:
        """Return the scales, shifts and gates of every norm for the solver's time ``t``, in the order in which the
        norms run.

        Args:
            t: [B], or [B, H] for one time per action.

        Returns:
            Output, [B, 2 * layers + 1, 3C], or [B, 2 * layers + 1, H, 3C].
        """
        condition = self.condition(t)
        norms = [norm for layer in self.expert.layers for norm in (layer.input_norm, layer.post_norm)]
        return torch.stack([norm.dense(condition) for norm in (*norms, self.expert.norm)], dim=1)

    def modulations(self, time_embedding: Tensor) -> tuple[list[tuple], tuple]:
        *layers, final = (Modulation.of(packed) for packed in time_embedding.unbind(dim=1))
        return list(zip(layers[::2], layers[1::2], strict=True)), (final,)
