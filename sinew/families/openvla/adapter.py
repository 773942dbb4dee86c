"""VLA-Adapter (Wang et al. 2025, arXiv 2509.09372): learned action queries in a small language model, and an action
head.

The policy has OpenVLA's vision towers, and the views are inside the prompt. The action queries and a stop token follow
the prompt, and every token attends to the tokens before it. The head has one block for each layer of the language
model, and returns the whole action chunk in one pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinew.families.openvla.model import PrismaticConfig, PrismaticVLM, last_row
from sinew.layers.attention import block_mask
from sinew.layers.linear import Embedding, Linear
from sinew.layers.mlp import MLP
from sinew.layers.norm import LayerNorm
from sinew.layers.rope import Rotation
from sinew.models.base import Regression

# HEADS, THETA and EPS are constants in the reference.
HEADS = 8
THETA = 10_000.0
EPS = 1e-5


@dataclass(frozen=True)
class AdapterConfig(PrismaticConfig):
    """Sizes of VLA-Adapter.

    Attributes:
        num_queries: Number of action queries.
        stop_token: Id of the token whose embedding is the last one of the input sequence.
        rotary: True for the "Pro" head, which has rotary positions.
    """

    num_queries: int = 64
    stop_token: int = 2
    rotary: bool = True


class LayerStates(NamedTuple):
    """The hidden states of all layers of the language model, which the action head reads.

    Attributes:
        task: [layers, B, V * N, C], the first rows of each layer's output.
        queries: [layers, B, Q + 1, C], the rows from the last prompt token on, and the state.
    """

    task: Tensor
    queries: Tensor


def turned(x: Tensor) -> Tensor:
    """Apply rotary position embeddings to x [B, L, H, D] for the positions 0 .. L - 1, like the reference, which mixes
    two rotary layouts.

    Neighbouring channels 2j and 2j + 1 form a pair, but channel c has the frequency c mod D/2. So the two channels of a
    pair turn by different angles. Source: VLA-Adapter, action_heads.py.
    """
    L, D = x.shape[1], x.shape[3]
    frequency = THETA ** -(torch.arange(0, D, 2, dtype=torch.float32, device=x.device) / D)
    angle = torch.arange(L, dtype=torch.float32, device=x.device)[:, None] * frequency  # [L, D / 2]
    angle = torch.cat([angle, angle], dim=-1)[:, None]  # [L, 1, D]
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    pairs = torch.stack([-odd, even], dim=-1).flatten(-2)
    return (x.float() * angle.cos() + pairs * angle.sin()).to(x.dtype)


class BridgeBlock(nn.Module):
    """A block of the head, which reads the hidden states of the language model's layer with the same index.

    The block attends to its own tokens, to the states of the views with a learned gate, and to the states of the action
    queries and the robot's state.
    """

    def __init__(self, size: int, rotary: bool):
        super().__init__()
        self.rotary = rotary
        self.q_proj = Linear(size, size)
        self.k_self, self.v_self = Linear(size, size), Linear(size, size)
        self.k_query, self.v_query = Linear(size, size), Linear(size, size)
        self.k_task, self.v_task = Linear(size, size), Linear(size, size)
        self.gate = nn.Parameter(torch.zeros(1))
        self.o_proj = Linear(size, size)
        self.norm = LayerNorm(size, eps=EPS)
        self.proj = Linear(size, size)

    def forward(self, x: Tensor, queries: Tensor, task: Tensor) -> Tensor:
        """Run the block.

        Args:
            x: [B, H, C], the action tokens.
            queries: [B, Q, C], states of the action queries, and the robot's state.
            task: [B, N, C], states of the views.

        Returns:
            Output, [B, H, C].
        """

        def heads(projected: Tensor) -> Tensor:
            return projected.unflatten(-1, (HEADS, -1))

        turn = turned if self.rotary else (lambda keys: keys)
        q = turn(heads(self.q_proj(x)))
        keys = [
            turn(heads(self.k_self(x))),
            turn(heads(self.k_query(queries))),
            # The learned gate scales only the attention scores of these keys, which come from the views.
            turn(heads(self.k_task(task))) * self.gate.tanh(),
        ]
        values = [heads(self.v_self(x)), heads(self.v_query(queries)), heads(self.v_task(task))]
        q, k, v = (t.transpose(1, 2) for t in (q, torch.cat(keys, dim=1), torch.cat(values, dim=1)))
        attended = F.scaled_dot_product_attention(q, k, v)  # [B, heads, H, D]
        y = self.o_proj(attended.transpose(1, 2).flatten(2)) + x
        return F.relu(self.proj(self.norm(y)))


class BridgeHead(nn.Module):
    """The action head: blocks between two projections. The input of its first projection is always zero, so the
    result of this projection is a constant.
    """

    def __init__(self, size: int, output_size: int, num_blocks: int, rotary: bool):
        super().__init__()
        self.output_size = output_size
        self.norm_in = LayerNorm(output_size * size, eps=EPS)
        self.proj_in = Linear(output_size * size, size)
        self.blocks = nn.ModuleList(BridgeBlock(size, rotary) for _ in range(num_blocks))
        self.norm_out = LayerNorm(size, eps=EPS)
        self.proj_out = Linear(size, output_size)

    def forward(self, steps: int, queries: Tensor, task: Tensor) -> Tensor:
        """Run the head.

        Args:
            steps: Actions in a chunk.
            queries: [blocks, B, Q, C], states of the action queries and the robot's state, for each block.
            task: [blocks, B, N, C], states of the camera views, for each block.

        Returns:
            Output, [B, steps, output].
        """
        x = F.relu(self.proj_in(self.norm_in.bias)).expand(queries.shape[1], steps, -1)
        for block, q, t in zip(self.blocks, queries, task, strict=True):
            x = block(x, q, t)
        return self.proj_out(self.norm_out(x))


class VLAAdapter(PrismaticVLM, Regression):
    """VLA-Adapter: vision towers, a language model with action queries, and a head with one block per layer."""

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
            # As in the reference, the slice starts at the first prompt token, so it lacks the last token of the views.
            task_states.append(h[:, : V * N])
            last = last_row(h, token_mask, config.num_queries + 1)
            query_states.append(torch.cat([last, h[:, -config.num_queries - 1 : -2], proprioception], dim=1))
        return LayerStates(torch.stack(task_states), torch.stack(query_states))

    def regress(self, context: LayerStates) -> Tensor:
        return self.head(self.config.chunk_size, context.queries, context.task).float()
