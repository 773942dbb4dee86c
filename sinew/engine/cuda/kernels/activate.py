"""The activation between two products that a library computes: act(gate) * up, or act alone, after a bias.

One pass reads the result of the first product and writes the input of the second product, as e4m3 for an FP8 product.
Rows are split into blocks of columns, so that even a few rows keep the whole GPU busy.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sinew.engine.cuda.kernels.fp8_quantize import (
    FLOATING,
    check_output,
    converted,
    new_output,
    to_e4m3,
)
from sinew.engine.cuda.kernels.gated_mlp import ACTIVATIONS, Activation
from sinew.engine.cuda.kernels.lang import check, kernel, tl
from sinew.engine.cuda.kernels.launch import Launch, Tile
from sinew.engine.cuda.kernels.tiles import tile_for


@kernel
def activate_kernel(
    x,  # [M, 2 * N], the gate's columns and then the columns of up; or [M, N]
    bias,  # [columns of x], or None
    x_scale,  # float32 [1] if out is e4m3, else None
    out,  # [M, N]
    scales,  # float32 [M] if out is e4m3, else None
    x_row,
    out_row,
    N: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UPCAST: tl.constexpr,
):
    BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N  # blocks of one row
    row = tl.program_id(0) // BLOCKS
    block = tl.program_id(0) % BLOCKS
    cols = block * BLOCK_N + tl.arange(0, BLOCK_N)
    ok = cols < N
    gate = tl.load(x + row * x_row + cols, mask=ok, other=0.0).to(tl.float32)
    if bias is not None:
        gate += tl.load(bias + cols, mask=ok, other=0.0).to(tl.float32)
    if ACTIVATION == "gelu_tanh":  # sigmoid(2 u) is equal to (1 + tanh(u)) / 2
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 sqrt(2 / pi)
    else:
        inner = gate
    y = gate / (1.0 + tl.exp(-inner))
    if GATED:
        up = tl.load(x + row * x_row + N + cols, mask=ok, other=0.0).to(tl.float32)
        if bias is not None:
            up += tl.load(bias + N + cols, mask=ok, other=0.0).to(tl.float32)
        y *= up
    at = out + row * out_row + cols
    if scales is None:
        tl.store(at, y.to(out.dtype.element_ty), mask=ok)
    else:
        scale = tl.load(x_scale)
        tl.store(at, to_e4m3(y, scale, UPCAST), mask=ok)
        if block == 0:
            tl.store(scales + row, scale)


def prepare(
    x: Tensor,
    out: Tensor,
    *,
    activation: Activation,
    gated: bool,
    bias: Tensor | None = None,
    scales: Tensor | None = None,
    x_scale: Tensor | None = None,
    tile: Tile | None = None,
) -> Launch:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: expected one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    M, width = x.shape
    if gated and width % 2:
        raise ValueError(f"x: expected an even width for gate and up, got {width}")
    N = width // 2 if gated else width
    check("x", x, (M, width), rows_apart=True)
    if x.dtype not in FLOATING:
        raise ValueError(f"x: expected dtype float32, bfloat16 or float16, got {x.dtype}")
    check("out", out, (M, N), rows_apart=True)
    if bias is not None:
        check("bias", bias, (width,))
    check_output("out", out, scales, x_scale)
    tile = tile or tile_for("activate", (M, N), x.dtype, x.device)
    arguments = {
        "x": x,
        "bias": bias,
        "x_scale": x_scale,
        "out": out,
        "scales": scales,
        "x_row": x.stride(0),
        "out_row": out.stride(0),
        "N": N,
        "GATED": gated,
        "ACTIVATION": activation,
        "BLOCK_N": tile.n,
        "UPCAST": False,
    }
    return Launch(activate_kernel, (M * -(-N // tile.n),), arguments, tile)


def activate(
    x: Tensor,
    *,
    gated: bool,
    out: Tensor | None = None,
    scales: Tensor | None = None,
    dtype: torch.dtype | None = None,
    **options,
) -> tuple[Tensor, Tensor | None]:
    """Compute :func:`reference` with the kernel.

    Args:
        x: [M, 2 N] (the gate's columns, then the columns of up), or [M, N].
        gated: True if x has a gate.
        out: Memory for the result, or None.
        scales: Memory for the scales, float32 [M], if ``out`` is e4m3.
        dtype: Dtype of the result if ``out`` is None, by default x's dtype.
        **options: Other options of :func:`prepare`.

    Returns:
        The result, [M, N], and the scales.
    """
    if out is None:
        shape = len(x), x.shape[1] // 2 if gated else x.shape[1]
        out, scales = new_output(shape, dtype or x.dtype, x.device)
    prepare(x, out, gated=gated, scales=scales, **options)()
    return out, scales


def reference(
    x: Tensor,
    *,
    activation: Activation,
    gated: bool,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    x_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return activation(g) * u with [g, u] = x + bias if ``gated``, else activation(x + bias), and the scales.

    The arithmetic is float32 and is rounded once. For e4m3, the float32 result is converted without a rounding to
    bfloat16 before.

    Args:
        x: [M, 2 N] or [M, N].
        activation: The activation.
        gated: True if x has a gate.
        bias: As wide as x, or None.
        dtype: Dtype of the result, by default x's dtype.
        x_scale: For e4m3, the scale of the tensor, float32 scalar.

    Returns:
        The result, [M, N], and for e4m3 the scales, float32 [M], else None.
    """
    wide = x.float() if bias is None else x.float() + bias.float()
    gate, up = wide.chunk(2, dim=-1) if gated else (wide, None)
    y = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return converted(y if up is None else y * up, dtype or x.dtype, x_scale)
