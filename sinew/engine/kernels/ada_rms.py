"""Gate, residual and adaptive RMSNorm of pi0.5's expert: two passes over the stream become one.

The modulation (scale, shift, gate) depends on the solver's step alone and comes from a table.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sinew.engine.kernels.lang import check, kernel, same_dtype, tl, wait_for_input
from sinew.engine.kernels.launch import Launch, Tile
from sinew.engine.kernels.tuning import tile_for


@kernel
def ada_rms_kernel(
    stream,  # [M, C]
    branch,  # [M, C] or None
    gate,  # [C] or None
    scale,  # [C]
    shift,  # [C]
    total,  # [M, C] or None: the stream after the branch
    normed,  # [M, C]
    eps,
    stream_row,
    branch_row,
    total_row,
    normed_row,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK_C)
    ok = cols < C
    wait_for_input(PDL)
    h = tl.load(stream + row * stream_row + cols, mask=ok, other=0.0).to(tl.float32)
    if branch is not None:
        added = tl.load(branch + row * branch_row + cols, mask=ok, other=0.0).to(tl.float32)
        if gate is not None:
            added *= tl.load(gate + cols, mask=ok, other=0.0).to(tl.float32)
        rounded = (h + added).to(total.dtype.element_ty)
        tl.store(total + row * total_row + cols, rounded, mask=ok)
        h = rounded.to(tl.float32)  # the norm reads what the stream holds
    inverse = tl.rsqrt(tl.sum(h * h, axis=0) / C + eps)
    factor = 1.0 + tl.load(scale + cols, mask=ok, other=0.0).to(tl.float32)
    y = h * inverse * factor + tl.load(shift + cols, mask=ok, other=0.0).to(tl.float32)
    tl.store(normed + row * normed_row + cols, y.to(normed.dtype.element_ty), mask=ok)


def prepare(
    stream: Tensor,
    scale: Tensor,
    shift: Tensor,
    normed: Tensor,
    *,
    eps: float,
    branch: Tensor | None = None,
    gate: Tensor | None = None,
    total: Tensor | None = None,
    tile: Tile | None = None,
    pdl: bool = False,
) -> Launch:
    M, C = stream.shape
    if (branch is None) != (total is None):
        raise ValueError("total: expected exactly where there is a branch to add")
    if gate is not None and branch is None:
        raise ValueError("gate: expected only where there is a branch to gate")
    for name, tensor in (("stream", stream), ("branch", branch), ("total", total), ("normed", normed)):
        if tensor is not None:
            check(name, tensor, (M, C), rows_apart=True)
            same_dtype(name, tensor, stream.dtype)
    for name, vector in (("scale", scale), ("shift", shift), ("gate", gate)):
        if vector is not None:
            check(name, vector, (C,))
    tile = tile or tile_for("ada_rms", (M, C), stream.dtype, stream.device)
    arguments = {
        "stream": stream,
        "branch": branch,
        "gate": gate,
        "scale": scale,
        "shift": shift,
        "total": total,
        "normed": normed,
        "eps": eps,
        "stream_row": stream.stride(0),
        "branch_row": 0 if branch is None else branch.stride(0),
        "total_row": 0 if total is None else total.stride(0),
        "normed_row": normed.stride(0),
        "C": C,
        "BLOCK_C": 1 << (C - 1).bit_length(),
        "PDL": pdl,
    }
    return Launch(ada_rms_kernel, (M,), arguments, tile, pdl)


def ada_rms(
    stream: Tensor,
    scale: Tensor,
    shift: Tensor,
    *,
    branch: Tensor | None = None,
    total: Tensor | None = None,
    normed: Tensor | None = None,
    **options,
) -> tuple[Tensor, Tensor]:
    """stream, branch: [M, C]; scale, shift, gate: [C] -> (total, normed), both [M, C], as :func:`twin`.

    ``total`` may be ``stream`` itself, and ``normed`` may be ``branch``: a program owns whole rows.
    """
    if branch is not None and total is None:
        total = torch.empty_like(stream)
    normed = torch.empty_like(stream) if normed is None else normed
    prepare(stream, scale, shift, normed, branch=branch, total=total, **options)()
    return (stream if total is None else total), normed


def twin(
    stream: Tensor,
    scale: Tensor,
    shift: Tensor,
    *,
    eps: float,
    branch: Tensor | None = None,
    gate: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """total = stream + gate * branch; normed = total / rms(total) * (1 + scale) + shift.

    Float32, rounded to the stream's dtype at two places: total, which the norm then reads, and normed.
    """
    total = stream
    if branch is not None:
        added = branch.float() if gate is None else branch.float() * gate.float()
        total = (stream.float() + added).to(stream.dtype)
    h = total.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return total, (h * (1.0 + scale.float()) + shift.float()).to(stream.dtype)
