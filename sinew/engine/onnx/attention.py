"""The vision tower's attention as one operator of ONNX Runtime.

Recorded as it stands, attention is two products with a softmax over [H, L, L] scores between them, and copies that
bring heads to the front. ``MultiHeadAttention`` reads queries, keys and values as the projections leave them and
keeps a tile of scores in the cache. It takes no mask there and as many key heads as query heads, so the decoders'
attention stays as it is. The operator is ONNX Runtime's own (domain ``com.microsoft``).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sinew.engine.plan.rewrite import become
from sinew.layers.vit import ViTAttention


class OneOperatorAttention(ViTAttention):
    """For recording only: the operator has a name and a shape here, and no implementation."""

    def forward(self, x: Tensor) -> Tensor:  # [B, L, C]
        q, k, v = self.project(x)
        attended = torch.onnx.ops.symbolic(
            "com.microsoft::MultiHeadAttention",
            (q, k, v),
            {"num_heads": q.shape[-1] // self.head_dim},
            dtype=q.dtype,
            shape=q.shape,
            version=1,
        )
        return self.o_proj(attended)


def join_attention(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, ViTAttention):
            become(module, OneOperatorAttention)
