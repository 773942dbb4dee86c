"""VLA-Adapter's bridge attention (Wang et al. 2025, arXiv 2509.09372): an action head beside a language model.

Each block of the head reads the states of the language model's layer of the same depth: those of the views, scaled by a
learned gate, and those of the action queries with the proprioception.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinew.layers.linear import Linear
from sinew.layers.norm import LayerNorm

HEADS = 8  # fixed in the reference, as are the rotary base and the norms' epsilon
THETA = 10_000.0
EPS = 1e-5


def rotate(x: Tensor) -> Tensor:
    """Rotate [B, L, H, D] by positions 0 .. L - 1, with the reference's own mixture of two layouts.

    Neighbouring channels 2j and 2j + 1 form a pair, but channel c turns by frequency c mod D/2, so the two of a pair
    turn by different angles. Source: VLA-Adapter, action_heads.py.
    """
    L, D = x.shape[1], x.shape[3]
    frequency = THETA ** -(torch.arange(0, D, 2, dtype=torch.float32, device=x.device) / D)
    angle = torch.arange(L, dtype=torch.float32, device=x.device)[:, None] * frequency  # [L, D / 2]
    angle = torch.cat([angle, angle], dim=-1)[:, None]  # [L, 1, D]
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([-odd, even], dim=-1).flatten(-2)
    return (x.float() * angle.cos() + turned * angle.sin()).to(x.dtype)


class BridgeBlock(nn.Module):
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
        """x: [B, H, C]; queries: [B, Q, C], with the proprioception; task: [B, N, C] -> [B, H, C]."""

        def heads(projected: Tensor) -> Tensor:
            return projected.unflatten(-1, (HEADS, -1))

        turn = rotate if self.rotary else (lambda keys: keys)
        q = turn(heads(self.q_proj(x)))
        keys = [
            turn(heads(self.k_self(x))),
            turn(heads(self.k_query(queries))),
            # The gate belongs to the scores of these keys alone.
            turn(heads(self.k_task(task))) * self.gate.tanh(),
        ]
        values = [heads(self.v_self(x)), heads(self.v_query(queries)), heads(self.v_task(task))]
        q, k, v = (t.transpose(1, 2) for t in (q, torch.cat(keys, dim=1), torch.cat(values, dim=1)))
        attended = F.scaled_dot_product_attention(q, k, v)  # [B, heads, H, D]
        y = self.o_proj(attended.transpose(1, 2).flatten(2)) + x
        return F.relu(self.proj(self.norm(y)))


class BridgeHead(nn.Module):
    """Blocks between two projections; it starts from zeros, so its input is a constant."""

    def __init__(self, size: int, output_size: int, num_blocks: int, rotary: bool):
        super().__init__()
        self.output_size = output_size
        self.norm_in = LayerNorm(output_size * size, eps=EPS)
        self.proj_in = Linear(output_size * size, size)
        self.blocks = nn.ModuleList(BridgeBlock(size, rotary) for _ in range(num_blocks))
        self.norm_out = LayerNorm(size, eps=EPS)
        self.proj_out = Linear(size, output_size)

    def forward(self, steps: int, queries: Tensor, task: Tensor) -> Tensor:
        """queries: [blocks, B, Q, C]; task: [blocks, B, N, C] -> [B, steps, output]."""
        x = F.relu(self.proj_in(self.norm_in.bias)).expand(queries.shape[1], steps, -1)
        for block, q, t in zip(self.blocks, queries, task, strict=True):
            x = block(x, q, t)
        return self.proj_out(self.norm_out(x))
