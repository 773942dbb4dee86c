"""The compiled library: loaded once, checked against the reference, and put behind the operator.

Without it the operator computes the same with the reference, slowly; ``sinew doctor`` says which of the two and why.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sinew.bundle.quant import FORMATS, pack_ternary
from sinew.engine.cpu.kernels import float_kernels, layer_kernels
from sinew.engine.cpu.kernels.build import build, kept
from sinew.engine.cpu.kernels.float_kernels import FloatKernels
from sinew.engine.cpu.kernels.layer_kernels import STATUS, LayerKernels, check_codes, number_of
from sinew.layers.stores import lowbit
from sinew.steps.image import bilinear, compiled, resample
from sinew.steps.image.compiled import Mixing, Taps

log = logging.getLogger(__name__)

SWITCH = "SINEW_CPU_KERNELS"  # "off", or the name of the kernels to use


@dataclass(frozen=True)
class Extension:
    """What computes low-bit products here.

    kernels: an instruction set, or "reference". available: all that this CPU can run, best first."""

    kernels: str
    reason: str
    available: tuple[str, ...] = ()
    panels: bool = False  # multiplies int8 weights that lie as lowbit.PANELS
    multiply_all: Callable[..., list[Tensor]] = lowbit.reference_all
    lay_out: lowbit.LayOut = lowbit.lay_out_into
    frames: compiled.FrameKernels | None = None  # None: numpy resizes
    floats: FloatKernels = float_kernels.REFERENCES
    layers: LayerKernels = layer_kernels.REFERENCES

    @property
    def compiled(self) -> bool:
        """Return True where a kernel computes, False where the reference does."""
        return self.kernels != "reference"


@cache
def extension() -> Extension:
    """Return what this machine has, compiled, loaded, checked and installed behind the operator on the first call."""
    found = _load(os.environ.get(SWITCH, ""))
    lowbit.install(found.multiply_all)
    compiled.install(found.frames)
    float_kernels.install(found.floats)
    layer_kernels.install(found.layers)
    if not found.compiled:
        log.warning("low-bit products are computed by PyTorch, slowly: %s", found.reason)
    return found


@cache
def take_kept_resize() -> None:
    """Let frames be resized by the library where one is kept; to compile one for that alone would not pay."""
    asked = os.environ.get(SWITCH, "")
    if asked == "off" or (path := kept()) is None:
        return
    try:
        library = load(str(path))
    except OSError:
        return  # who needs the library is told by extension()
    names = kernel_names(library)
    index = names.index(asked) if asked in names else 0
    frames = frame_kernels(library, index)
    if asked and asked not in names:
        log.warning("numpy resizes frames: %s=%s: this CPU has %s", SWITCH, asked, ", ".join(names))
    elif wrong := frames_differ(frames):
        log.warning("numpy resizes frames: %s kernels of %s differ from it in %s", names[index], path, wrong)
    else:
        compiled.install(frames)
        log.info("frames are resized by %s kernels", names[index])


def _load(asked: str) -> Extension:
    if asked == "off":
        return Extension("reference", f"{SWITCH}=off")
    built = build()
    if built.path is None:
        return Extension("reference", built.reason)
    try:
        library = load(str(built.path))
    except OSError as error:
        return Extension("reference", f"{built.path} does not load: {error}")
    names = kernel_names(library)
    if asked and asked not in names:
        return Extension("reference", f"{SWITCH}={asked}: this CPU has {', '.join(names)}", names)
    index = names.index(asked) if asked else 0
    multiply_all = partial(_multiply_all, library, index)
    panels = bool(library.lowbit_takes_panels(index))
    floats, layers = FloatKernels.compiled(library, index), LayerKernels.compiled(library, index)
    lay_out, frames = partial(_lay_out, library, index), frame_kernels(library, index)
    if wrong := (
        differs(multiply_all, lay_out if panels else None)
        or frames_differ(frames)
        or float_kernels.differs(floats)
        or layer_kernels.differs(layers, floats, multiply_all)
    ):
        return Extension(
            "reference", f"{names[index]} kernels of {built.path} differ from the reference in {wrong}", names
        )
    return Extension(names[index], built.reason, names, panels, multiply_all, lay_out, frames, floats, layers)


def load(path: str) -> Any:
    """Return the C library with its functions declared."""
    library = ctypes.CDLL(path)
    library.lowbit_kernels.restype = ctypes.c_char_p
    library.lowbit_kernels.argtypes = library.lowbit_takes_panels.argtypes = [ctypes.c_int]
    integer, pointer = ctypes.c_int64, ctypes.c_void_p
    library.lowbit_multiply.argtypes = [
        *(ctypes.c_int, ctypes.c_int),  # kernels, format
        *(pointer, integer, integer, ctypes.c_float),  # x, rows, k, smallest
        *(pointer, ctypes.c_int, ctypes.c_int),  # layers, how many, threads
    ]
    library.lowbit_lay_out.argtypes = [ctypes.c_int, pointer, pointer, integer, integer, ctypes.c_int]
    library.lowbit_resize.argtypes = [ctypes.c_int, *[pointer] * 8]
    library.lowbit_resample.argtypes = [ctypes.c_int, *[pointer] * 5]
    library.lowbit_attend.argtypes = [ctypes.c_int, *[pointer] * 8, ctypes.c_float, ctypes.c_int]
    library.lowbit_gelu.argtypes = [ctypes.c_int, pointer, integer, ctypes.c_int]
    library.lowbit_silu_times.argtypes = [ctypes.c_int, pointer, pointer, integer, ctypes.c_int]
    return library


def kernel_names(library: Any) -> tuple[str, ...]:
    """Return the kernels that this CPU can run, best first."""
    names: list[str] = []
    while name := library.lowbit_kernels(len(names)):
        names.append(name.decode())
    return tuple(names)


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
    """As :func:`sinew.layers.stores.lowbit.reference_all`. Raises ValueError for tensors that do not fit each other."""
    rows, k = x.shape
    if x.dtype != torch.float32:
        raise ValueError(f"{name}: x {x.dtype} {list(x.shape)} and float32 products do not fit")
    layers, results = [], []
    for weight, scale, bias in zip(weights, scales, biases, strict=True):
        check_codes(weight, scale, bias, name, k)
        channels, count = weight.shape[0], 0 if scale is None else scale.numel()
        y = torch.empty(rows, channels)
        addresses = (0 if t is None else t.data_ptr() for t in (weight, scale, bias, y))
        layers += [*addresses, channels, count]
        results.append(y)
    x, given = x.contiguous(), torch.tensor(layers)
    status = library.lowbit_multiply(
        *(kernels, number_of(name), x.data_ptr(), rows, k, smallest),
        *(given.data_ptr(), len(results), torch.get_num_threads()),
    )
    _check("low-bit product", status)
    return results


def _check(what: str, status: int) -> None:
    if status:
        raise RuntimeError(f"{what}: {STATUS.get(status, status)}")


def _lay_out(library: Any, kernels: int, weight: Tensor, panels: Tensor) -> None:
    """As :func:`sinew.layers.stores.lowbit.lay_out_into`. Raises ValueError for tensors that do not fit each other."""
    fits = all(t.dtype == torch.uint8 and t.is_contiguous() for t in (weight, panels))
    if not fits or weight.shape != panels.shape or not lowbit.lies_in_panels(*weight.shape):
        raise ValueError(f"panels: weight {list(weight.shape)} and panels {list(panels.shape)} do not fit")
    given = weight.data_ptr(), panels.data_ptr(), *weight.shape, torch.get_num_threads()
    _check("panels", library.lowbit_lay_out(kernels, *given))


def frame_kernels(library: Any, kernels: int) -> compiled.FrameKernels:
    """Return what resizes frames with the ``kernels``-th set of a loaded library."""
    return compiled.FrameKernels(partial(_resize, library, kernels), partial(_resample, library, kernels))


def _resize(library: Any, kernels: int, frame: np.ndarray, mixing: Mixing, out: np.ndarray) -> None:
    """As :class:`sinew.steps.image.compiled.FrameKernels`."""
    strides = [stride // out.itemsize for stride in (out.strides[1], out.strides[0])]
    sizes = (ctypes.c_int64 * 6)(frame.strides[0], *out.shape[1:], mixing.reach, *strides)
    given = frame.ctypes.data, *mixing.addresses, ctypes.addressof(sizes), out.ctypes.data
    _check("resize", library.lowbit_resize(kernels, *given))


def _resample(library: Any, kernels: int, frame: np.ndarray, axis: int, taps: Taps, out: np.ndarray) -> None:
    """As :class:`sinew.steps.image.compiled.FrameKernels`."""
    shapes = *frame.shape[:2], axis, *taps.weights.shape
    sizes = (ctypes.c_int64 * 8)(frame.strides[0], *shapes, taps.bits, frame.itemsize == 4)
    given = frame.ctypes.data, *taps.addresses, ctypes.addressof(sizes), out.ctypes.data
    _check("resample", library.lowbit_resample(kernels, *given))


def frames_differ(frames: compiled.FrameKernels) -> str:
    """Return the name of what ``frames`` compute otherwise than numpy; empty where there is nothing."""
    frame = (np.arange(37 * 41 * 3) * 97 % 256).astype(np.uint8).reshape(37, 41, 3)
    floats = frame.astype(np.float32) / np.float32(255)
    planes = np.empty((3, 60, 19), np.float32)
    frames.resize(frame, bilinear.mixing(frame.shape[:2], planes.shape[1:]), planes)
    if not np.array_equal(planes, bilinear.resize_bilinear(floats, *planes.shape[1:])):
        return "resize"
    for image, table in (
        (frame, partial(resample.antialias_taps, method="bicubic")),
        (frame, partial(resample.float_taps, method="area")),
        (floats, partial(resample.float_taps, method="bicubic")),
    ):
        for axis, target in ((0, 60), (1, 19)):
            wanted = resample.by_numpy(image, axis, taps := table(image.shape[axis], target))
            frames.resample(image, axis, taps, made := np.empty_like(wanted))
            if not np.array_equal(made, wanted):
                return "resample"
    return ""


def differs(multiply_all: Callable[..., list[Tensor]], lay_out: lowbit.LayOut | None) -> str:
    """Return the name of a format in which ``multiply_all`` differs from the reference; empty if there is none.

    lay_out: where int8 is multiplied as :data:`sinew.layers.stores.lowbit.PANELS`, too, what lays it out. A
    miscompiled library, or one made for another machine, shows here and not in a robot's actions.
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
        if stored.group:  # halves of any bits may be infinite
            blocks = weight.view(channels, k // 32, -1)
            blocks[..., :2] = torch.rand(channels, k // 32, 1, generator=random).half().view(torch.uint8)
        arguments = (x, weight, scale, None, name, lowbit.TINY)
        if not torch.equal(multiply(*arguments), lowbit.reference(*arguments)):
            return name
        if name == "int8" and lay_out is not None:
            rows, scales = weight[:32].contiguous(), None if scale is None else scale[:32].contiguous()
            wanted = lowbit.reference(x, rows, scales, None, name, lowbit.TINY)
            laid = torch.empty_like(rows)
            lay_out(rows, laid)
            given = (x, laid, scales, None, lowbit.PANELS, lowbit.TINY)
            if not torch.equal(laid, lowbit.lay_out(rows)) or not torch.equal(multiply(*given), wanted):
                return lowbit.PANELS
    return ""
