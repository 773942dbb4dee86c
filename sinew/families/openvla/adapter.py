"""VLA-Adapter (Wang et al. 2025, arXiv 2509.09372): learned queries in a small language model, and a head beside it.

OpenVLA's towers and prompt with views inside it; behind the prompt stand the action queries and a stop token, and every
token sees those before it. The head has a block for each layer of the language model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sinew.families.openvla.model import PrismaticConfig, PrismaticVLM, last_row
from sinew.layers.attention import block_mask
from sinew.layers.bridge import BridgeHead
from sinew.layers.linear import Embedding
from sinew.layers.mlp import MLP
from sinew.layers.rope import Rotation
from sinew.models.base import Regression


@dataclass(frozen=True)
class AdapterConfig(PrismaticConfig):
    """``rotary``: the "Pro" head. ``stop_token``: the id whose embedding ends the sequence."""

    num_queries: int = 64
    stop_token: int = 2
    rotary: bool = True


class LayerStates(NamedTuple):
    task: Tensor  # [layers, B, V * N, C]: the first rows of each layer's output
    queries: Tensor  # [layers, B, Q + 1, C]: from the last prompt token on, and the proprioception


class VLAAdapter(PrismaticVLM, Regression):
    config_type = AdapterConfig
    config: AdapterConfig

    def __init__(self, config: AdapterConfig):
        super().__init__(config)
        width = config.language.hidden_size
        self.action_queries = Embedding(config.num_queries, width)
        self.state_proj = MLP(config.max_state_dim, width, width)
        self.head = BridgeHead(width, config.max_action_dim, config.language.num_layers, config.rotary)

    def read(
        self, image_tokens: Tensor, camera_mask: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor
    ) -> LayerStates:
        config = self.config
        B, V, N, _ = image_tokens.shape
        queries = self.action_queries.weight.expand(B, -1, -1)
        x, valid = self.sequence(
            image_tokens,
            camera_mask,
            tokens,
            token_mask,
            behind_prompt=[queries, self.stop(config.stop_token, B)],
        )
        positions = valid.long().cumsum(dim=1) - 1
        mask = block_mask(valid, torch.ones_like(valid))
        rotate = Rotation.at(positions, config.language.head_dim, config.language.rope_theta)
        proprioception = self.state_proj(state)[:, None].to(x.dtype)
        task_states, query_states = [], []
        for layer in self.language.layers:
            x, _ = layer(x, rotate, mask)
            h = self.language.norm(x) if layer is self.language.layers[-1] else x
            # As the reference counts: the first row is the prompt's, so the views' last one is missing.
            task_states.append(h[:, : V * N])
            last = last_row(h, token_mask, config.num_queries + 1)
            query_states.append(torch.cat([last, h[:, -config.num_queries - 1 : -2], proprioception], dim=1))
        return LayerStates(torch.stack(task_states), torch.stack(query_states))

    def regress(self, context: LayerStates) -> Tensor:
        return self.head(self.config.chunk_size, context.queries, context.task).float()
