"""How near two float32 computations of the same thing must lie: the one bound of all parity tests.

It is no constant but what rounding itself does to the very computation under test, found by Monte Carlo arithmetic
(Parker 1997; CESTAC, Vignes 1974): the computation is repeated with a random error of a rounding's size behind every
operation (:class:`Noise`), and what that moves is the unit. The error behind a sum of n products is

    u * sqrt(n) * (root mean square of the row of results),   u = 2^-24, half a unit in the last place of float32,

because the factors scatter around zero and the roundings are independent, in whatever order the sum is taken (Higham
and Mary 2019 and 2020, "A new approach to probabilistic rounding error analysis", and its sharper form for random data;
the worst case grows with n instead of sqrt(n)). So the bound is relative to magnitudes, grows with the length and the
depth of sums, and knows what norms, softmax and gates do to an error on its way. It is the same on every machine:
instruction sets, threads and libraries choose the order of a sum, and that is left open here. With s the root mean
square of what noise moves a tensor by,

    root mean square of (a - b) <= FACTOR * s,   and of each element   |a - b| <= FACTOR * TAIL * s,

for an element with the s of its row where that is larger. s is never below u times the root mean square of the tensor:
each number is rounded to float32 at the end, also where noise moves nothing. FACTOR: two computations differ by sqrt(2)
errors, and s comes from one sample of many numbers or a few of few. TAIL: how far the largest of a million normal
numbers lies outside their root mean square. The largest ratios that golden cases have with SSE and with AVX-512 (what
lies between was not measured) are in research/log: 0.94 and 4.9, of 2 and 10. A bound above LOOSE of the magnitude of
the tensor would pass what is wrong: that fails too.

What this sees is shown for every family in tests/models/test_planted_errors.py.
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

UNIT = 2.0**-24  # the largest relative error of one rounding to float32
SAMPLES = 3
ENOUGH = 128  # numbers of a result: so many know from one sample what noise moves them by
POOL = 1 << 20
FACTOR, TAIL = 2.0, 5.0
LOOSE = 4e-4

Array = np.ndarray | Tensor
Run = Callable[..., Any]  # calls a function with its arguments


class Seen:
    """Notes what the low-bit products of a computation on a CPU read, for its noisy repetitions."""

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
        if lowbit.installed() is self._note:  # not what was compiled meanwhile
            lowbit.install(self._multiply)


class Noise(TorchDispatchMode):
    """Adds to every float32 result of PyTorch a random error of the size of its rounding.

    seen: of the same computation without noise. Low-bit products round their input to whole numbers. Another rounding
    up or down there is no rounding error of float32 but another computation, and golden cases stay away from ties; so
    the numbers stay what they were, and noise moves what scales them.
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
        if both_signs:  # the root mean square of the row
            size, unit = (
                torch.linalg.vector_norm(result, dim=-1, keepdim=True),
                unit / math.sqrt(result.shape[-1]),
            )
        else:
            size = result  # whose sign does not matter: normal numbers have either
        return torch.addcmul(result, size, self.normals(result.shape), value=unit)

    def normals(self, shape: torch.Size) -> Tensor:
        """Return standard normal numbers of the pool. Rows of more than it has overlap, shifted against one another."""
        start, count = next(self.starts), shape.numel()
        if count <= POOL:
            return self.normal.narrow(0, start, count).view(shape)
        rows = count // shape[-1]
        shift = max(1, (2 * POOL - start - shape[-1]) // rows)
        return self.normal[start:].as_strided((rows, shape[-1]), (shift, 1)).view(shape)


@cache
def pool(seed: int) -> tuple[Tensor, list[int]]:
    """Return normal numbers, twice for those that pass the end, and where the first results take theirs: drawing anew
    for each would take longer than the models."""
    random = torch.Generator().manual_seed(seed)
    normal = torch.randn(POOL, generator=random).repeat(2)
    return normal, torch.randint(POOL, (1 << 16,), generator=random).tolist()


@cache
def is_lowbit(func: Any) -> bool:
    return func.overloadpacket.__name__.startswith("lowbit_linear")


Terms = Callable[[Any, Tensor], int]  # of an operator's arguments and its result


@cache
def terms(func: Any) -> tuple[Terms | None, bool]:
    """Return what says how many terms stand behind one element of an operator's result, None where nothing is rounded;
    and whether they have both signs, so that an element may be far smaller than its partial sums."""
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
    moves = name.startswith(("where", "masked_fill", "clamp", "relu", "neg", "abs"))  # rounds nothing
    return (None if moves or torch.Tag.pointwise not in func.tags else lambda args, result: 1), False


def runs(samples: int = SAMPLES, derivatives: bool = False) -> tuple[Run, list[Run]]:
    """Return what calls functions as inference does, and ``samples`` that call the same functions again with noise. The
    first is ahead of the others, call by call. derivatives: the functions take some, which inference does not."""
    seen = Seen()

    def within(mode: Seen | TorchDispatchMode) -> Run:
        def run(function: Callable[..., Any], *arguments: Any) -> Any:
            with torch.inference_mode(not derivatives), mode:
                return function(*arguments)

        return run

    return within(seen), [within(Noise(seed, seen)) for seed in range(samples)]


class Rounding:
    """What a computation gives, and what rounding does to it. ``found``: its result; ``noisy``: those with noise."""

    def __init__(self, found: Array, noisy: Iterable[Array]):
        self.found = torch.as_tensor(found).double()
        moved = [torch.as_tensor(other).double() - self.found for other in noisy]
        squares = torch.stack(moved).square().mean(0)
        self.magnitude = self.found.square().mean().sqrt()
        # At least the rounding of the result itself: noise moves no table that was computed before, and the sines of
        # another library or instruction set may be the next number of float32.
        self.unit = squares.mean().sqrt().clamp(min=UNIT * self.magnitude)
        self.row = squares.mean(-1, keepdim=True).sqrt().clamp(min=self.unit)

    def about(self, found: Array) -> Rounding:
        """Return the same of another result of the same shape, whose sums are as deep: of other words, say."""
        other = copy(self)
        other.found = torch.as_tensor(found).double()
        return other

    def refusal(self, expected: Array) -> str:
        """Return why ``expected`` is no other float32 computation of the same; empty if it may be."""
        wanted = torch.as_tensor(expected).double()
        if wanted.numel() != self.found.numel():
            return f"shape {list(self.found.shape)} instead of {list(wanted.shape)}"
        off = self.found - wanted.reshape(self.found.shape)
        if not torch.isfinite(off).all():
            return "not finite"
        if FACTOR * self.unit > LOOSE * self.magnitude:
            return f"rounding moves it by {self.unit / self.magnitude:.1e} of itself: the bound would say nothing"
        mean, multiples = (
            off.square().mean().sqrt(),
            off.abs() / self.row,
        )  # 0 / 0 is below no bound: no refusal
        if mean > FACTOR * self.unit:
            return f"{mean:.2e} off in the mean square, {mean / self.unit:.1f} times rounding; at most {FACTOR:g}"
        if (multiples > FACTOR * TAIL).any():
            return (
                f"{off.abs().max():.2e} off, {multiples.max():.1f} times rounding; at most {FACTOR * TAIL:g}"
            )
        return ""


def rounding(function: Callable[..., Array], *arguments: Any, derivatives: bool = False) -> Rounding:
    """Compute a function and what rounding does to its result; derivatives: as of :func:`runs`."""
    plainly, noisily = runs(derivatives=derivatives)
    found = plainly(function, *arguments)
    samples = 1 if torch.as_tensor(found).numel() >= ENOUGH else SAMPLES
    return Rounding(found, [run(function, *arguments) for run in noisily[:samples]])


def assert_close(found: Rounding, expected: Array, name: str = "") -> None:
    """Fail unless ``expected`` is another float32 computation of what ``found`` is."""
    assert not (why := found.refusal(expected)), f"{name or 'result'}: {why}"
