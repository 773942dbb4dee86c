"""The operations of :mod:`.ops` as Triton kernels on a GPU, and as cuBLAS or SDPA where those measured faster.

Results are allocated here: inside a graph's capture that is memory of the graph's own pool, whose addresses
stay. Programs that split their work meet in one workspace, because launches of one stream do not overlap; with
dependent launch each kernel waits for the one before it to have finished, so they do not overlap then either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sinew.engine.cuda.ops import Ops, Plain
from sinew.engine.kernels import (
    Workspace,
    ada_rms,
    choices,
    gated_mlp,
    norm_linear,
    packed_attention,
    preprocess,
    qkv_rope,
    splitk_linear,
)
from sinew.engine.kernels.launch import Launch, Tile
from sinew.engine.kernels.resize_tables import Resize
from sinew.engine.kernels.shapes import BLOCKS, PARTS
from sinew.layers.decoder import KeyValue

Prepare = Callable[[Tile | None], Launch]
Result = Tensor | tuple[Tensor, ...]


class Kernels(Ops):
    """``pdl``: dependent launch, of every kernel or of none."""

    def __init__(self, device: torch.device, pdl: bool = False):
        self.pdl, self.plain = pdl, Plain()
        # Twice what the published shapes need in float32, whose tiles are small: 64 MiB.
        self.workspace = Workspace(2 * PARTS, 2 * BLOCKS, device)

    def norm_linear(self, x: Tensor, weight: Tensor, **norm: Any) -> Tensor:
        out = weight.new_empty(len(x), len(weight))
        return self.launch(
            "norm_linear",
            (len(x), *weight.shape),
            weight,
            lambda tile: norm_linear.prepare(x, weight, out, **norm, tile=tile, pdl=self.pdl),
            lambda: self.plain.norm_linear(x, weight, **norm),
            out,
        )

    def gated_mlp(self, x: Tensor, weight: Tensor, activation: gated_mlp.Activation, **norm: Any) -> Tensor:
        out = x.new_empty(len(x), len(weight) // 2)
        options = {"activation": activation, **norm}
        return self.launch(
            "gated_mlp",
            (*out.shape, weight.shape[1]),
            weight,
            lambda tile: gated_mlp.prepare(x, weight, out, **options, tile=tile, pdl=self.pdl),
            lambda: self.plain.gated_mlp(x, weight, **options),
            out,
        )

    def qkv_rope(
        self, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, int], **norm: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        D = 2 * cos.shape[-1]
        outs = tuple(x.new_empty(len(x), count, D) for count in (heads[0], heads[1], heads[1]))
        return self.launch(
            "qkv_rope",
            (len(x), *weight.shape, D),
            weight,
            lambda tile: qkv_rope.prepare(x, weight, cos, sin, *outs, **norm, tile=tile, pdl=self.pdl),
            lambda: self.plain.qkv_rope(x, weight, cos, sin, heads, **norm),
            outs,
        )

    def splitk_linear(
        self,
        x: Tensor,
        weight: Tensor,
        *,
        bias: Tensor | None = None,
        gate: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        out = x.new_empty(len(x), len(weight))
        rest = {"bias": bias, "gate": gate, "residual": residual}
        return self.launch(
            "splitk_linear",
            (len(x), *weight.shape),
            weight,
            lambda tile: splitk_linear.prepare(
                x, weight, out, self.workspace, **rest, tile=tile, pdl=self.pdl
            ),
            lambda: self.plain.splitk_linear(x, weight, **rest),
            out,
        )

    def packed_attention(self, q: Tensor, kv: KeyValue, mask: Tensor, own: KeyValue | None = None) -> Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        rows = len(q) * q.shape[1] // kv[0].shape[1]
        return self.launch(
            "packed_attention",
            (rows, mask.shape[1], q.shape[2]),
            q,
            lambda tile: packed_attention.prepare(
                q, kv, mask, out, self.workspace, own=own, tile=tile, pdl=self.pdl
            ),
            lambda: self.plain.packed_attention(q, kv, mask, own),
            out,
        )

    def ada_rms(self, x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        return self.launch(
            "ada_rms",
            tuple(x.shape),
            x,
            lambda tile: ada_rms.prepare(x, scale, shift, out, eps=eps, tile=tile, pdl=self.pdl),
            lambda: self.plain.ada_rms(x, scale, shift, eps),
            out,
        )

    def preprocess(self, frames: Tensor, resize: Resize, patch: int, out: Tensor) -> None:
        preprocess.prepare(frames, resize, out, patch=patch, pdl=self.pdl)()

    def launch(
        self,
        kernel: str,
        dims: tuple[int, ...],
        like: Tensor,
        prepare: Prepare,
        plain: Callable[[], Any],
        out: Any,
    ) -> Any:
        """Run ``prepare``'s launch into ``out``, or ``plain`` where that was measured to be faster.

        dims, and the dtype and device of ``like``: what tiles and choices are kept under.
        """
        way, _ = choices.choose(kernel, dims, like.dtype, like.device, "triton")
        if way == "torch":
            return plain()
        prepare(None)()
        return out
