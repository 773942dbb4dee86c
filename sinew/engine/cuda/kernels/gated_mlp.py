"""The first half of a gated MLP, activation(gate(x)) * up(x): both products and their norm in one pass.

A program multiplies one tile of the input by two tiles of the packed weight, and writes only the product of the halves
("Running VLAs at Real-time Speed", section 4.2). The norm is computed as in :mod:`.norm_linear`.
"""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from sinew.engine.cuda.kernels.lang import (
    check,
    dot,
    kernel,
    same_dtype,
    tl,
)
from sinew.engine.cuda.kernels.launch import Launch, Tile
from sinew.engine.cuda.kernels.norm_linear import given_squares, product, statistics
from sinew.engine.cuda.kernels.tiles import tile_for

Activation = Literal["gelu_tanh", "silu"]
ACTIVATIONS = ("gelu_tanh", "silu")


@kernel
def gated_mlp_kernel(
    x,  # [M, K]
    weight,  # [2 * N, K]: the gate's rows, then the rows of up
    bias,  # [2 * N] or None
    given,  # float32 [M, given_columns]: sums of squares of x, as in norm_linear; or None
    out,  # [M, N]
    M,
    eps,
    given_columns,
    x_row,
    out_row,
    N: tl.constexpr,
    K: tl.constexpr,
    GIVEN_BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    blocks_m = tl.cdiv(M, BLOCK_M)
    block = tl.program_id(0)
    rows = (block % blocks_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = (block // blocks_m) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_ok, col_ok = rows < M, cols < N
    depth = tl.arange(0, BLOCK_K)
    x_tile = x + (rows[:, None] * x_row + depth[None, :])
    gate_tile = weight + (cols[None, :] * K + depth[:, None])
    # Load the operands of the epilogue before the loop, so that their latency passes while the loop loads the weight.
    if given is not None:
        squares = given_squares(given, rows, row_ok, given_columns, GIVEN_BLOCK)
        inverse = tl.rsqrt(squares / K + eps)[:, None]
    if bias is not None:
        gate_bias = tl.load(bias + cols, mask=col_ok, other=0.0).to(tl.float32)[None, :]
        up_bias = tl.load(bias + N + cols, mask=col_ok, other=0.0).to(tl.float32)[None, :]
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        k_ok = k + depth < K
        w_ok = k_ok[:, None] & col_ok[None, :]
        a = tl.load(x_tile + k, mask=row_ok[:, None] & k_ok[None, :], other=0.0)
        w_gate = tl.load(gate_tile + k, mask=w_ok, other=0.0)
        w_up = tl.load(gate_tile + N * K + k, mask=w_ok, other=0.0)
        gate = dot(a, w_gate, gate, UPCAST)
        up = dot(a, w_up, up, UPCAST)
    if given is not None:
        gate *= inverse
        up *= inverse
    if bias is not None:
        gate += gate_bias
        up += up_bias
    if ACTIVATION == "gelu_tanh":  # sigmoid(2 u) is equal to (1 + tanh(u)) / 2
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 sqrt(2 / pi)
    else:
        inner = gate
    hidden = gate * up / (1.0 + tl.exp(-inner))
    at = out + (rows[:, None] * out_row + cols[None, :])
    tl.store(at, hidden.to(out.dtype.element_ty), mask=row_ok[:, None] & col_ok[None, :])


def prepare(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    activation: Activation,
    eps: float | None = None,
    bias: Tensor | None = None,
    squares: Tensor | None = None,
    tile: Tile | None = None,
) -> Launch:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: expected one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    M, K = x.shape
    N = len(weight) // 2
    check("x", x, (M, K), rows_apart=True)
    check("weight", weight, (2 * N, K))
    check("out", out, (M, N), rows_apart=True)
    same_dtype("weight", weight, x.dtype)
    if bias is not None:
        check("bias", bias, (2 * N,))
    tile = tile or tile_for("gated_mlp", (M, N, K), weight.dtype, x.device)
    arguments = {
        "x": x,
        "weight": weight,
        "bias": bias,
        **statistics(M, eps, squares),
        "out": out,
        "M": M,
        "eps": 0.0 if eps is None else eps,
        "x_row": x.stride(0),
        "out_row": out.stride(0),
        "N": N,
        "K": K,
        "ACTIVATION": activation,
        "BLOCK_M": tile.m,
        "BLOCK_N": tile.n,
        "BLOCK_K": tile.k,
        "UPCAST": False,
    }
    grid = (-(-M // tile.m) * -(-N // tile.n),)
    return Launch(gated_mlp_kernel, grid, arguments, tile)


def gated_mlp(x: Tensor, weight: Tensor, *, out: Tensor | None = None, **options) -> Tensor:
    """Compute :func:`reference` with the kernel. Return [M, N] in x's dtype.

    Args:
        x: [M, K].
        weight: [2 N, K], the gate's rows, then the rows of up.
        out: Memory for the result, or None.
        **options: Other options of :func:`prepare`.
    """
    out = x.new_empty(len(x), len(weight) // 2) if out is None else out
    prepare(x, weight, out, **options)()
    return out


def reference(
    x: Tensor,
    weight: Tensor,
    *,
    activation: Activation,
    eps: float | None = None,
    bias: Tensor | None = None,
    squares: Tensor | None = None,
) -> Tensor:
    """Return activation(g) * u with [g, u] = :func:`.norm_linear.product`.

    The arithmetic is float32 until the product of the halves, which is rounded once. PyTorch's own layers round g, the
    activation, u and the product.

    Args:
        x: [M, K].
        weight: [2 N, K].
        activation: The activation.
        eps: The norm's constant, or None without a norm.
        bias: [2 N], or None.
        squares: Sums of squares for the norm, float32 [M, any number], or None.
    """
    gate, up = product(x, weight, eps, bias, squares).chunk(2, dim=-1)
    active = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return (active * up).to(x.dtype)
