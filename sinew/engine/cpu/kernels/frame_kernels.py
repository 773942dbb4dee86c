"""The part of the compiled library that resizes frames. It is loaded without torch and compared with numpy."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np

from sinew.engine.cpu.kernels import build
from sinew.steps.image import bilinear, compiled, jpeg, resample, tensorflow
from sinew.steps.image.compiled import FrameKernels, Mixing, ResizeWeights

log = logging.getLogger(__name__)

SWITCH = "SINEW_CPU_KERNELS"  # "off", or the name of the kernels to use


@cache
def take_kept_resize() -> None:
    """Use the compiled library to resize frames, if the cache contains the library.

    Otherwise ``sinew serve`` compiles it later.
    """
    kernels = os.environ.get(SWITCH, "")
    if kernels == "off" or (path := build.kept()) is None:
        return
    try:
        library = load(str(path))
    except OSError as error:
        log.warning("numpy resizes frames, because %s cannot be loaded: %s", path, error)
        return
    names = kernel_names(library)
    index = names.index(kernels) if kernels in names else 0
    frames = from_library(library, index)
    if kernels and kernels not in names:
        log.warning(
            "numpy resizes frames: this CPU has no kernels %s=%s; use one of: %s",
            SWITCH,
            kernels,
            ", ".join(names),
        )
    elif wrong := differs(frames):
        log.warning(
            "numpy resizes frames, because %s kernels of %s differ in operation %s",
            names[index],
            path,
            wrong,
        )
    else:
        compiled.install(frames)
        log.info("frames are resized by %s kernels", names[index])


def missing() -> bool:
    """Return True if the library can be compiled on this machine, and would make the resizing of frames faster."""
    useful = not (compiled.in_use or os.environ.get(SWITCH) == "off" or build.kept())
    return useful and build.find_compiler() is not None and not build.unkept(build.cache())


def load(path: str) -> Any:
    """Load the C library and declare its functions."""
    library = ctypes.CDLL(path)
    library.lowbit_kernels.restype = ctypes.c_char_p
    library.lowbit_kernels.argtypes = [ctypes.c_int]
    library.lowbit_without_tiles.restype = ctypes.c_char_p
    library.lowbit_attention.restype = ctypes.c_char_p
    library.lowbit_attention.argtypes = [ctypes.c_int]
    library.lowbit_takes_panels.argtypes = [ctypes.c_int, ctypes.c_int]
    integer, pointer = ctypes.c_int64, ctypes.c_void_p
    library.lowbit_multiply.argtypes = [
        *(ctypes.c_int, ctypes.c_int, pointer, integer, integer),  # kernels, format, x, rows, k
        *(ctypes.c_float, pointer, ctypes.c_int, ctypes.c_int),  # smallest, layers, number of layers, threads
    ]
    library.lowbit_lay_out.argtypes = [
        *(ctypes.c_int, ctypes.c_int, pointer, pointer),  # kernels, format, weights, panels
        *(integer, integer, ctypes.c_int),  # channels, k, threads
    ]
    library.lowbit_resize.argtypes = [ctypes.c_int, *[pointer] * 8]
    library.lowbit_resample.argtypes = library.lowbit_jpeg.argtypes = [ctypes.c_int, *[pointer] * 5]
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


def check(what: str, status: int) -> None:
    """Check the status that a function of the library returned.

    Args:
        what: The function's name, for the error.
        status: The returned status. 0 means success.

    Raises:
        RuntimeError: The status is not 0.
    """
    if status:
        why = "not enough memory" if status == 2 else "the kernel rejected its arguments"
        raise RuntimeError(f"{what}: {why}")


def from_library(library: Any, kernels: int) -> FrameKernels:
    """Return the frame kernels of a loaded library, for the set of kernels with the index ``kernels``."""
    return FrameKernels(*(partial(each, library, kernels) for each in (_resize, _resample, _jpeg)))


def _resize(library: Any, kernels: int, frame: np.ndarray, mixing: Mixing, out: np.ndarray) -> None:
    strides = [stride // out.itemsize for stride in (out.strides[1], out.strides[0])]
    shape = out.shape[:2] if mixing.mixed else out.shape[1:]
    sizes = (ctypes.c_int64 * 7)(frame.strides[0], *shape, mixing.reach, *strides, mixing.mixed)
    arguments = frame.ctypes.data, *mixing.addresses, ctypes.addressof(sizes), out.ctypes.data
    check("resize", library.lowbit_resize(kernels, *arguments))


def _resample(
    library: Any, kernels: int, frame: np.ndarray, axis: int, taps: ResizeWeights, out: np.ndarray
) -> None:
    shapes = *frame.shape[:2], axis, *taps.weights.shape
    sizes = (ctypes.c_int64 * 8)(frame.strides[0], *shapes, taps.bits, frame.itemsize == 4)
    arguments = frame.ctypes.data, *taps.addresses, ctypes.addressof(sizes), out.ctypes.data
    check("resample", library.lowbit_resample(kernels, *arguments))


def _jpeg(library: Any, kernels: int, *arrays: np.ndarray) -> None:
    sizes = np.array([arrays[0].strides[0], *arrays[0].shape[:2]], np.int64)
    check("jpeg", library.lowbit_jpeg(kernels, *(each.ctypes.data for each in (*arrays, sizes))))


def differs(frames: FrameKernels) -> str:
    """Return the name of an operation in which ``frames`` differs from numpy, or ""."""
    frame = (np.arange(37 * 41 * 3) * 97 % 256).astype(np.uint8).reshape(37, 41, 3)
    floats = frame.astype(np.float32) / np.float32(255)
    size, target, linear = frame.shape[:2], (60, 19), resample.linear_taps
    mixings = (
        (bilinear.mixing(size, target), bilinear.resize_bilinear(floats, *target)),
        (resample.linear_mixing(size, target, linear), resample.linear_by_numpy(frame, target, linear)),
        (tensorflow.crop_mixing(size, 0.9, target)[0], tensorflow.crop_by_numpy(frame, 0.9, *target)),
    )
    taps = (
        (image, axis, table(size[axis], target[axis]))
        for axis in range(2)
        for image, table in (
            (frame, partial(resample.antialias_taps, method="bicubic")),
            (frame, partial(resample.float_taps, method="area")),
            (floats, partial(resample.float_taps, method="bicubic")),
        )
    )
    cases: list[tuple[str, Callable[..., None], Any, np.ndarray]] = [
        *(("resize", frames.resize, (frame, mixing), expected) for mixing, expected in mixings),
        *(("resample", frames.resample, each, resample.by_numpy(*each)) for each in taps),
        ("jpeg", frames.jpeg, (frame, *jpeg.steps(95)[1:]), jpeg.by_numpy(frame, 95)),
    ]
    for name, kernel, arguments, expected in cases:
        kernel(*arguments, result := np.empty(expected.shape, expected.dtype))
        if not np.array_equal(result, expected):
            return name
    return ""
