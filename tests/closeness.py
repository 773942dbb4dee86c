"""The bound within which two float32 computations of the same result must agree. All parity tests use this bound.

The bound is not a constant. It is the effect of rounding on the computation under test, measured by Monte Carlo
arithmetic (Parker 1997; CESTAC, Vignes 1974). The computation is repeated with a random error of the size of a
rounding after every operation (:class:`Noise`). The resulting change of the output is the unit of the bound. The
error after a sum of n products is

    u * sqrt(n) * (root mean square of the row of results),   u = 2^-24, half a unit in the last place of float32.

The reason for sqrt(n) is that the factors vary around zero and the roundings are independent, for every order of the
sum (Higham and Mary 2019 and 2020, "A new approach to probabilistic rounding error analysis", and its sharper form
for random data). The worst case grows with n instead of sqrt(n). So the bound is relative to the magnitudes. It grows
with the length and the depth of the sums, and it contains the effect of norms, softmax and gates on an earlier error.
It is the same on every machine, because it leaves the order of the sums open, which depends on instruction sets,
threads and libraries.

Let s be the root mean square of the change of a tensor by noise. The bound is

    root mean square of (a - b) <= FACTOR * s,   and for each element   |a - b| <= FACTOR * TAIL * s.

For an element, s of its row is used if it is larger. s is never below u times the root mean square of the tensor,
because each number is rounded to float32 at the end, also where noise changes nothing. FACTOR has two reasons: the
difference of two computations contains sqrt(2) errors, and s is estimated from one sample of many numbers or a few
samples of few numbers. TAIL is the distance of the largest of a million normal numbers, in standard deviations.
research/log has the largest ratios of the golden cases with SSE and with AVX-512: 0.94 and 4.9, and the limits are 2
and 10. Instruction sets in between were not measured. A bound above LOOSE times the magnitude of the tensor would
accept wrong results, so such a bound also fails.

tests/models/test_planted_errors.py shows for every family which errors this bound detects.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from copy import copy
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sinew.layers.stores import lowbit

UNIT = 2.0**-24  # largest relative error of one rounding to float32
SAMPLES = 3
ENOUGH = 128  # a result with this many numbers needs only one sample for the estimate of its rounding
POOL = 1 << 20
FACTOR, TAIL = 2.0, 5.0
LOOSE = 4e-4

Array = np.ndarray | Tensor
Run = Callable[..., Any]  # a function that calls another function with its arguments


class Seen:
    """Records the inputs of the low-bit products of a computation on a CPU, for its repetitions with noise."""

    def __init__(self) -> None:
        self.inputs: list[Tensor] = []

    def __enter__(self) -> None:
        self._multiply = multiply = lowbit.installed()

        def note(x: Tensor, *rest: Any) -> list[Tensor]:
            self.inputs.append(x)
            return multiply(x, *rest)

        self._note = note
        lowbit.install(note)

    def __exit__(self, *error: object) -> None:
        if lowbit.installed() is self._note:  # keep a kernel that was compiled in the meantime
            lowbit.install(self._multiply)


class Noise(TorchDispatchMode):
    """Adds to every float32 result of PyTorch a random error of the size of its rounding.

    Low-bit products round their input to whole numbers. If noise changed such a whole number, this would not be a
    rounding error of float32 but another computation. The golden cases avoid numbers in the middle between two whole
    numbers. So the whole numbers stay the same, and noise changes only their scale.

    Args:
        seed: Seed of the noise.
        seen: The recorded inputs of the same computation without noise.
    """

    def __init__(self, seed: int, seen: Seen) -> None:
        super().__init__()
        self.normal, starts = pool(seed)
        self.starts = iter(starts)
        self.seen, self.products = seen, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_lowbit(func):
            before, self.products = self.seen.inputs[self.products], self.products + 1
            largest = before.abs().amax(-1, keepdim=True)
            grown = args[0].abs().amax(-1, keepdim=True) / largest.clamp(min=torch.finfo(torch.float32).tiny)
            args = (before * torch.where(largest > 0, grown, 1.0), *args[1:])
        result = func(*args, **(kwargs or {}))
        count, both_signs = terms(func)
        if count is None:
            return result
        if isinstance(result, Tensor):
            return self.rounded(result, count(args, result), both_signs)
        if isinstance(result, tuple) and isinstance(result[0], Tensor):  # the other results are statistics
            return (self.rounded(result[0], count(args, result[0]), both_signs), *result[1:])
        return result

    def rounded(self, result: Tensor, count: int, both_signs: bool) -> Tensor:
        if not count or result.dtype != torch.float32:
            return result
        unit = UNIT * math.sqrt(count)
        if (
            both_signs
        ):  # `size` is the root mean square of the row, except for the division by the root of its length
            size, unit = (
                torch.linalg.vector_norm(result, dim=-1, keepdim=True),
                unit / math.sqrt(result.shape[-1]),
            )
        else:
            size = result  # the sign of `size` has no effect, because normal numbers have both signs
        return torch.addcmul(result, size, self.normals(result.shape), value=unit)

    def normals(self, shape: torch.Size) -> Tensor:
        """Return standard normal numbers from the pool. For a larger tensor, the rows overlap with a shift."""
        start, count = next(self.starts), shape.numel()
        if count <= POOL:
            return self.normal.narrow(0, start, count).view(shape)
        rows = count // shape[-1]
        shift = max(1, (2 * POOL - start - shape[-1]) // rows)
        return self.normal[start:].as_strided((rows, shape[-1]), (shift, 1)).view(shape)


@cache
def pool(seed: int) -> tuple[Tensor, list[int]]:
    """Return the pool of normal numbers, and the start positions in the pool for the results of a computation.

    The pool contains each number twice, for results that reach its end. New random numbers for each result would take
    longer than the models.
    """
    random = torch.Generator().manual_seed(seed)
    normal = torch.randn(POOL, generator=random).repeat(2)
    return normal, torch.randint(POOL, (1 << 16,), generator=random).tolist()


@cache
def is_lowbit(func: Any) -> bool:
    return func.overloadpacket.__name__.startswith("lowbit_linear")


# gets the arguments of an operator and its result, and returns the number of terms
Terms = Callable[[Any, Tensor], int]


@cache
def terms(func: Any) -> tuple[Terms | None, bool]:
    """Return the number of terms in each element of an operator's result.

    Returns:
        A function that counts the terms, which is None for operators without rounding. And True if the terms have both
        signs, so that an element may be far smaller than its partial sums.
    """
    name = func.overloadpacket.__name__
    match name:
        case "linear" | "mm" | "bmm" | "matmul":
            return lambda args, result: args[0].shape[-1], True
        case "addmm" | "baddbmm":
            return lambda args, result: args[1].shape[-1], True
        case "conv2d" | "convolution":
            return lambda args, result: args[1][0].numel(), True
        case "layer_norm" | "native_layer_norm":
            return lambda args, result: math.prod(args[1]), True
        case "softmax" | "_softmax":
            return lambda args, result: args[0].shape[args[1]], False
        case "mean" | "sum":
            return lambda args, result: args[0].numel() // max(1, result.numel()), False
        case _ if "scaled_dot_product" in name:
            return lambda args, result: args[1].shape[-2], True
    moves = name.startswith(
        ("where", "masked_fill", "clamp", "relu", "neg", "abs")
    )  # these operators do not round
    return (None if moves or torch.Tag.pointwise not in func.tags else lambda args, result: 1), False


def runs(samples: int = SAMPLES, derivatives: bool = False) -> tuple[Run, list[Run]]:
    """Return functions that run a computation without noise and with noise.

    Args:
        samples: Number of functions with noise.
        derivatives: True for computations with derivatives, which need other settings than inference.

    Returns:
        A function that calls a function without noise, and ``samples`` functions that repeat its calls with noise.
        Each call must first run without noise.
    """
    seen = Seen()

    def within(mode: Seen | TorchDispatchMode) -> Run:
        def run(function: Callable[..., Any], *arguments: Any) -> Any:
            with torch.inference_mode(not derivatives), mode:
                return function(*arguments)

        return run

    return within(seen), [within(Noise(seed, seen)) for seed in range(samples)]


class Rounding:
    """The result of a computation, and the effect of rounding on it.

    Args:
        found: The result.
        noisy: The results with noise.
    """

    def __init__(self, found: Array, noisy: Iterable[Array]):
        self.found = torch.as_tensor(found).double()
        moved = [torch.as_tensor(other).double() - self.found for other in noisy]
        squares = torch.stack(moved).square().mean(0)
        self.magnitude = self.found.square().mean().sqrt()
        # The unit is at least the rounding of the result itself. Noise does not change tables that were computed
        # earlier, and a sine from another library or instruction set may be the next float32 number.
        self.unit = squares.mean().sqrt().clamp(min=UNIT * self.magnitude)
        self.row = squares.mean(-1, keepdim=True).sqrt().clamp(min=self.unit)

    def about(self, found: Array) -> Rounding:
        """Return the rounding of another result with the same shape and the same depth of sums, such as that for
        other words."""
        other = copy(self)
        other.found = torch.as_tensor(found).double()
        return other

    def refusal(self, expected: Array) -> str:
        """Return the reason why ``expected`` cannot be a float32 computation of the same result. "" if it can be."""
        wanted = torch.as_tensor(expected).double()
        if wanted.numel() != self.found.numel():
            return f"shape {list(self.found.shape)} instead of {list(wanted.shape)}"
        off = self.found - wanted.reshape(self.found.shape)
        if not torch.isfinite(off).all():
            return "not finite"
        if FACTOR * self.unit > LOOSE * self.magnitude:
            return f"rounding changes the result by {self.unit / self.magnitude:.1e}, so the bound is useless"
        mean, multiples = (
            off.square().mean().sqrt(),
            off.abs() / self.row,
        )  # 0 / 0 is not above the bound
        if mean > FACTOR * self.unit:
            return f"root mean square difference {mean:.2e}, {mean / self.unit:.1f} times rounding; at most {FACTOR:g}"
        if (multiples > FACTOR * TAIL).any():
            return f"difference {off.abs().max():.2e}, {multiples.max():.1f} times rounding, at most {FACTOR * TAIL:g}"
        return ""


def rounding(function: Callable[..., Array], *arguments: Any, derivatives: bool = False) -> Rounding:
    """Compute a function, and the effect of rounding on its result. ``derivatives`` is explained in :func:`runs`."""
    plainly, noisily = runs(derivatives=derivatives)
    found = plainly(function, *arguments)
    samples = 1 if torch.as_tensor(found).numel() >= ENOUGH else SAMPLES
    return Rounding(found, [run(function, *arguments) for run in noisily[:samples]])


def assert_close(found: Rounding, expected: Array, name: str = "") -> None:
    """Fail unless ``expected`` can be a float32 computation of the same result as ``found``."""
    assert not (why := found.refusal(expected)), f"{name or 'result'}: {why}"
