"""Fused versions of a model's input and output layers: patch embedding, action input and action output.

The classes are for ``rewrite.become``, as in :mod:`.layers`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sinew.engine.cuda.fused.layers import Modulated, carried, flat, like, modulated, normed, one, stream_of
from sinew.engine.cuda.fused.ops import Ops
from sinew.engine.plan.norms import UnitRMSNorm
from sinew.engine.plan.time_tables import SplitActionTime
from sinew.layers.vit import VisionTransformer
from sinew.models.expert import ExpertModel

# Rows of patches are padded to a multiple of this many elements, so that tensor cores use wide loads.
ROW = 16


class PatchTower(VisionTransformer):
    """A vision tower whose patch embedding is a matrix product.

    The kernel ``preprocess`` writes the product's input, one row per patch.

    If a grid is smaller than the position table, the table for this grid is computed once.
    """

    patch_weight: Tensor  # [C, values]; the columns after 3 * patch^2 are zeros
    grids: dict[tuple[int, int], Tensor]

    def encode_patches(self, patches: Tensor, rows: int, cols: int) -> Tensor:
        """Return features [V, rows * cols, C] of patches [V, rows * cols, values]."""
        bias = self.patch_embedding.bias
        x = F.linear(patches, self.patch_weight, None if bias is None else bias.to(patches.dtype))
        return self.encode(x, rows, cols)

    def positions(self, rows: int, cols: int) -> Tensor:
        if (rows, cols) not in self.grids:
            self.grids[rows, cols] = super().positions(rows, cols)
        return self.grids[rows, cols]


def give_patches(tower: Any) -> None:
    """Prepare a tower for :class:`PatchTower`: store the weights of the patch embedding as one matrix."""
    weight = tower.patch_embedding.weight.detach().flatten(1)  # [C, 3 * patch^2]
    values = weight.shape[1]
    tower.patch_weight = F.pad(weight, (0, -values % ROW)).contiguous()
    tower.grids = {}


class FusedDecode(ExpertModel):
    """An action expert whose final norm and projection to actions are computed as one matrix product."""

    ops: Ops

    def decode_actions(self, h: Tensor, *modulation: Any) -> Tensor:
        linear: Any = self.action_out_proj
        norm = self.expert.norm
        if modulation:
            (m,) = modulation
            rows, options = modulated(self.ops, stream_of(h), norm.eps, m, linear)
        else:
            rows, options = normed(self.ops, stream_of(h), norm.eps, linear)
        return like(h, self.ops.norm_linear(rows, linear.weight, **options).float())


class FusedActionTime(SplitActionTime):
    """The input layers of pi0 and SmolVLA: two float32 matrix products, fused with their neighbouring operations."""

    ops: Ops

    def embed_actions(self, x: Tensor, time_embedding: Tensor) -> Tensor:
        last, first = self.action_time_mlp_out, self.action_part
        mixed = self.ops.norm_linear(flat(x), first.weight, bias=one(time_embedding), silu=True)
        dtype = self.expert.dtype
        return carried(self.ops.stream_linear(mixed, last.weight, bias=last.bias, dtype=dtype), x)


class TabulatedModulation(FusedDecode):
    """pi0.5's table of time embeddings in the layout of the kernels.

    The embedding of a solver step contains a scale, a shift and a gate for each norm. If norms are part of the products
    (``scaled``), the embedding also contains the product of the shift and the weights that read the norm.
    """

    scaled: bool

    def embed_actions(self, x: Tensor, time_embedding: Tensor) -> Tensor:
        linear, (first, *_), _ = self.action_in_proj, *self.modulations(time_embedding)
        scale = first[0].scale if self.scaled else None
        options = {"bias": linear.bias, "scale": scale, "dtype": self.expert.dtype}
        return carried(self.ops.stream_linear(flat(x), linear.weight, **options), x)

    def embed_time(self, t: Tensor) -> Tensor:  # [1] -> float32 [1, values]
        packed = one(super().embed_time(t)).float()  # type: ignore[safe-super]  # [norms, 3 * C]
        pieces = []
        for row, reader in zip(packed, self.readers(), strict=True):
            pieces.append(row)
            if self.scaled:
                shift = row.chunk(3)[1]
                bias = reader.weight.float() @ shift
                pieces.append(bias if reader.bias is None else bias + reader.bias.float())
        return torch.cat(pieces)[None]

    def readers(self) -> list[Any]:
        """Return the layer that reads each norm, in the order of the norms."""
        layers = [r for layer in self.expert.layers for r in (layer.attn.qkv_proj, layer.mlp.gate_up_proj)]
        return [*layers, self.action_out_proj]

    def modulations(self, time_embedding: Tensor) -> tuple[list[tuple], tuple]:
        width = self.config.expert.hidden_size
        norms, at = [], 0
        for reader in self.readers():
            scale, shift, gate = one(time_embedding)[at : at + 3 * width].chunk(3)
            at += 3 * width
            rows = len(reader.weight) if self.scaled else 0
            norms.append(Modulated(scale, shift, gate, one(time_embedding)[at : at + rows] if rows else None))
            at += rows
        norms = [m._replace(following=next_.scale) for m, next_ in pairwise(norms)] + norms[-1:]
        *layers, final = norms
        return list(zip(layers[::2], layers[1::2], strict=True)), (final,)


def folds_away(norm: Any) -> bool:
    """Return True if a norm has no weight, for example because the weight was folded into the next layer."""
    return isinstance(norm, UnitRMSNorm)
