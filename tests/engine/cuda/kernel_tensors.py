"""Tensors for the checks of kernels: random values inside memory that shows a wrong access, and how near is near.

Inputs lie inside memory full of NaN, outputs inside memory full of a sentinel, so a load or a store that misses
its mask shows.
"""

from __future__ import annotations

import os
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from sinew.engine.cuda.kernels import fp8_quantize
from sinew.engine.cuda.kernels.fp8_quantize import E4M3
from sinew.engine.cuda.kernels.lang import interpreted

# Largest error over the reference's largest value; relative L2. The interpreter cuts bfloat16 off where a GPU rounds
# it to nearest: up to 2^-7 of each scaled input and of the result, all downwards.
BOUNDS = {torch.float32: (2e-6, 1e-6), torch.bfloat16: (2**-5, 2**-6)}
ON_A_GPU = {torch.float32: (5e-6, 2e-6), torch.bfloat16: (2**-7, 2**-8)}
DEVICE = "cuda" if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") == "0" else "cpu"
SENTINEL = 1024.0
EPS = 1e-6


class Source:
    """Random tensors on a device, the same for the same seed."""

    def __init__(self, dtype: torch.dtype, device: str, seed: int = 0):
        self.dtype, self.device = dtype, device
        self.generator = torch.Generator().manual_seed(seed)

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        values = torch.randn(*shape, generator=self.generator)
        return values.to(dtype or self.dtype).to(self.device)

    def rows(self, *shape: int) -> Tensor:
        """[M, ...] with M strided rows, NaN between and behind them."""
        return inside(self.random(*shape), float("nan"))

    def vector(self, size: int) -> Tensor:
        """[size], NaN before and behind."""
        return inside(self.random(1, size), float("nan"))[0]

    def parts(self, M: int, columns: int) -> Tensor:
        """Float32 [M, columns] of sums of squares, contiguous, NaN before and behind."""
        buffer = torch.full((M + 2, columns), float("nan"), device=self.device)
        buffer[1:-1] = self.random(M, columns, dtype=torch.float32).abs() + 0.1
        return buffer[1:-1]

    def weight(self, N: int, K: int) -> Tensor:
        """[N, K] contiguous, NaN before and after, scaled so that products are of order one."""
        flat = torch.full((N * K + 64,), float("nan"), dtype=self.dtype, device=self.device)
        flat[32:-32] = (self.random(N, K, dtype=torch.float32) * K**-0.5).to(self.dtype).flatten()
        return flat[32:-32].view(N, K)


def guarded_parts(M: int, columns: int, device: str) -> Tensor:
    """Float32 [M, columns] to be written, contiguous, a sentinel before, and behind for the rows of a whole tile."""
    return torch.full((1 + M + 64, columns), SENTINEL, device=device)[1 : M + 1]


def inside(values: Tensor, filling: float) -> Tensor:
    """The same values as a view of a larger buffer: two rows around it, rows 24 elements apart."""
    M, *rest = values.shape
    size = int(np.prod(rest))
    buffer = torch.full((M + 2, size + 24), filling, dtype=values.dtype, device=values.device)
    view = buffer[1 : M + 1, :size]
    view.copy_(values.reshape(M, size))
    return view.unflatten(1, rest) if len(rest) > 1 else view


def target(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return inside(torch.full(shape, SENTINEL, dtype=dtype, device=device), SENTINEL)


def untouched(view: Tensor) -> None:
    """Nothing around an output of :func:`target` was written."""
    M, size = view.shape[0], int(np.prod(view.shape[1:]))
    buffer = view.new_empty(0).set_(view.untyped_storage()).view(M + 2, size + 24).clone()
    buffer[1 : M + 1, :size] = SENTINEL
    assert (buffer == SENTINEL).all(), "written outside of the output"


def close(module: ModuleType, name: str, got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    bounds = BOUNDS if interpreted(getattr(module, f"{name}_kernel")) else ON_A_GPU
    highest, relative = bounds[want.dtype]
    error, scale = (got.double() - want.double()), want.double()
    assert torch.isfinite(got).all(), f"{name}: not finite"
    assert error.abs().max() <= highest * scale.abs().max(), (
        f"{name}: {error.abs().max() / scale.abs().max()}"
    )
    assert error.norm() <= relative * scale.norm(), f"{name}: relative L2 {error.norm() / scale.norm()}"


def guarded(M: int, K: int, device: str) -> Tensor:
    """Bytes [M, K], contiguous, in a buffer of 77s."""
    return torch.full((M * K + 32,), 77, dtype=torch.uint8, device=device)[16:-16].view(M, K)


def unguarded(data: Tensor) -> None:
    """Nothing around an output of :func:`guarded` was written."""
    around = data._base  # the buffer that it lies in
    assert around is not None
    assert (around[:16] == 77).all(), "written before the output"
    assert (around[-16:] == 77).all(), "written behind the output"


# Of a row's largest value: what two float32 computations of it may differ by before they are converted to e4m3.
SLACK = 3e-6


def close_in_eighths(name: str, data: Tensor, scales: Tensor, want: Tensor, x_scale: Tensor | None) -> None:
    """e4m3 [M, N] and float32 [M] are the conversion of ``want``, float32, or of a number next to it.

    The conversion itself is checked to the bit with fp8_quantize. A value that was rounded to bfloat16 before
    is hundreds of times as far away as SLACK.
    """
    _, wanted = fp8_quantize.reference(want, x_scale=x_scale)
    assert torch.isfinite(scales).all(), f"{name}: scales are not finite"
    assert ((scales - wanted).abs() <= (0 if x_scale is not None else SLACK) * wanted).all(), (
        f"{name}: scales"
    )
    slack = SLACK * want.abs().amax(-1, keepdim=True)
    lowest, highest = (
        ((want + side * slack) / scales[:, None]).clamp(-448, 448).to(E4M3).float() for side in (-1, 1)
    )
    got = data.float()
    assert torch.isfinite(got).all(), f"{name}: not finite"
    outside = (got < lowest) | (got > highest)
    assert not outside.any(), f"{name}: {int(outside.sum())} of {got.numel()} values differ"
