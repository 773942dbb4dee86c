"""The operations of :mod:`.ops` as Triton kernels on a GPU.

The functions allocate their results. During a recording, the results are memory of the graph's own pool, whose
addresses do not change. Kernels that split one sum between several programs share the workspace of their CUDA stream,
because launches of one stream do not overlap. Launches of two streams do, so each stream has its own workspace.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sinew.engine.cuda.fused.ops import Ops, ResidualStream
from sinew.engine.cuda.fused.rows import RowKernels
from sinew.engine.cuda.kernels import (
    Workspace,
    gated_mlp,
    norm_linear,
    packed_attention,
    preprocess,
    qkv_rope,
    row_norm,
    splitk_linear,
)
from sinew.engine.cuda.kernels.resize_tables import ResizeTables
from sinew.engine.cuda.kernels.tiles import tile_for
from sinew.engine.cuda.kernels.workspace import STREAM_BLOCKS, STREAM_PARTS
from sinew.layers.decoder import KeyValue


class Kernels(Ops):
    def __init__(self, device: torch.device):
        self.rows = RowKernels()
        self._device = device
        self._workspaces: dict[int, Workspace] = {}  # key: the CUDA stream, 0 without one

    @property
    def workspace(self) -> Workspace:
        """The workspace of the current CUDA stream. A recording contains its address.

        The first launch on a stream allocates it. This is always a run before a recording (:data:`graphs.WARM_UPS`).
        """
        on_gpu = self._device.type == "cuda"
        stream = torch.cuda.current_stream(self._device).cuda_stream if on_gpu else 0
        if stream not in self._workspaces:
            self._workspaces[stream] = Workspace(STREAM_PARTS, STREAM_BLOCKS, self._device)
        return self._workspaces[stream]

    def norm_linear(self, x: Tensor, weight: Tensor, **norm: Any) -> Tensor:
        out = weight.new_empty(len(x), len(weight))
        return norm_linear.norm_linear(x, weight, out=out, **norm)

    def gated_mlp(self, x: Tensor, weight: Tensor, activation: gated_mlp.Activation, **norm: Any) -> Tensor:
        return gated_mlp.gated_mlp(x, weight, activation=activation, **norm)

    def qkv_rope(
        self, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, int], **norm: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        D = 2 * cos.shape[-1]
        q, k, v = (x.new_empty(len(x), count, D) for count in (heads[0], heads[1], heads[1]))
        qkv_rope.prepare(x, weight, cos, sin, q, k, v, self.workspace, **norm)()
        return q, k, v

    def splitk_linear(self, x: Tensor, weight: Tensor, **rest: Any) -> Tensor:
        return splitk_linear.splitk_linear(x, weight, workspace=self.workspace, **rest)

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
        tile = tile_for("splitk_linear", (len(x), *weight.shape), weight.dtype, x.device)
        columns = splitk_linear.blocks(len(weight), tile)
        squares = torch.empty(len(x), columns, dtype=torch.float32, device=x.device)
        extra: dict[str, Any] = {"squares": squares, "scale": scale, "scaled": scaled, "tile": tile, **rest}
        splitk_linear.prepare(x, weight, out, self.workspace, **extra)()
        return ResidualStream(out, squares, scaled)

    def packed_attention(self, q: Tensor, kv: KeyValue, mask: Tensor, own: KeyValue | None = None) -> Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for launch in packed_attention.prepare(q, kv, mask, out, self.workspace, own=own):
            launch()
        return out

    def rms(self, x: Tensor, eps: float, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
        out = torch.empty_like(x)
        row_norm.prepare(x, out, eps=eps, weight=scale, offset=1.0, shift=shift)()
        return out

    def preprocess(self, frames: Tensor, resize: ResizeTables, patch: int, out: Tensor) -> None:
        preprocess.prepare(frames, resize, out, patch=patch)()
