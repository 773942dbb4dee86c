"""Gate, residual, norm and affine part in one pass over the residual stream, before a product that a library computes.

The norm is RMSNorm or LayerNorm. Its weight is the model's weight, pi0.5's modulation of a step (from a table), or
absent. The result may have another dtype than the stream. For an FP8 product it is e4m3, and the conversion of
:mod:`.fp8_quantize` happens in the registers that already contain the row.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from sinew.engine.cuda.kernels.fp8_quantize import (
    FLOATING,
    check_output,
    check_row,
    converted,
    new_output,
    to_e4m3,
)
from sinew.engine.cuda.kernels.lang import check, kernel, same_dtype, tl
from sinew.engine.cuda.kernels.launch import Launch, Tile
from sinew.engine.cuda.kernels.tiles import tile_for

Kind = Literal["rms", "layer"]
KINDS = ("rms", "layer")


@kernel
def row_norm_kernel(
    x,  # [M, C], the residual stream; its name is x, because Triton reserves the name stream
    branch,  # [M, C] or None
    branch_bias,  # [C] or None
    gate,  # [C] or None
    weight,  # [C] or None
    shift,  # [C] or None
    squares,  # float32 [M, PARTS]: sums of squares that another kernel computed; None: this kernel computes them
    x_scale,  # float32 [1] if normed is e4m3, else None
    total,  # [M, C], the stream after the branch is added; or None
    normed,  # [M, C]
    scales,  # float32 [M] if normed is e4m3, else None
    eps,
    offset,
    x_row,
    branch_row,
    total_row,
    normed_row,
    C: tl.constexpr,
    LAYER: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK_C)
    ok = cols < C
    h = tl.load(x + row * x_row + cols, mask=ok, other=0.0).to(tl.float32)
    if branch is not None:
        added = tl.load(branch + row * branch_row + cols, mask=ok, other=0.0).to(tl.float32)
        if branch_bias is not None:
            added += tl.load(branch_bias + cols, mask=ok, other=0.0).to(tl.float32)
        if gate is not None:
            added *= tl.load(gate + cols, mask=ok, other=0.0).to(tl.float32)
        rounded = (h + added).to(total.dtype.element_ty)
        tl.store(total + row * total_row + cols, rounded, mask=ok)
        h = rounded.to(tl.float32)  # the norm reads the rounded values, which the stream stores
    if LAYER:
        h = tl.where(ok, h - tl.sum(h, axis=0) / C, 0.0)
    if squares is None:
        power = tl.sum(h * h, axis=0)
    else:
        part = tl.arange(0, BLOCK_PARTS)
        power = tl.sum(tl.load(squares + row * PARTS + part, mask=part < PARTS, other=0.0), axis=0)
    y = h * tl.rsqrt(power / C + eps)
    if weight is not None:
        y *= offset + tl.load(weight + cols, mask=ok, other=0.0).to(tl.float32)
    if shift is not None:
        y += tl.load(shift + cols, mask=ok, other=0.0).to(tl.float32)
    at = normed + row * normed_row + cols
    if scales is None:
        tl.store(at, y.to(normed.dtype.element_ty), mask=ok)
    else:
        scale = tl.load(x_scale)
        tl.store(at, to_e4m3(y, scale, UPCAST), mask=ok)
        tl.store(scales + row, scale)


def prepare(
    stream: Tensor,
    normed: Tensor,
    *,
    eps: float,
    kind: Kind = "rms",
    weight: Tensor | None = None,
    offset: float = 0.0,
    shift: Tensor | None = None,
    squares: Tensor | None = None,
    branch: Tensor | None = None,
    branch_bias: Tensor | None = None,
    gate: Tensor | None = None,
    total: Tensor | None = None,
    scales: Tensor | None = None,
    x_scale: Tensor | None = None,
    tile: Tile | None = None,
) -> Launch:
    if kind not in KINDS:
        raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    M, C = stream.shape
    if (branch is None) != (total is None):
        raise ValueError("total: total and branch must be passed together")
    vectors = {"weight": weight, "shift": shift, "branch_bias": branch_bias, "gate": gate}
    for name in ("branch_bias", "gate"):
        if vectors[name] is not None and branch is None:
            raise ValueError(f"{name}: can only be passed together with a branch")
    for name, tensor in (("stream", stream), ("branch", branch), ("total", total), ("normed", normed)):
        if tensor is not None:
            check(name, tensor, (M, C), rows_apart=True)
    for name, tensor in (("stream", stream), ("branch", branch)):
        if tensor is not None and tensor.dtype not in FLOATING:
            raise ValueError(f"{name}: expected dtype float32, bfloat16 or float16, got {tensor.dtype}")
    if total is not None:
        same_dtype("total", total, stream.dtype)
    for name, vector in vectors.items():
        if vector is not None:
            check(name, vector, (C,))
    if squares is not None:
        if kind != "rms" or branch is not None:
            raise ValueError("squares: can only be passed for an RMS norm without a branch")
        check("squares", squares, (M, squares.shape[-1]))
        same_dtype("squares", squares, torch.float32)
    check_row("stream", C)
    check_output("normed", normed, scales, x_scale)
    parts = 1 if squares is None else squares.shape[1]
    tile = tile or tile_for("row_norm", (M, C), stream.dtype, stream.device)
    arguments = {
        "x": stream,
        "branch": branch,
        **vectors,
        "squares": squares,
        "x_scale": x_scale,
        "total": total,
        "normed": normed,
        "scales": scales,
        "eps": eps,
        "offset": offset,
        "x_row": stream.stride(0),
        "branch_row": 0 if branch is None else branch.stride(0),
        "total_row": 0 if total is None else total.stride(0),
        "normed_row": normed.stride(0),
        "C": C,
        "LAYER": kind == "layer",
        "PARTS": parts,
        "BLOCK_C": 1 << (C - 1).bit_length(),
        "BLOCK_PARTS": 1 << (parts - 1).bit_length(),
        "UPCAST": False,
    }
    return Launch(row_norm_kernel, (M,), arguments, tile)


def row_norm(
    stream: Tensor,
    *,
    branch: Tensor | None = None,
    total: Tensor | None = None,
    normed: Tensor | None = None,
    scales: Tensor | None = None,
    dtype: torch.dtype | None = None,
    **options,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute :func:`reference` with the kernel.

    A program owns whole rows, so ``total`` may be ``stream`` itself, and ``normed`` may be ``branch``.

    Args:
        stream: [M, C].
        branch: [M, C], or None.
        total: Memory for the stream after the branch, or None.
        normed: Memory for the norm, or None.
        scales: Memory for the scales, float32 [M], if ``normed`` is e4m3.
        dtype: Dtype of the norm if ``normed`` is None, by default the stream's dtype.
        **options: Other options of :func:`prepare`.

    Returns:
        total, normed and scales.
    """
    if branch is not None and total is None:
        total = torch.empty_like(stream)
    if normed is None:
        normed, scales = new_output(stream.shape, dtype or stream.dtype, stream.device)
    prepare(stream, normed, branch=branch, total=total, scales=scales, **options)()
    return (stream if total is None else total), normed, scales


def reference(
    stream: Tensor,
    *,
    eps: float,
    kind: Kind = "rms",
    weight: Tensor | None = None,
    offset: float = 0.0,
    shift: Tensor | None = None,
    squares: Tensor | None = None,
    branch: Tensor | None = None,
    branch_bias: Tensor | None = None,
    gate: Tensor | None = None,
    dtype: torch.dtype | None = None,
    x_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return total, normed and scales.

    total = stream + gate * (branch + branch_bias), and normed = norm(total) * (offset + weight) + shift. The norm is x
    / sqrt(mean(x^2) + eps), and for "layer" the norm of x - mean(x).

    The arithmetic is float32, rounded at two places: total to the stream's dtype, which the norm then reads, and normed
    to ``dtype``. For e4m3, the float32 result is converted without a rounding to bfloat16 before.

    Args:
        stream: [M, C].
        eps: The norm's constant.
        kind: "rms" or "layer".
        weight: [C], or None for no factor.
        offset: 0 for a plain weight, 1 for a weight that is stored as its distance from one (Gemma, pi0.5's
            modulation).
        shift: [C], or None.
        squares: float32 [M, any number]. The sum of a row replaces the sum of squares of the stream, for a stream that
            was multiplied after its squares were computed.
        branch: [M, C], or None.
        branch_bias: [C], or None.
        gate: [C], or None.
        dtype: Dtype of normed, by default the stream's dtype.
        x_scale: For e4m3, the scale of the tensor, float32 scalar.

    Returns:
        total and normed, [M, C], and for e4m3 the scales, float32 [M], else None.
    """
    total = stream
    if branch is not None:
        added = branch.float() if branch_bias is None else branch.float() + branch_bias.float()
        total = (stream.float() + (added if gate is None else added * gate.float())).to(stream.dtype)
    h = total.float()
    if kind == "layer":
        h = h - h.mean(-1, keepdim=True)
    power = h.pow(2).sum(-1, keepdim=True) if squares is None else squares.sum(-1, keepdim=True)
    y = h * torch.rsqrt(power / h.shape[-1] + eps)
    if weight is not None:
        y = y * (offset + weight.float())
    if shift is not None:
        y = y + shift.float()
    return total, *converted(y, dtype or stream.dtype, x_scale)
