"""The operations of :mod:`.ops` as Triton kernels on a GPU, and as products of cuBLAS where those measured faster.

Results are allocated here: inside a graph's capture that is memory of the graph's own pool, whose addresses
stay. Programs that split their work meet in one workspace, because launches of one stream do not overlap; with
dependent launch each kernel waits for the one before it to have finished, so they do not overlap then either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sinew.engine.cuda.fused.library import Library
from sinew.engine.cuda.fused.ops import Ops, PlainOps, ResidualStream
from sinew.engine.cuda.fused.rows import RowKernels
from sinew.engine.cuda.kernels import (
    Workspace,
    choices,
    gated_mlp,
    norm_linear,
    packed_attention,
    preprocess,
    qkv_rope,
    row_norm,
    splitk_linear,
)
from sinew.engine.cuda.kernels.launch import Launch, Tile
from sinew.engine.cuda.kernels.norm_linear import problem
from sinew.engine.cuda.kernels.resize_tables import ResizeTables
from sinew.engine.cuda.kernels.tuning import tile_for
from sinew.engine.cuda.kernels.workspace import BLOCKS, PARTS
from sinew.layers.decoder import KeyValue

Prepare = Callable[[Tile | None], Launch]


class Kernels(Ops):
    """``pdl``: dependent launch, of every kernel or of none. ``prefetch``: what streams a weight asks for it while it
    waits for the kernel before; needs ``pdl``."""

    def __init__(self, device: torch.device, pdl: bool = False, prefetch: bool = False):
        self.pdl, self.rows = pdl, RowKernels(pdl, prefetch)
        self.streaming: dict[str, Any] = {"pdl": pdl, "prefetch": prefetch}
        self.others: dict[str, Ops] = {"library": Library(self.rows), "torch": PlainOps()}
        # Twice what the published shapes need in float32, whose tiles are small: 64 MiB.
        self.workspace = Workspace(2 * PARTS, 2 * BLOCKS, device)

    def norm_linear(self, x: Tensor, weight: Tensor, **norm: Any) -> Tensor:
        out = weight.new_empty(len(x), len(weight))
        return self.launch(
            "norm_linear",
            problem(len(x), *weight.shape, squares=norm.get("squares")),
            weight,
            lambda tile: norm_linear.prepare(x, weight, out, **norm, tile=tile, **self.streaming),
            lambda ops: ops.norm_linear(x, weight, **norm),
            out,
        )

    def gated_mlp(self, x: Tensor, weight: Tensor, activation: gated_mlp.Activation, **norm: Any) -> Tensor:
        out = x.new_empty(len(x), len(weight) // 2)
        options = {"activation": activation, **norm}
        return self.launch(
            "gated_mlp",
            problem(*out.shape, weight.shape[1], squares=norm.get("squares")),
            weight,
            lambda tile: gated_mlp.prepare(x, weight, out, **options, tile=tile, **self.streaming),
            lambda ops: ops.gated_mlp(x, weight, **options),
            out,
        )

    def qkv_rope(
        self, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, int], **norm: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        D = 2 * cos.shape[-1]
        q, k, v = (x.new_empty(len(x), count, D) for count in (heads[0], heads[1], heads[1]))
        return self.launch(
            "qkv_rope",
            problem(len(x), *weight.shape, D, squares=norm.get("squares")),
            weight,
            lambda tile: qkv_rope.prepare(
                x, weight, cos, sin, q, k, v, self.workspace, **norm, tile=tile, **self.streaming
            ),
            lambda ops: ops.qkv_rope(x, weight, cos, sin, heads, **norm),
            (q, k, v),
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
        rest: dict[str, Any] = {"bias": bias, "gate": gate, "residual": residual}
        return self.launch(
            "splitk_linear",
            (len(x), *weight.shape),
            weight,
            lambda tile: splitk_linear.prepare(
                x, weight, out, self.workspace, **rest, tile=tile, **self.streaming
            ),
            lambda ops: ops.splitk_linear(x, weight, **rest),
            out,
        )

    def stream_linear(
        self,
        x: Tensor,
        weight: Tensor,
        *,
        scale: Tensor | None = None,
        dtype: torch.dtype | None = None,
        **rest: Any,
    ) -> ResidualStream:
        out = torch.empty(len(x), len(weight), dtype=dtype or x.dtype, device=x.device)
        scaled = None if scale is None else torch.empty_like(out)
        dims = (len(x), *weight.shape)
        squares: list[Tensor] = []

        def prepare(tile: Tile | None) -> Launch:
            tile = tile or tile_for("splitk_linear", dims, weight.dtype, x.device)
            columns = splitk_linear.blocks(len(weight), tile)
            squares[:] = [torch.empty(len(x), columns, dtype=torch.float32, device=x.device)]
            extra: dict[str, Any] = {"squares": squares[0], "scale": scale, "scaled": scaled, **rest}
            return splitk_linear.prepare(x, weight, out, self.workspace, **extra, tile=tile, **self.streaming)

        other = lambda ops: ops.splitk_linear(x, weight, **rest)  # noqa: E731
        rows = self.launch("splitk_linear", dims, weight, prepare, other, out)
        return ResidualStream(rows, squares[0], scaled) if rows is out else ResidualStream(rows.to(out.dtype))

    def packed_attention(self, q: Tensor, kv: KeyValue, mask: Tensor, own: KeyValue | None = None) -> Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        rows = len(q) * q.shape[1] // kv[0].shape[1]
        return self.launch(
            "packed_attention",
            (rows, len(kv[0]), 0 if own is None else len(own[0]), kv[0].shape[1], q.shape[2]),
            q,
            lambda tile: packed_attention.prepare(
                q, kv, mask, out, self.workspace, own=own, tile=tile, pdl=self.pdl
            ),
            lambda ops: ops.packed_attention(q, kv, mask, own),
            out,
        )

    def ada_rms(self, x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        affine: dict[str, Any] = {"weight": scale, "offset": 1.0, "shift": shift}
        return self.launch(
            "row_norm",
            row_norm.problem(len(x), x.shape[1], "rms", None, out.dtype),
            x,
            lambda tile: row_norm.prepare(x, out, eps=eps, **affine, tile=tile, pdl=self.pdl),
            lambda ops: ops.ada_rms(x, scale, shift, eps),
            out,
        )

    def preprocess(self, frames: Tensor, resize: ResizeTables, patch: int, out: Tensor) -> None:
        preprocess.prepare(frames, resize, out, patch=patch, pdl=self.pdl)()

    def launch(
        self,
        kernel: str,
        dims: tuple[int, ...],
        like: Tensor,
        prepare: Prepare,
        other: Callable[[Ops], Any],
        out: Any,
    ) -> Any:
        """Run ``prepare``'s launch into ``out``, or one of ``others`` where that was measured to be faster.

        dims, and the dtype and device of ``like``: what tiles and choices are kept under.
        """
        way, _ = choices.choose(kernel, dims, like.dtype, like.device, "triton")
        if way in self.others:
            return other(self.others[way])
        prepare(None)()
        return out
