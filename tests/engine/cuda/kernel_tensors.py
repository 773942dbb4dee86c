"""Random tensors for the checks of kernels, inside memory that shows a wrong access, and the bounds of the
comparison.

The memory around inputs is NaN, and the memory around outputs has a fixed value. So a load or store outside of its
mask changes the result or this value.
"""

from __future__ import annotations

import math
import os
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from sinew.engine.cuda.kernels import fp8_quantize
from sinew.engine.cuda.kernels.fp8_quantize import E4M3
from sinew.engine.cuda.kernels.lang import interpreted

# The entries are the largest error, relative to the largest reference value, and the relative L2 error. The
# interpreter truncates bfloat16, while a GPU rounds to nearest. Truncation causes an error of up to 2^-7 of each
# scaled input and of the result, always downwards.
BOUNDS = {torch.float32: (2e-6, 1e-6), torch.bfloat16: (2**-5, 2**-6)}
ON_A_GPU = {torch.float32: (5e-6, 2e-6), torch.bfloat16: (2**-7, 2**-8)}
DEVICE = "cuda" if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") == "0" else "cpu"
SENTINEL = 1024.0
EPS = 1e-6


class Source:
    """Random tensors on a device. The same seed gives the same tensors."""

    def __init__(self, dtype: torch.dtype, device: str, seed: int = 0):
        self.dtype, self.device = dtype, device
        self.generator = torch.Generator().manual_seed(seed)

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        values = torch.randn(*shape, generator=self.generator)
        return values.to(dtype or self.dtype).to(self.device)

    def rows(self, *shape: int) -> Tensor:
        """Return a tensor [M, ...] whose rows are not adjacent in memory. NaN is between and behind the rows."""
        return inside(self.random(*shape), float("nan"))

    def vector(self, size: int) -> Tensor:
        """Return a vector [size] with NaN before and behind it."""
        return inside(self.random(1, size), float("nan"))[0]

    def parts(self, M: int, columns: int) -> Tensor:
        """Return sums of squares, float32 [M, columns], contiguous, with NaN before and behind them."""
        buffer = torch.full((M + 2, columns), float("nan"), device=self.device)
        buffer[1:-1] = self.random(M, columns, dtype=torch.float32).abs() + 0.1
        return buffer[1:-1]

    def weight(self, N: int, K: int) -> Tensor:
        """Return a contiguous weight [N, K] with NaN before and behind it, scaled so that products have a size of
        about one."""
        flat = torch.full((N * K + 64,), float("nan"), dtype=self.dtype, device=self.device)
        flat[32:-32] = (self.random(N, K, dtype=torch.float32) * K**-0.5).to(self.dtype).flatten()
        return flat[32:-32].view(N, K)

    def codes(self, N: int, K: int, form: str) -> tuple[Tensor, Tensor]:
        """Codes and scales of a low-bit weight [N, K] as ``weight_only_linear`` reads them. There are codes of 127 and
        scales of NaN before and after."""
        width, dtype = (K // 2, torch.uint8) if form == "q4_0" else (K, torch.int8)
        flat = torch.full((N * width + 64,), 127, dtype=dtype)
        low, high = (0, 256) if form == "q4_0" else (-127, 128)
        flat[32:-32] = torch.randint(low, high, (N * width,), generator=self.generator).to(dtype)
        size, kind = ((N,), torch.float32) if form == "int8" else ((N, K // 32), torch.float16)
        scales = torch.full((math.prod(size) + 64,), float("nan"), dtype=kind)
        largest = K**0.5 * (4 if form == "q4_0" else 64)
        scales[32:-32] = (torch.rand(math.prod(size), generator=self.generator) + 0.5).to(kind) / largest
        codes, scales = flat.to(self.device)[32:-32].view(N, width), scales.to(self.device)[32:-32].view(size)
        return codes, scales


def guarded_parts(M: int, columns: int, device: str) -> Tensor:
    """Return an output float32 [M, columns], contiguous, in memory with a fixed value before it and for a whole tile
    behind it."""
    return torch.full((1 + M + 64, columns), SENTINEL, device=device)[1 : M + 1]


def inside(values: Tensor, filling: float) -> Tensor:
    """Return the values as a view of a larger buffer, with two rows around it and 24 more elements in each row."""
    M, *rest = values.shape
    size = int(np.prod(rest))
    buffer = torch.full((M + 2, size + 24), filling, dtype=values.dtype, device=values.device)
    view = buffer[1 : M + 1, :size]
    view.copy_(values.reshape(M, size))
    return view.unflatten(1, rest) if len(rest) > 1 else view


def target(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return inside(torch.full(shape, SENTINEL, dtype=dtype, device=device), SENTINEL)


def untouched(view: Tensor) -> None:
    """Check that nothing was written around an output of :func:`target`."""
    M, size = view.shape[0], int(np.prod(view.shape[1:]))
    buffer = view.new_empty(0).set_(view.untyped_storage()).view(M + 2, size + 24).clone()
    buffer[1 : M + 1, :size] = SENTINEL
    assert (buffer == SENTINEL).all(), "the kernel wrote outside of the output"


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
    """Return an output of bytes [M, K], contiguous, in a buffer with the value 77."""
    return torch.full((M * K + 32,), 77, dtype=torch.uint8, device=device)[16:-16].view(M, K)


def unguarded(data: Tensor) -> None:
    """Check that nothing was written around an output of :func:`guarded`."""
    around = data._base  # the buffer that contains the output
    assert around is not None
    assert (around[:16] == 77).all(), "the kernel wrote before the output"
    assert (around[-16:] == 77).all(), "the kernel wrote behind the output"


# Two float32 results may differ by this fraction of the row's largest value, before they are converted to e4m3.
SLACK = 3e-6


def close_in_eighths(name: str, data: Tensor, scales: Tensor, want: Tensor, x_scale: Tensor) -> None:
    """Check that ``data`` e4m3 [M, N] with ``scales`` float32 [M] is the conversion of ``want``, or of a close
    number.

    The check of fp8_quantize compares the conversion itself bit for bit. A value that was rounded to bfloat16 before
    differs by hundreds of times SLACK.
    """
    _, wanted = fp8_quantize.reference(want, x_scale=x_scale)
    assert torch.equal(scales, wanted), f"{name}: scales"
    slack = SLACK * want.abs().amax(-1, keepdim=True)
    lowest, highest = (
        ((want + side * slack) / scales[:, None]).clamp(-448, 448).to(E4M3).float() for side in (-1, 1)
    )
    got = data.float()
    assert torch.isfinite(got).all(), f"{name}: not finite"
    outside = (got < lowest) | (got > highest)
    assert not outside.any(), f"{name}: {int(outside.sum())} of {got.numel()} values differ"
