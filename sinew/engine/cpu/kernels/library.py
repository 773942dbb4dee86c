"""Load the compiled library once, compare its results with the PyTorch reference, and use it for the operators.

Without the library, the operators compute the same results with the slow reference. ``sinew doctor`` prints which of
the two is in use, and why.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from sinew.bundle.quant import FORMATS, pack_ternary
from sinew.engine.cpu.kernels import float_kernels, frame_kernels, layer_kernels
from sinew.engine.cpu.kernels.build import build
from sinew.engine.cpu.kernels.float_kernels import FloatKernels
from sinew.engine.cpu.kernels.frame_kernels import SWITCH, check, kernel_names, load
from sinew.engine.cpu.kernels.layer_kernels import PANELS_NUMBERS, LayerKernels, check_codes, number_of
from sinew.engine.measured import ROWS, WIDTH, time_products
from sinew.layers.stores import lowbit
from sinew.steps.image import compiled

log = logging.getLogger(__name__)

TILES = "amx"  # name of the kernels that multiply with AMX tiles


@dataclass(frozen=True)
class Extension:
    """The library and the functions that compute low-bit products on this machine.

    Attributes:
        kernels: The instruction set of the kernels, or "reference".
        reason: The reason why these kernels were chosen, as text.
        available: All instruction sets that this CPU can run, the best first.
        panels: The orders of weights (``lowbit.INTEGERS`` and ``lowbit.HALVES``) that the kernels multiply.
        multiply_all: Computes the low-bit products.
        lay_out: Brings int8 weights into panels.
        frames: The kernels that resize frames; None if numpy resizes them.
        floats: The kernels between products.
        layers: The kernels of whole layers.
        attention: The products in attention over layers in bfloat16 or few bits: the order of sums in bfloat16
            (``lowbit.BF16_TILES`` or ``lowbit.BF16_ODD``), "int16" or "float32".
    """

    kernels: str
    reason: str
    available: tuple[str, ...] = ()
    panels: tuple[str, ...] = ()
    multiply_all: Callable[..., list[Tensor]] = lowbit.reference_all
    lay_out: lowbit.LayOut = lowbit.lay_out_into
    frames: compiled.FrameKernels | None = None
    floats: FloatKernels = float_kernels.REFERENCES
    layers: LayerKernels = layer_kernels.REFERENCES
    attention: str = "float32"

    @property
    def compiled(self) -> bool:
        """Return True if compiled kernels are in use, or False if the PyTorch reference is in use."""
        return self.kernels != "reference"

    @property
    def halves(self) -> str | None:
        """Return the fastest order in which a kernel here sums matrix products of bfloat16 (:data:`lowbit.HALVES`).

        None if no kernel multiplies bfloat16.
        """
        return next((order for order in lowbit.HALVES if order in self.panels), None)

    @property
    def integers(self) -> str | None:
        """Return the order of int8 weights that the kernels multiply without a conversion (:data:`lowbit.INTEGERS`).

        None if the kernels convert int8 weights in each product.
        """
        return next((order for order in lowbit.INTEGERS if order in self.panels), None)


@cache
def extension() -> Extension:
    """Return this machine's library. The first call compiles, loads, checks and installs it."""
    result = _load(os.environ.get(SWITCH, ""))
    lowbit.install(result.multiply_all)
    compiled.install(result.frames)
    float_kernels.install(result.floats)
    layer_kernels.install(result.layers)
    if not result.compiled:
        log.warning("PyTorch computes low-bit products, which is slow: %s", result.reason)
    return result


def _load(asked: str) -> Extension:
    if asked == "off":
        return Extension("reference", f"{SWITCH}=off")
    built = build()
    if built.path is None:
        return Extension("reference", built.reason)
    try:
        library = load(str(built.path))
    except OSError as error:
        return Extension("reference", f"{built.path} cannot be loaded: {error}")
    names = kernel_names(library)
    if asked and asked not in names:
        choices = ", ".join(names)
        return Extension(
            "reference", f"this CPU has no kernels {SWITCH}={asked}; use one of: {choices}", names
        )
    index, measured = (names.index(asked), "") if asked else _faster(library, names)
    multiply_all = partial(_multiply_all, library, index)
    takes = partial(library.lowbit_takes_panels, index)
    panels = tuple(order for order, number in PANELS_NUMBERS.items() if takes(number))
    floats, layers = FloatKernels.compiled(library, index), LayerKernels.compiled(library, index)
    lay_out, frames = partial(_lay_out, library, index), frame_kernels.from_library(library, index)
    if wrong := (
        differs(multiply_all, lay_out, panels)
        or frame_kernels.differs(frames)
        or float_kernels.differs(floats)
        or layer_kernels.differs(layers, floats, multiply_all)
    ):
        return Extension(
            "reference", f"{names[index]} kernels of {built.path} differ from the reference in {wrong}", names
        )
    reason = built.reason + measured
    if without_tiles := library.lowbit_without_tiles().decode():
        reason += f"; without amx: {without_tiles}"
    attention = library.lowbit_attention(index).decode()
    return Extension(
        names[index], reason, names, panels, multiply_all, lay_out, frames, floats, layers, attention
    )


def _faster(library: Any, names: Sequence[str]) -> tuple[int, str]:
    """Return the index in ``names`` of the fastest kernels, and the measured times as text.

    The first kernels of ``names`` are the fastest, unless they multiply with AMX tiles. Whether the first or the second
    kernels are faster then depends on the CPU and on its hypervisor, so both are measured.
    """
    if names[0] != TILES or len(names) < 2:
        return 0, ""
    x, weight = torch.full((ROWS, WIDTH), 0.5), torch.full((WIDTH, WIDTH), 1, dtype=torch.uint8)
    scale = torch.ones(WIDTH)
    number = PANELS_NUMBERS[lowbit.PANELS]
    products = {
        name: partial(
            _multiply_all, library, index, x, [weight], [scale], [None],
            lowbit.PANELS if library.lowbit_takes_panels(index, number) else "int8", lowbit.TINY,
        )
        for index, name in enumerate(names[:2])
    }  # fmt: skip
    times = time_products(products, 1)
    listing = ", ".join(f"{name} {1e3 * took:.3g}" for name, took in times.items())
    return int(times[names[1]] < times[names[0]]), f"; ms of a small product, measured here: {listing}"


def _multiply_all(
    library: Any,
    kernels: int,
    x: Tensor,
    weights: Sequence[Tensor],
    scales: Sequence[Tensor | None],
    biases: Sequence[Tensor | None],
    name: str,
    smallest: float,
) -> list[Tensor]:
    """Compute :func:`sinew.layers.stores.lowbit.reference_all` with compiled kernels.

    Raises:
        ValueError: The tensors do not fit each other.
    """
    rows, k = x.shape
    if x.dtype != torch.float32:
        raise ValueError(f"{name}: expected float32 activations, got {x.dtype} {list(x.shape)}")
    layers, results = [], []
    for weight, scale, bias in zip(weights, scales, biases, strict=True):
        check_codes(weight, scale, bias, name, k)
        channels, count = weight.shape[0], 0 if scale is None else scale.numel()
        y = torch.empty(rows, channels)
        addresses = (0 if t is None else t.data_ptr() for t in (weight, scale, bias, y))
        layers += [*addresses, channels, count]
        results.append(y)
    x, table = x.contiguous(), torch.tensor(layers)
    status = library.lowbit_multiply(
        *(kernels, number_of(name), x.data_ptr(), rows, k, smallest),
        *(table.data_ptr(), len(results), torch.get_num_threads()),
    )
    check("low-bit product", status)
    return results


def _lay_out(library: Any, kernels: int, weight: Tensor, panels: Tensor, order: str = lowbit.PANELS) -> None:
    """Compute :func:`sinew.layers.stores.lowbit.lay_out_into` with compiled kernels.

    Raises:
        ValueError: The tensors do not fit each other.
    """
    fits = all(t.dtype == torch.uint8 and t.is_contiguous() for t in (weight, panels))
    if not fits or weight.shape != panels.shape or not lowbit.lies_in_panels(*weight.shape):
        raise ValueError(
            f"panels: expected uint8 panels of the weight's shape {list(weight.shape)}, got"
            f" {list(panels.shape)}"
        )
    arguments = weight.data_ptr(), panels.data_ptr(), *weight.shape, torch.get_num_threads()
    check("panels", library.lowbit_lay_out(kernels, number_of(order), *arguments))


def differs(
    multiply_all: Callable[..., list[Tensor]], lay_out: lowbit.LayOut, panels: Collection[str]
) -> str:
    """Return the name of a format in which ``multiply_all`` differs from the reference, or "".

    This check finds a library that was miscompiled or made for another machine, before a robot moves.

    Args:
        multiply_all: Computes products.
        lay_out: Brings int8 weights into panels.
        panels: See :attr:`Extension.panels`.
    """
    random = torch.Generator().manual_seed(0)

    def multiply(x: Tensor, *one: Any) -> Tensor:
        return multiply_all(x, *([each] for each in one[:3]), *one[3:])[0]

    for name, stored in FORMATS.items():
        k, channels = 160, 37
        x = torch.randn(9, k, generator=random)
        weight = torch.randint(0, 256, (channels, stored.row_bytes(k)), generator=random, dtype=torch.uint8)
        scale = None if stored.group else torch.rand(channels, generator=random)
        if name == "ternary":
            values = torch.randint(-1, 2, (channels, k), generator=random, dtype=torch.int8)
            weight = torch.from_numpy(pack_ternary(values.numpy()))
        if stored.group:  # random bits could be infinite float16 scales
            blocks = weight.view(channels, k // 32, -1)
            blocks[..., :2] = torch.rand(channels, k // 32, 1, generator=random).half().view(torch.uint8)
        arguments = (x, weight, scale, None, name, lowbit.TINY)
        if not torch.equal(multiply(*arguments), lowbit.reference(*arguments)):
            return name
        for order in (each for each in lowbit.INTEGERS if name == "int8" and each in panels):
            rows, scales = weight[:32].contiguous(), None if scale is None else scale[:32].contiguous()
            expected = lowbit.reference(x, rows, scales, None, name, lowbit.TINY)
            panel = torch.empty_like(rows)
            lay_out(rows, panel, order)
            operands = (x, panel, scales, None, order, lowbit.TINY)
            laid = torch.equal(panel, lowbit.lay_out(rows, order))
            if not laid or not torch.equal(multiply(*operands), expected):
                return order
    for order in (each for each in lowbit.HALVES if each in panels):
        x, weight = torch.randn(13, 40, generator=random), torch.randn(48, 40, generator=random)
        operands = (x, lowbit.lay_out(weight.bfloat16()), None, None, order, lowbit.TINY)
        if not torch.equal(multiply(*operands), lowbit.reference(*operands)):
            return order
    return ""
