"""The vision tower, with library products and fused kernels between them.

The classes are for ``rewrite.become``, as in :mod:`.layers`. They add the attribute ``rows``. The kernel of a norm also
adds the output and the bias of the previous product to the residual stream, also across layers. The kernel writes its
result in the dtype that the next product reads.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from sinew.engine.cuda.fused.ends import PatchTower
from sinew.engine.cuda.fused.rows import Operand, RowOps, RowTarget, norm_options
from sinew.engine.plan.norms import UnitLayerNorm
from sinew.layers.vit import ViTLayer

# Keyword arguments (``branch`` and ``branch_bias``) for the next norm, which adds them. Empty if there is no branch to
# add.
Added = dict[str, Any]


class RowwiseViTLayer(ViTLayer):
    """A vision layer that computes all views as one matrix: [V, L, C] becomes [V * L, C]."""

    rows: RowOps

    def along(self, x: Tensor, added: Added, views: int) -> tuple[Tensor, Added]:
        """Compute the layer.

        Args:
            x: The residual stream, [V * L, C].
            added: The previous layer's branch, which the first norm adds.
            views: Number of views V.

        Returns:
            The residual stream, and the branch of this layer, which the next norm adds.
        """
        rows, attn, mlp = self.rows, self.attn, self.mlp
        qkv: Any = attn.qkv_proj
        x, normed = layer_norm(rows, x, added, self.norm1, qkv)
        packed = rows.product(normed, qkv).view(views, -1, 3, attn.o_proj.in_features)
        q, k, v = (part.unflatten(-1, (-1, attn.head_dim)).transpose(1, 2) for part in packed.unbind(2))
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).flatten(0, 1)
        out = branch(rows, rows.convert(attended, RowTarget.of(attn.o_proj)), attn.o_proj)
        x, normed = layer_norm(rows, x, out, self.norm2, mlp.fc1)
        packed = rows.product(normed, mlp.fc1, bias=False)
        to = RowTarget.of(mlp.fc2)
        hidden = rows.activate(packed, to, activation="gelu_tanh", gated=False, bias=mlp.fc1.bias)
        return x, branch(rows, hidden, mlp.fc2)


class RowwiseTower(PatchTower):
    rows: RowOps

    def encode(self, x: Tensor, rows: int, cols: int) -> Tensor:
        views, added = len(x), Added()
        x = (x + self.positions(rows, cols)).flatten(0, 1)
        layers: Any = self.layers
        for layer in layers:
            x, added = layer.along(x, added, views)
        norm: Any = self.norm
        if not isinstance(norm, UnitLayerNorm):  # a norm has a weight if not all of its readers are known
            total = sum((part for part in added.values() if part is not None), x)
            return norm(total.unflatten(0, (views, -1)))
        _, normed = self.rows.norm(x, RowTarget(norm.dtype), eps=norm.eps, kind="layer", **added)
        return normed.data.unflatten(0, (views, -1))


def branch(rows: RowOps, operand: Operand, linear: Any) -> Added:
    return {"branch": rows.product(operand, linear, bias=False), "branch_bias": linear.bias}


def layer_norm(rows: RowOps, x: Tensor, added: Added, norm: Any, reader: Any) -> tuple[Tensor, Operand]:
    return rows.norm(x, RowTarget.of(reader), kind="layer", **norm_options(norm), **added)
