"""The vision tower's attention as one operator of ONNX Runtime.

Recorded as it stands, attention is two products with a softmax over [H, L, L] scores between them, and copies that
bring heads to the front. ``MultiHeadAttention`` reads queries, keys and values as the projections leave them and
keeps a tile of scores in the cache. It takes no mask there and as many key heads as query heads, so the decoders'
attention stays as it is. The operator is ONNX Runtime's own (domain ``com.microsoft``).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sinew.engine.plan.rewrite import RewriteOutcome, become, foreign, left_out, spans
from sinew.layers.vit import ViTAttention


class OneOperatorAttention(ViTAttention):
    """An attention that is recorded as one operator, by name and shape, and cannot run under PyTorch."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # [B, L, C] each -> [B, L, C]
        return torch.onnx.ops.symbolic(
            "com.microsoft::MultiHeadAttention",
            (q, k, v),
            {"num_heads": q.shape[-1] // self.head_dim},
            dtype=q.dtype,
            shape=q.shape,
            version=1,
        )


def join_attention(model: nn.Module) -> RewriteOutcome:
    """Give every plain vision attention of ``model`` the operator, in place."""
    names, left = [], {}
    for name, module in model.named_modules():
        if unknown := foreign(module, ViTAttention):
            left[name] = unknown
        elif isinstance(module, ViTAttention):
            become(module, OneOperatorAttention)
            names.append(name)
    status, reason = ("applied" if names else "not applicable"), "scores stay in the cache"
    return RewriteOutcome("one-operator-attention", status, reason + left_out(left), spans(names))  # type: ignore[arg-type]
