"""EO-1 (Qu et al. 2025, arXiv 2508.21112), as LeRobot computes it: the language model's own layers denoise the
actions.

Qwen2.5-VL reads views, state and instruction once (:mod:`sinew.models.qwen25_vl`). In each solver step the same
layers run over one token per action of the chunk. Such a token attends to the views, the state, the instruction and
the earlier actions. The output is the velocity of flow matching.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from sinew.layers.attention import block_mask
from sinew.layers.linear import Linear
from sinew.layers.time_embedding import sinusoidal_embedding
from sinew.models.expert import FlowConfig
from sinew.models.qwen25_vl import ChunkContext, Qwen25VL, Qwen25VLConfig


@dataclass(frozen=True)
class EO1Config(FlowConfig, Qwen25VLConfig):
    """Sizes of EO-1.

    Attributes:
        out_layers: Number of linear layers from a hidden state to an action.
    """

    out_layers: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        Qwen25VLConfig.__post_init__(self)
        if not 1 <= self.out_layers <= 8:
            raise ValueError(f"out_layers: expected 1 to 8, got {self.out_layers}")


class EO1(Qwen25VL):
    """EO-1: Qwen2.5-VL whose layers denoise the actions."""

    config_type = EO1Config
    config: EO1Config
    float32_modules: ClassVar[tuple[str, ...]] = (
        "state_proj",
        "action_in",
        "action_mix",
        "time_mix",
        "action_time_out",
        "action_out",
    )
    action_out: Sequence[Linear]

    def __init__(self, config: EO1Config):
        super().__init__(config)
        size = config.language.hidden_size
        self.state_proj = Linear(config.max_state_dim, size)
        self.action_in = Linear(config.max_action_dim, size)
        self.action_mix = Linear(size, size)
        self.time_mix = Linear(size, size, bias=False)
        self.action_time_out = Linear(size, size)
        widths = [size] * config.out_layers + [config.max_action_dim]
        self.action_out = nn.ModuleList(  # type: ignore[assignment]
            Linear(a, b) for a, b in pairwise(widths)
        )

    def state_row(self, state: Tensor) -> Tensor:
        return self.state_proj(state)

    def among(self, rows: Tensor) -> Tensor:
        return block_mask(rows, rows)

    def embed_time(self, t: Tensor) -> Tensor:
        config = self.config
        size = config.language.hidden_size
        return self.time_mix(sinusoidal_embedding(t, size, config.min_period, config.max_period))

    def embed_actions(self, x: Tensor, time_embedding: Tensor) -> Tensor:  # shapes: [B, H, A] -> [B, H, C]
        time = time_embedding if time_embedding.ndim == 3 else time_embedding[:, None]
        return self.action_time_out(F.silu(self.action_mix(self.action_in(x)) + time))

    def decode_actions(self, h: Tensor) -> Tensor:  # input shape [B, H, C], output shape [B, H, A]
        h = self.language.norm(h)
        for layer in self.action_out:
            h = layer(h)
        return h.float()

    def act(self, x: Tensor, time_embedding: Tensor, context: ChunkContext) -> Tensor:
        h = self.embed_actions(x, time_embedding).to(self.language.norm.dtype)
        for layer, kv in zip(self.decoder_layers, context.kv, strict=True):
            q, k, v = layer.project(h, context.rotation)
            h = layer.finish(h, layer.attn.attend(q, kv, context.mask, own=(k, v)))
        return self.decode_actions(h)
