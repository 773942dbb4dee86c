"""The checks of kernels without a matrix product, which process whole rows. See ``kernel_checks.py``."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from sinew.engine.cuda.kernels import KERNELS
from sinew.engine.cuda.kernels.fp8_quantize import E4M3
from sinew.engine.cuda.kernels.launch import Tile
from tests.engine.cuda.kernel_tensors import (
    EPS,
    SENTINEL,
    Source,
    close,
    close_in_eighths,
    guarded,
    inside,
    target,
    unguarded,
    untouched,
)

BLOCK, PAIR = Tile(n=16), Tile(2)


class Output:
    """The output of a kernel, [M, N] of type ``to``, or e4m3 with its scales, in memory that shows a wrong store.

    Args:
        scale: The scale of e4m3.
    """

    def __init__(self, M: int, N: int, to: torch.dtype, eighths: bool, scale: float, device: str) -> None:
        self.x_scale = torch.tensor(scale, device=device)
        self.scales = torch.full((M + 2,), SENTINEL, device=device) if eighths else None
        self.data = guarded(M, N, device) if eighths else target(M, N, dtype=to, device=device)

    def options(self, name: str) -> dict[str, Any]:
        if self.scales is None:
            return {name: self.data}
        return {name: self.data.view(E4M3), "scales": self.scales[1:-1], "x_scale": self.x_scale}

    def check(self, module: ModuleType, name: str, want: Tensor) -> None:
        """Compare the output with ``want``, float32 values before rounding."""
        if self.scales is None:
            close(module, name, self.data, want.to(self.data.dtype))
            untouched(self.data)
            return
        close_in_eighths(name, self.data.view(E4M3), self.scales[1:-1], want, self.x_scale)
        assert self.scales[0] == self.scales[-1] == SENTINEL, "written outside of the scales"
        unguarded(self.data)


def row_norm(
    module: ModuleType,
    dtype,
    device,
    M=5,
    C=37,
    kind="rms",
    offset=1.0,
    affine=True,
    branch=True,
    branch_bias=True,
    gate=True,
    to: torch.dtype | None = None,
    eighths=False,
    scale=0.02,
    quiet=1.0,
    away=0.0,
) -> None:
    """Check the norm kernel.

    Args:
        quiet: Factor of the input.
        away: Offset of the input.
    """
    s = Source(dtype, device)
    stream = s.rows(M, C)
    stream.mul_(quiet).add_(away)
    affinity: dict[str, Any] = {"eps": EPS, "kind": kind}
    if affine:
        affinity |= {"weight": s.vector(C), "offset": offset, "shift": s.vector(C)}
    options: dict[str, Any] = {}
    if branch:
        options |= {"branch": s.rows(M, C)}
        options |= {"gate": s.vector(C)} if gate else {}
        options |= {"branch_bias": s.vector(C)} if branch_bias else {}
    out = Output(M, C, to or dtype, eighths, scale, device)
    total = target(M, C, dtype=dtype, device=device) if branch else None
    module.row_norm(stream, total=total, **out.options("normed"), **affinity, **options)
    norm = KERNELS["row_norm"].reference
    if total is not None:
        close(module, "row_norm", total, norm(stream, **affinity, **options)[0])
        untouched(total)
    # The norm reads the sum as it was stored in the type of the stream.
    out.check(
        module, "row_norm", norm(stream if total is None else total, dtype=torch.float32, **affinity)[1]
    )


def activate(
    module: ModuleType,
    dtype,
    device,
    M=5,
    N=37,
    activation="gelu_tanh",
    gated=True,
    bias=True,
    to: torch.dtype | None = None,
    eighths=False,
    scale=0.02,
    loud=1.0,
    tile=BLOCK,
) -> None:
    """Check the activation kernel. One of the rows is zero."""
    s = Source(dtype, device)
    width = 2 * N if gated else N
    x = s.rows(M, width)
    x *= loud
    x[M // 2] = 0
    options: dict[str, Any] = {"activation": activation, "gated": gated}
    options |= {"bias": s.vector(width)} if bias else {}
    out = Output(M, N, to or dtype, eighths, scale, device)
    module.activate(x, tile=tile, **out.options("out"), **options)
    out.check(module, "activate", KERNELS["activate"].reference(x, dtype=torch.float32, **options)[0])


def rope(
    module: ModuleType,
    dtype,
    device,
    M=5,
    H=3,
    KV=2,
    D=24,
    bias=True,
    to: torch.dtype | None = None,
    tile=PAIR,
) -> None:
    s = Source(dtype, device)
    packed = s.rows(M, (H + 2 * KV) * D)
    angle = s.random(M, D // 2, dtype=torch.float32) * 3
    tables = [
        inside(table.reshape(1, -1), float("nan"))[0].view(M, -1) for table in (angle.cos(), angle.sin())
    ]
    options = {"bias": s.vector((H + 2 * KV) * D)} if bias else {}
    outs = [target(M, heads, D, dtype=to or dtype, device=device) for heads in (H, KV, KV)]
    module.rope(packed, *tables, *outs, tile=tile, **options)
    references = KERNELS["rope"].reference(packed, *tables, (H, KV), dtype=to, **options)
    for got, want in zip(outs, references, strict=True):
        if want.numel():
            close(module, "rope", got, want)
        untouched(got)


def fp8_quantize(module: ModuleType, dtype, device, M=7, K=50, scale=0.02, loud=1.0) -> None:
    """Check the FP8 conversion bit for bit, because both sides divide exactly and round to nearest. One of the rows
    is zero."""
    s = Source(dtype, device)
    x = inside(s.random(M, K), 1e30)  # the padding is 1e30 instead of NaN, because a maximum ignores NaN
    x *= loud
    x[M // 2] = 0
    x_scale = torch.tensor(scale, device=device)
    data, scales = guarded(M, K, device), torch.full((M + 2,), SENTINEL, device=device)
    module.fp8_quantize(x, data=data.view(E4M3), scales=scales[1:-1], x_scale=x_scale)
    want, wanted = KERNELS["fp8_quantize"].reference(x, x_scale=x_scale)
    assert torch.equal(scales[1:-1], wanted), "scales"
    assert torch.equal(data.view(E4M3).float(), want.float()), "values differ"
    assert torch.isfinite(data.view(E4M3).float()).all(), "not finite"
    assert scales[0] == scales[-1] == SENTINEL, "written outside of the scales"
    unguarded(data)


CHECKS = {"row_norm": row_norm, "activate": activate, "rope": rope, "fp8_quantize": fp8_quantize}

EDGES: dict[str, list[dict[str, Any]]] = {
    "row_norm": [
        {"branch": False},
        {"gate": False, "C": 64},
        {"M": 1, "C": 1},
        {"affine": False, "quiet": 1e-4, "branch": False},  # values as small as eps
        {"kind": "layer", "offset": 0.0, "gate": False},
        # the mean is large in comparison with the deviations
        {"kind": "layer", "offset": 0.0, "away": 4.0, "branch": False},
        {"kind": "layer", "M": 1, "C": 1},
        {"to": torch.bfloat16},
        {"eighths": True, "kind": "layer", "offset": 0.0},
        {"eighths": True, "affine": False, "C": 64},
        {"eighths": True, "scale": 0.002},  # most values are above 448 times the scale
        {"eighths": True, "scale": 0.05, "branch": False},
    ],
    "activate": [
        {"gated": False},
        {"activation": "silu", "bias": False},
        {"gated": False, "activation": "silu", "M": 1, "N": 1},
        {"N": 64, "loud": 30.0},  # whole blocks, and exponentials that overflow
        {"to": torch.bfloat16},
        {"eighths": True},
        {"eighths": True, "gated": False, "bias": False},
        {"eighths": True, "activation": "silu"},
        {"eighths": True, "scale": 0.001, "gated": False},
    ],
    "rope": [
        {"KV": 0, "H": 2, "D": 32},  # only queries
        {"H": 0, "KV": 1, "D": 32},  # only keys and values
        {"M": 1, "bias": False, "tile": Tile(4)},
        {"to": torch.bfloat16},
    ],
    "fp8_quantize": [
        {
            "scale": 0.005
        },  # many values are above 448 times the scale, and some below 480 times, which would be NaN
        {"scale": 3.0, "K": 64},  # most values are below the smallest normal number
        {"loud": 1e30, "scale": 1e28, "M": 1, "K": 1},
        {"loud": 1e-30, "scale": 1e-32},
    ],
}
