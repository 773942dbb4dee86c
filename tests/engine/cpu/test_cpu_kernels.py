"""Compiled low-bit products against the reference, bit by bit; their C++ under sanitizers, an emulated ARM and
emulated instructions."""

from __future__ import annotations

import itertools
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from sinew.bundle.quant import FORMATS, pack_ternary
from sinew.engine.cpu.kernels import build, frame_kernels
from sinew.engine.cpu.kernels import library as compiled
from sinew.engine.cpu.kernels.layer_kernels import PANELS_NUMBERS
from sinew.engine.cpu.kernels.library import extension
from sinew.layers.stores import lowbit
from sinew.layers.stores.codes import Bf16Panels, Codes, Panels, apart
from sinew.layers.stores.store import Tensors
from sinew.policy import load
from sinew.serve import prepare
from sinew.steps.image import bilinear, jpeg
from sinew.steps.image import compiled as frames
from sinew.steps.image.methods import Method, resize
from sinew.steps.image.resample import (
    PILLOW_BITS,
    antialias_taps,
    by_numpy,
    float_taps,
    resample,
    resize_pillow,
)
from sinew.steps.image.tensorflow import centre_crop, crop_by_numpy
from tests import processes
from tests.serve.test_server import serving

PEN = Path(__file__).resolve().parents[3] / "sinew" / "assets" / "pen.gguf"
EXACT = Path(__file__).with_name("exact.cpp")
needs_compiler = pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler")


def multiply_alone(library, index, x, weight, scale, bias, name, smallest) -> torch.Tensor:
    return compiled._multiply_all(library, index, x, [weight], [scale], [bias], name, smallest)[0]


@pytest.fixture(scope="module")
def all_kernels() -> dict[str, partial]:
    """The multiplications of every instruction set that this CPU has."""
    built = build.build()
    if built.path is None:
        pytest.skip(built.reason)
    library = compiled.load(str(built.path))
    return {
        name: partial(multiply_alone, library, index)
        for index, name in enumerate(compiled.kernel_names(library))
    }


def problem(name: str, rows: int, k: int, channels: int, kind: str, seed: int):
    """Tensors of a product: activations [rows, k], stored weights, scale and bias."""
    random = torch.Generator().manual_seed(seed)
    stored = FORMATS[name]
    x = torch.randn(rows, k, generator=random) * torch.exp2(
        torch.randint(-20, 20, (rows, 1), generator=random)
    )
    if kind == "extreme":  # every product as large as it gets, all of one sign
        x = torch.full((rows, k), 3.5) * (1 - 2 * torch.randint(0, 2, (rows, 1), generator=random))
    elif kind == "ties":
        x = torch.randint(-253, 254, (rows, k), generator=random) / 2
        x[:, 0] = 127.0
    elif kind == "odd rows":
        x[::3] = 0.0
        x[1::3, 0] = torch.nan
        x[2::5, -1] = -torch.inf
    if name == "ternary":
        values = torch.randint(-1, 2, (channels, k), generator=random, dtype=torch.int8)
        weight = torch.from_numpy(pack_ternary((values.fill_(1) if kind == "extreme" else values).numpy()))
    else:
        weight = torch.randint(0, 256, (channels, stored.row_bytes(k)), generator=random, dtype=torch.uint8)
        if kind == "extreme":
            weight.fill_(0x80 if seed % 2 else 0x7F)
    scale = None
    if stored.group:
        blocks = weight.view(channels, k // 32, -1)
        halves = torch.rand(channels, k // 32, 1, generator=random).half() - 0.25
        blocks[..., :2] = halves.view(torch.uint8)
    else:
        scale = torch.rand(channels if seed % 3 else 1, generator=random)
    bias = torch.randn(channels, generator=random) if seed % 2 else None
    return x, weight, scale, bias, name, 1e-5 if seed % 5 == 0 else lowbit.TINY


@given(
    name=st.sampled_from(sorted(FORMATS)),
    rows=st.integers(1, 40),
    k=st.integers(1, 420),
    channels=st.integers(1, 70),
    kind=st.sampled_from(["plain", "extreme", "ties", "odd rows"]),
    seed=st.integers(0, 2**31),
)
@settings(deadline=None, max_examples=100)
def test_every_kernel_equals_the_reference_in_every_bit(
    all_kernels, name, rows, k, channels, kind, seed
) -> None:
    if FORMATS[name].group:
        k = -(-k // 32) * 32
    arguments = problem(name, rows, k, channels, kind, seed)
    wanted = lowbit.reference(*arguments)
    for kernels, multiply in all_kernels.items():
        assert torch.equal(multiply(*arguments).nan_to_num(nan=1e30), wanted.nan_to_num(nan=1e30)), kernels


@given(
    rows=st.integers(1, 40),
    groups=st.integers(1, 40),
    panels=st.integers(1, 6),
    kind=st.sampled_from(["plain", "extreme", "ties", "odd rows"]),
    seed=st.integers(0, 2**31),
)
@settings(deadline=None, max_examples=100)
def test_weights_that_were_laid_out_give_the_same_bits(all_kernels, rows, groups, panels, kind, seed) -> None:
    """In every order and on every instruction set that multiplies it; the others say that it makes no sense."""
    x, weight, scale, bias, name, smallest = problem("int8", rows, 8 * groups, 16 * panels, kind, seed)
    wanted = lowbit.reference(x, weight, scale, bias, name, smallest).nan_to_num(nan=1e30)
    for order in lowbit.INTEGERS:
        laid = lowbit.lay_out(weight, order)
        assert torch.equal(lowbit.laid_back(laid, order), weight)
        computed = lowbit.reference(x, laid, scale, bias, order, smallest)
        assert torch.equal(computed.nan_to_num(nan=1e30), wanted)
        for name, multiply in all_kernels.items():
            library, index = multiply.args
            made = torch.full_like(weight, 99)
            if library.lowbit_takes_panels(index, PANELS_NUMBERS[order]):
                compiled._lay_out(library, index, weight, made, order)
                assert torch.equal(made, laid), name
                computed = multiply(x, laid, scale, bias, order, smallest)
                assert torch.equal(computed.nan_to_num(nan=1e30), wanted)
            else:
                with pytest.raises(RuntimeError, match="the kernel rejected its arguments"):
                    compiled._lay_out(library, index, weight, made, order)
                with pytest.raises(RuntimeError, match="the kernel rejected its arguments"):
                    multiply(x, laid, scale, bias, order, smallest)


@given(
    rows=st.integers(1, 40),
    groups=st.integers(1, 12),
    panels=st.integers(1, 6),
    kind=st.sampled_from(["plain", "tiny", "ties", "odd rows", "cancelled"]),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
@settings(deadline=None, max_examples=60)
def test_products_of_bfloat16_have_the_bits_of_their_reference(
    all_kernels, rows, groups, panels, kind, threads, seed
) -> None:
    """Sums of one order, in any number of threads, where the CPU has the instruction; elsewhere it makes no sense."""
    x, _, _, bias, _, smallest = problem("int8", rows, 8 * groups, 16 * panels, kind, seed)
    weight = torch.randn(16 * panels, 8 * groups, generator=torch.Generator().manual_seed(seed)).bfloat16()
    if kind == "tiny":
        x = x * 1e-37
    elif kind == "cancelled":
        x[:, 1::2], weight[:, 1::2] = x[:, ::2], -weight[:, ::2]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for multiply, order in itertools.product(all_kernels.values(), lowbit.HALVES):
            given = (x, lowbit.lay_out(weight), None, bias, order, smallest)
            wanted = lowbit.reference(*given).nan_to_num(nan=1e30)
            library, index = multiply.args
            if library.lowbit_takes_panels(index, PANELS_NUMBERS[order]):
                assert torch.equal(multiply(*given).nan_to_num(nan=1e30), wanted)
            else:
                with pytest.raises(RuntimeError, match="the kernel rejected its arguments"):
                    multiply(*given)
    finally:
        torch.set_num_threads(before)


def test_the_reference_of_bfloat16_adds_in_its_order() -> None:
    """The order 1, 0, 3, 2 of k; what float32 has no bits for is lost, and what lies below 2^-126 is zero."""
    ones, large = torch.ones(16, 8).bfloat16(), 2.0**30

    def product(*values: float) -> float:
        x = torch.tensor([[*values, *[0.0] * (8 - len(values))]])
        return float(lowbit.reference(x, lowbit.lay_out(ones), None, None, lowbit.BF16_PANELS, 1.0)[0, 0])

    assert product(large, 0.0, 1.0, -large) == 1.0
    assert product(large, 0.0, -large, 1.0) == 0.0
    assert product(2.0**-126) == 2.0**-126
    assert product(2.0**-127) == 0.0
    assert product(1 + 2.0**-8) == 1.0  # half to even
    assert product(1 + 3 * 2.0**-8) == 1 + 2.0**-6
    x, weight = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    made = lowbit.reference(x.float(), lowbit.lay_out(weight), None, None, lowbit.BF16_PANELS, 1.0)
    torch.testing.assert_close(made.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-5)
    x = x.float().requires_grad_(True)
    lowbit.install(lowbit.reference_all)  # kernels of this CPU may multiply none
    try:
        lowbit.lowbit_linear(x, lowbit.lay_out(weight), None, None, lowbit.BF16_PANELS).sum().backward()
    finally:
        lowbit.install(extension().multiply_all)
    torch.testing.assert_close(x.grad, weight.float().sum(0).expand(16, -1))


def test_the_reference_of_tiles_adds_in_its_order() -> None:
    """The reference adds the even and the odd ones of 32 values apart. The next 32 values begin at zero."""
    ones, large = torch.ones(16, 40).bfloat16(), 2.0**30

    def product(**values: float) -> float:
        x = torch.zeros(1, 40)
        for at, value in values.items():
            x[0, int(at.removeprefix("at"))] = value
        return float(lowbit.reference(x, lowbit.lay_out(ones), None, None, lowbit.BF16_TILES, 1.0)[0, 0])

    assert product(at0=large, at2=1.0, at4=-large) == 0.0  # the even sum has no bits for 1
    assert product(at0=large, at1=1.0, at2=-large) == 1.0  # the odd sum has
    assert product(at0=large, at2=-large, at4=1.0) == 1.0
    assert product(at0=large, at32=1.0, at34=-large) == 0.0  # the second tile's sum has no bits for 1
    assert product(at0=large, at32=-large, at33=1.0) == 0.0  # even + odd of the second tile
    assert product(at32=large, at0=1.0, at34=-large) == 1.0
    assert product(at0=2.0**-126) == 2.0**-126
    assert product(at0=2.0**-127) == 0.0
    x, weight = torch.randn(2, 16, 72, generator=torch.Generator().manual_seed(0)).bfloat16()
    made = lowbit.reference(x.float(), lowbit.lay_out(weight), None, None, lowbit.BF16_TILES, 1.0)
    torch.testing.assert_close(made.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-5)


def of_ones(order: str, *values: float) -> float:
    """The sum of up to 8 values times ones."""
    x, ones = torch.tensor([[*values, *[0.0] * (8 - len(values))]]), torch.ones(16, 8).bfloat16()
    return float(lowbit.reference(x, lowbit.lay_out(ones), None, None, order, 1.0)[0, 0])


def test_the_reference_of_fused_sums_adds_in_its_order() -> None:
    """The reference adds in the order of k. It keeps small numbers."""
    product, large = partial(of_ones, lowbit.BF16_FUSED), 2.0**30
    assert product(large, -large, 1.0) == 1.0
    assert product(1.0, large, -large) == 0.0
    assert product(2.0**-133) == 2.0**-133
    assert product(1 + 2.0**-8) == 1.0  # half to even
    assert product(1.0, 2.0**-24) == 1.0  # half to even in float32
    assert product(1.0, 3 * 2.0**-24) == 1 + 2.0**-22
    x, weight = torch.randn(2, 16, 72, generator=torch.Generator().manual_seed(0)).bfloat16()
    made = lowbit.reference(x.float(), lowbit.lay_out(weight), None, None, lowbit.BF16_FUSED, 1.0)
    torch.testing.assert_close(made.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-5)


def test_the_reference_of_sums_that_round_to_odd_adds_in_its_order() -> None:
    """The reference adds two products, then adds their sum. An inexact sum is cut off, and its last bit is set."""
    product, large, step = partial(of_ones, lowbit.BF16_ODD), 2.0**30, 2.0**-23
    assert product(large, -large, 1.0) == 1.0
    assert (
        product(large, 1.0, -large) == 128.0
    )  # the last bit of 2^30, which the inexact sum of the pair has set
    assert product(1.0, 2.0**-40) == 1 + step
    assert product(1.0, -(2.0**-40)) == 1 - step / 2  # which is odd
    assert product(1.0, 0.0, -(2.0**-80)) == 1 - step / 2  # float64 has no bits for this sum
    assert product(1.0, 0.0, 2.0**-80) == 1 + step
    assert product(-1.0, 0.0, -(2.0**-80)) == -1 - step
    assert product(1.0, 3 * step) == 1 + 3 * step  # exact
    assert product(2.0**-126, 0.0, -(2.0**-133)) == 2.0**-126  # an input below 2^-126 is zero
    assert product(2.0**-125, -(2.0**-126) * 1.5) == 0.0  # and so is a result
    assert product(3e38, 3e38) == math.inf
    ones = 1 - 2.0**-8
    below = 2.0**127, 0.0, 2.0**127 * ones, 0.0, 2.0**119 * ones, 0.0, 2.0**111 * ones  # 2^128 - 2^103
    assert product(*below) == 2.0**128 - 2.0**104  # cut off, where the nearest number is infinite
    assert math.isnan(product(3e38, 3e38, -math.inf))
    x, weight = torch.randn(2, 16, 72, generator=torch.Generator().manual_seed(0)).bfloat16()
    made = lowbit.reference(x.float(), lowbit.lay_out(weight), None, None, lowbit.BF16_ODD, 1.0)
    torch.testing.assert_close(made.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-5)


def test_panels_stand_for_what_they_were_laid_out_from() -> None:
    half = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    store, lying = Bf16Panels("bf16", 64), Tensors(lowbit.lay_out(half))
    assert torch.equal(store.widened(lying), half.float())
    assert torch.equal(store.take(lying, (3, 31)), half[[3, 31]].float())
    assert (store.kind, store.size(lying)) == ("bf16", (32, 64))
    _, weight, scale, *_ = problem("int8", 5, 64, 32, "plain", 1)
    plain, held = Codes("int8", 64, len(scale)), Tensors(weight, scale)
    for order in lowbit.INTEGERS:
        panels, laid = Panels("int8", 64, len(scale), order), Tensors(lowbit.lay_out(weight, order), scale)
        assert torch.equal(panels.widened(laid), plain.widened(held))
        for ids in ((3, 31), torch.tensor([[0, 5], [5, 2]])):
            assert torch.equal(panels.take(laid, ids), plain.take(held, ids))
        assert (panels.kind, panels.size(laid)) == (plain.kind, plain.size(held))
        assert apart([SimpleNamespace(store=plain), SimpleNamespace(store=panels)]) == "several formats"


side = st.integers(1, 90)


def each_set(all_kernels) -> Iterator[tuple[str, frames.FrameKernels]]:
    library = next(iter(all_kernels.values())).args[0]
    for index, name in enumerate(compiled.kernel_names(library)):
        yield name, frame_kernels.from_library(library, index)


@pytest.fixture
def no_frames() -> Iterator[None]:
    """numpy resizes, and whatever a test installs is gone behind it."""
    frames.install(None)
    yield
    frames.install(extension().frames)


@given(side, side, side, side, st.booleans(), st.booleans())
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_frames_are_resized_to_the_bits_of_numpy(
    all_kernels, no_frames, height, width, to_height, to_width, cut, bars
) -> None:
    """On every instruction set, from part of a frame into part of planes."""
    whole = np.random.default_rng(height * width).integers(0, 256, (height + cut, width + cut, 3), np.uint8)
    frame = whole[:height, :width]
    frames.install(None)
    wanted = bilinear.resize_bilinear(frame, to_height, to_width)
    for name, kernels in each_set(all_kernels):
        out = np.full((3, to_height + bars, to_width + bars), np.float32(-1))
        frames.install(kernels)
        bilinear.resize_bilinear(frame, to_height, to_width, out[:, bars:, bars:])
        assert np.array_equal(out[:, bars:, bars:], wanted), name
        assert (out[:, :bars] == -1).all(), name
        assert (out[:, :, :bars] == -1).all(), name


@given(
    sizes=st.tuples(*[st.one_of(st.integers(1, 8), side, st.integers(90, 240))] * 4),
    method=st.sampled_from([*get_args(Method), "pil_bilinear", "crop", "all of it"]),
    lines=st.sampled_from([1, 2, -1]),
    cut=st.integers(0, 3),
    seed=st.integers(0, 2**32),
)
@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_method_gives_the_bits_of_its_reference(
    all_kernels, no_frames, sizes, method, lines, cut, seed
) -> None:
    """On every instruction set, from a box of a frame whose lines may lie apart or upside down: numpy's bits, and those
    of Pillow itself; 0 and 255 often, where sums are cut. TensorFlow's crops beside the methods."""
    height, width, *target = sizes
    random = np.random.default_rng(seed)
    whole = random.integers(-120, 376, ((height + cut) * abs(lines), width + cut, 3)).clip(0, 255)
    frame = whole.astype(np.uint8)[::lines][cut:, cut:]
    if method.endswith("_float"):
        frame = (whole.astype(np.float32) / np.float32(255))[::lines][cut:, cut:]

    def made() -> np.ndarray:
        if method == "pil_bilinear":
            return resize_pillow(frame, *target, "bilinear")
        if method in ("crop", "all of it"):
            return centre_crop(
                frame, 1.0 if method == "all of it" else 0.9, *(max(side, 2) for side in target)
            )
        return resize(frame, *target, method)

    frames.install(None)
    wanted = made()
    for name, kernels in each_set(all_kernels):
        frames.install(kernels)
        found = made()
        assert found.dtype == wanted.dtype
        assert np.array_equal(found, wanted), name


def test_rows_and_columns_past_a_frame_are_black(all_kernels, no_frames) -> None:
    """As rounding alone puts the last one there."""
    frame = np.full((480, 20, 3), 200, np.uint8)
    for _, kernels in each_set(all_kernels):
        frames.install(kernels)
        for image, size in ((frame, (384, 20)), (frame.transpose(1, 0, 2).copy(), (20, 384))):
            made = centre_crop(image, 1.0, *size)
            assert np.array_equal(made, crop_by_numpy(image, 1.0, *size))
            assert made.min() == 0
            assert made.max() == 200


@given(
    sizes=st.tuples(*[st.one_of(st.integers(1, 40), st.integers(120, 136), st.integers(1, 300))] * 2),
    quality=st.one_of(st.just(95), st.integers(1, 100)),
    lines=st.sampled_from([1, 2, -1]),
    blocks=st.sampled_from([1, 1, 3, 8]),
    spread=st.sampled_from([0, 120, 1000]),
    seed=st.integers(0, 2**32),
)
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_round_trip_of_jpeg_gives_the_bits_of_numpy(
    all_kernels, no_frames, sizes, quality, lines, blocks, spread, seed
) -> None:
    """On every instruction set; a row and a column of blocks more or less, pixels alone and in squares, mostly 0 or
    255 where they spread far."""
    random = np.random.default_rng(seed)
    height, width = sizes[0] * abs(lines), sizes[1]
    whole = random.integers(-spread, 256 + spread, (-(-height // blocks), -(-width // blocks), 3)).clip(
        0, 255
    )
    whole = whole.repeat(blocks, axis=0).repeat(blocks, axis=1)
    frame = whole.astype(np.uint8)[:height, :width][::lines]
    wanted = jpeg.by_numpy(frame, quality)
    for name, kernels in each_set(all_kernels):
        frames.install(kernels)
        assert np.array_equal(jpeg.jpeg_round_trip(frame, quality), wanted), name


def test_every_coefficient_is_quantised_as_in_numpy() -> None:
    """What compiled kernels do in float32, for all coefficients, of up to 64 * 128, and all steps."""
    value = np.arange(-(1 << 13), (1 << 13) + 1)
    for step in range(1, 256):
        exact = value / (8 * step)
        wanted = (exact + np.copysign(0.5, exact)).astype(np.int32)
        scaled = value.astype(np.float32) * np.float32(1 / (8 * step))
        half = np.copysign(np.float32(0.5 + 2**-12), scaled)
        assert np.array_equal((scaled + half).astype(np.int32), wanted)


def test_pillow_in_numpy_is_pillow(no_frames) -> None:
    """What compiled kernels equal, held against the library that it stands for: in two passes, and in one of its own
    where there are as many rows or more, for which every release has the same order."""
    random, whole = np.random.default_rng(0), 0
    for case in range(160):
        height, width, to_height, to_width = map(int, random.integers(1, 70, 4))
        frame = random.integers(0, 256, (height, width, 3), np.uint8)
        kind = ("bilinear", "bicubic")[case % 2]
        found = frame
        for axis, target in ((1, to_width), (0, to_height)):
            if found.shape[axis] != target:
                found = by_numpy(found, axis, antialias_taps(found.shape[axis], target, kind, PILLOW_BITS))
        assert np.array_equal(found, resize_pillow(frame, to_height, to_width, kind))
        if to_height >= height:
            once = Image.fromarray(frame).resize((to_width, to_height), Image.Resampling[kind.upper()])
            assert np.array_equal(found, np.asarray(once))
            whole += 1
    assert whole > 40


def test_what_kernels_do_not_read_is_numpys(no_frames) -> None:
    """Pixels that lie otherwise, other types, taps of another size; and results are nobody's scratch."""
    called = []

    def resample_here(frame, axis, taps, out) -> None:
        called.append(frame.shape)
        out[:] = by_numpy(frame, axis, taps)

    frame = np.random.default_rng(0).integers(0, 256, (9, 8, 3), np.uint8)
    floats = frame.astype(np.float32)
    whole, real = antialias_taps(9, 5, "bicubic"), float_taps(9, 5, "bicubic")
    given = [
        (frame, whole, 1),
        (frame, real, 1),
        (floats, real, 1),
        (frame[:, ::-1], whole, 0),
        (frame[..., ::-1], whole, 0),
        (frame[..., :2], whole, 0),
        (frame[:, :0], whole, 0),
        (floats.astype(np.float64), real, 0),
        (np.frombuffer(b"\0" + floats.tobytes(), np.uint8)[1:].view(np.float32).reshape(9, 8, 3), real, 0),
    ]
    wanted = [by_numpy(image, 0, taps) for image, taps, _ in given]
    frames.install(frames.FrameKernels(None, resample_here, lambda frame, _, __, out: out.fill(frame.min())))
    for (image, taps, calls), expected in zip(given, wanted, strict=True):
        called.clear()
        found = resample(image, [(0, taps)])
        assert np.array_equal(found, expected)
        assert len(called) == calls, (image.dtype, image.strides)
    with pytest.raises(IndexError):
        resample(frame[:5], [(0, whole)])
    assert (jpeg.jpeg_round_trip(frame) == frame.min()).all()
    for image in (frame[:, ::-1], frame[..., ::-1], frame.astype(np.int32)):
        assert np.array_equal(jpeg.jpeg_round_trip(image), jpeg.by_numpy(image, 95))
    twice = [resample(frame, [(0, whole), (1, antialias_taps(8, 5, "bicubic"))]) for _ in range(2)]
    assert not np.shares_memory(*twice)


@pytest.mark.parametrize(
    ("frame", "planes"),
    [
        ((0, 8, 3), np.zeros((3, 4, 4), np.float32)),
        ((8, 8, 3), np.broadcast_to(np.float32(0), (3, 4, 4))),  # which nobody may write
        ((8, 8, 3), np.zeros((3, 6, 6), np.float32)),
    ],
)
def test_what_numpy_cannot_resize_the_library_does_not_touch(all_kernels, no_frames, frame, planes) -> None:
    """It looks at no bound itself: a frame without pixels, planes that are read only or too large."""
    frames.install(next(each_set(all_kernels))[1])
    pixels = np.full((9, 8, 3), 255, np.uint8)[: frame[0]]
    with pytest.raises((ValueError, IndexError)):
        bilinear.resize_bilinear(pixels, 4, 4, planes)
    assert not planes.any()
    wide = bilinear.resize_bilinear(np.full((8, 8, 3), 255, np.uint8), 4, 4, np.zeros((3, 4, 4)))
    assert (wide == 1).all()  # float64, as numpy writes it


def test_every_engine_resizes_by_a_library_that_is_kept_and_compiles_none(
    all_kernels, tmp_path, monkeypatch, caplog
) -> None:
    def taken(**environment: str) -> bool:
        frames.install(None)
        frame_kernels.take_kept_resize.cache_clear()
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            with load(PEN, engine="plan", threads=1):
                return bool(frames.in_use)

    kept = build.kept() is not None  # not where nobody may write the home
    assert taken() == kept
    assert not taken(XDG_CACHE_HOME=str(tmp_path))
    assert not list(tmp_path.iterdir())
    assert not taken(**{compiled.SWITCH: "off"})
    assert taken(**{compiled.SWITCH: "portable"}) == kept
    assert not taken(**{compiled.SWITCH: "sse9"})
    said = f"this CPU has no kernels {compiled.SWITCH}=sse9; use one of: " in caplog.text
    assert said == kept
    frames.install(extension().frames)


WORK = {  # of the compiler: a copy of what it has made before, nothing that ends by itself, and nothing
    "in time": "import shutil, sys; shutil.copytree(*sys.argv[1:3])",
    "never": "import time; time.sleep(600)",
    "fails": "raise SystemExit(1)",
}


@pytest.mark.parametrize("work", list(WORK))
def test_a_server_takes_what_resizes_frames_when_it_is_there(
    all_kernels, no_frames, tmp_path, monkeypatch, caplog, work
) -> None:
    compiles, failed = work == "in time", "numpy resizes frames, because the kernels were not compiled"
    if (library := build.kept()) is None:
        pytest.skip("nobody may write the home, so that no library is kept")
    begun: list[subprocess.Popen] = []
    made = tmp_path / "sinew" / "cpu" / library.parent.name
    command = [sys.executable, "-c", WORK[work], str(library.parent), str(made)]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(prepare, "python_module", lambda: command)
    popen = subprocess.Popen

    def seen(given, *args, **options):  # beside it, the compiler is asked for its version
        child = popen(given, *args, **options)
        if given[0] == sys.executable:
            begun.append(child)
        return child

    monkeypatch.setattr(subprocess, "Popen", seen)
    made.parent.mkdir(parents=True, mode=0o700)
    frames.install(None)
    frame_kernels.take_kept_resize.cache_clear()
    frame = np.arange(9 * 8 * 3, dtype=np.uint8).reshape(9, 8, 3)
    before = resize(frame, 4, 5, "bicubic")
    with prepare.compiling_frames():
        while work != "never" and not (frames.in_use or failed in caplog.text):
            time.sleep(0.01)
        assert np.array_equal(resize(frame, 4, 5, "bicubic"), before)
    assert [child.returncode == 0 for child in begun] == [compiles]
    assert (bool(frames.in_use), failed in caplog.text) == (compiles, work == "fails")
    with prepare.compiling_frames():  # what is there is not made again
        assert len(begun) == (1 if compiles else 2)
    frame_kernels.take_kept_resize.cache_clear()


@needs_compiler
def test_what_would_not_be_kept_is_not_missing(no_frames, tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert frame_kernels.missing()
    (tmp_path / "sinew").chmod(0o777)  # where others could put another library
    assert not frame_kernels.missing()
    (tmp_path / "sinew").chmod(0o700)
    monkeypatch.setenv(compiled.SWITCH, "off")
    assert not frame_kernels.missing()
    with caplog.at_level("INFO"), prepare.compiling_frames():
        assert "frames are resized without compiled kernels" in caplog.text


@pytest.mark.slow
@needs_compiler
def test_a_server_compiles_what_resizes_frames(tmp_path, monkeypatch) -> None:
    """With the real compiler."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("SINEW_SERVE_PREPARE", "1")
    with serving(tmp_path, PEN, "--wire", "native:0", "--engine", "eager") as server:
        while "frames are resized by" not in server.log.read_text():
            time.sleep(0.1)
        assert server.stop() == 0
    assert list((tmp_path / "sinew" / "cpu").rglob("lowbit.so"))


def test_a_resize_that_differs_is_found(all_kernels) -> None:
    _, made = next(each_set(all_kernels))

    def off(frame, mixing, out, mixed) -> None:
        made.resize(frame, mixing, out)
        if mixing.mixed == mixed:
            out[2, -1, -1] = out[2, -1, -1] ^ 1 if mixed else out[2, -1, -1] * (1 + np.float32(1e-7))

    def wrong(image, axis, taps, out, bits, dtype) -> None:
        made.resample(image, axis, taps, out)
        if bits == bool(taps.bits) and image.dtype == dtype:
            out[-1, -1, -1] = (
                np.nextafter(out[-1, -1, -1], np.float32(2)) if taps.weights.dtype != np.int32 else 7
            )

    def another(*given) -> None:
        made.jpeg(*given)
        given[-1][-1, -1, -1] ^= 1

    assert frame_kernels.differs(made) == ""
    assert frame_kernels.differs(made._replace(jpeg=another)) == "jpeg"
    for mixed in range(3):
        assert frame_kernels.differs(made._replace(resize=partial(off, mixed=mixed))) == "resize"
    for bits, dtype in ((True, np.uint8), (False, np.uint8), (False, np.float32)):
        other = made._replace(resample=partial(wrong, bits=bits, dtype=dtype))
        assert frame_kernels.differs(other) == "resample"


def test_what_does_not_divide_into_panels_is_refused(all_kernels) -> None:
    for k, channels in ((20, 16), (24, 17)):
        x, weight, scale, bias, *_ = problem("int8", 3, k, channels, "plain", 2)
        for multiply in all_kernels.values():
            with pytest.raises(ValueError, match="expected a weight and scales for rows of"):
                multiply(x, weight, scale, bias, lowbit.PANELS, lowbit.TINY)


@pytest.mark.parametrize("name", FORMATS)
def test_long_sums_neither_saturate_nor_wrap(all_kernels, name) -> None:
    for seed in (0, 1):
        arguments = problem(name, 3, 16384, 17, "extreme", seed)
        wanted = lowbit.reference(*arguments)
        for multiply in all_kernels.values():
            assert torch.equal(multiply(*arguments), wanted)


def test_layers_that_read_the_same_rows_give_what_each_gives_alone(all_kernels) -> None:
    library, index = next(iter(all_kernels.values())).args
    together = partial(compiled._multiply_all, library, index)
    for name in FORMATS:
        x, *first = problem(name, 9, 320, 61, "plain", 1)  # with a bias; a last panel of fewer channels
        _, *second = problem(name, 9, 320, 5, "odd rows", 3)
        third = [second[0], second[1], None]
        layers = zip(first[:3], second[:3], third, strict=True)
        made = together(x, *layers, name, lowbit.TINY)
        for got, layer in zip(made, (first[:3], second[:3], third), strict=True):
            assert torch.equal(got, lowbit.reference(x, *layer, name, lowbit.TINY)), name
    with pytest.raises(ValueError, match="expected a weight and scales for rows of"):
        together(x, [first[0], second[0][:, 1:]], [None, None], [None, None], name, lowbit.TINY)
    with pytest.raises(RuntimeError, match="the kernel rejected its arguments"):
        together(x, [first[0]] * 17, [first[1]] * 17, [None] * 17, name, lowbit.TINY)


def test_threads_and_callers_do_not_change_a_bit(all_kernels) -> None:
    multiply = next(iter(all_kernels.values()))
    arguments = problem("q4_0", 61, 320, 400, "plain", 7)
    wanted = multiply(*arguments)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        with ThreadPoolExecutor(4) as callers:
            results = list(callers.map(lambda _: multiply(*arguments), range(40)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, wanted) for result in results)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@needs_compiler
def test_a_forked_child_has_threads_of_its_own() -> None:
    script = """
import os, torch
from sinew.engine.cpu.kernels.library import extension
from sinew.layers.stores import lowbit
torch.set_num_threads(2)
e, w = extension(), torch.zeros(64, 64, dtype=torch.uint8)
call = lambda: e.multiply_all(torch.ones(32, 64), [w], [torch.ones(1)], [None], "int8", 1e-30)
call()
child = os.fork()
call()
os._exit(0) if child == 0 else None
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = processes.run([sys.executable, "-c", script], timeout=900)
    assert done.stdout.strip() == "0", done.stderr


def test_tensors_that_do_not_fit_are_refused(all_kernels) -> None:
    multiply = next(iter(all_kernels.values()))
    x, weight, scale, _, name, smallest = problem("int8", 4, 64, 8, "plain", 1)
    for wrong in (
        (x[:, :63].contiguous(), weight, scale, None),
        (x, weight[:, :63], scale, None),
        (x.double(), weight, scale, None),
        (x, weight, scale[:5], None),
        (x, weight, scale, torch.zeros(7)),
    ):
        with pytest.raises(
            ValueError, match="expected (a weight and scales for rows of|float32 activations)"
        ):
            multiply(*wrong, name, smallest)


def test_the_operator_is_seen_by_tracers() -> None:
    arguments = problem("q4_0", 5, 64, 6, "plain", 3)
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.sinew.lowbit_linear.default, arguments, test_utils=utils)
    x, *layer, name, smallest = arguments
    several = (x, *([tensor] * 2 for tensor in layer), name, smallest)
    torch.library.opcheck(torch.ops.sinew.lowbit_linears.default, several, test_utils=utils)

    class Product(torch.nn.Module):
        def forward(self, x, weight):
            return lowbit.lowbit_linear(x, weight, None, None, "q4_0")

    graph = torch.export.export(Product(), arguments[:2]).graph
    assert [node.name for node in graph.nodes if "lowbit" in node.name] == ["lowbit_linear"]


def test_a_library_that_computes_something_else_is_found_out() -> None:
    def off_in(wrong, *arguments):
        return [
            each * (1 if arguments[4] != wrong else 1 + 2e-7) for each in lowbit.reference_all(*arguments)
        ]

    both = (*lowbit.INTEGERS, *lowbit.HALVES)
    assert compiled.differs(lowbit.reference_all, lowbit.lay_out_into, both) == ""
    assert compiled.differs(partial(off_in, "q8_0"), lowbit.lay_out_into, both) == "q8_0"
    for order in both:
        assert compiled.differs(partial(off_in, order), lowbit.lay_out_into, ()) == ""
        assert compiled.differs(partial(off_in, order), lowbit.lay_out_into, both) == order
    unturned = compiled.differs(lowbit.reference_all, lambda rows, panels, _: panels.copy_(rows), both)
    assert unturned == lowbit.PANELS


def test_without_a_compiler_the_reference_says_so(tmp_path) -> None:
    found = build.build(str(tmp_path / "no-compiler"))
    assert found.path is None
    assert "no-compiler" in found.reason
    environment = os.environ | {compiled.SWITCH: "off"}
    script = "from sinew.engine.cpu.kernels.library import extension as e; print(e().kernels, e().reason)"
    done = processes.run([sys.executable, "-c", script], env=environment, check=True)
    assert done.stdout.strip() == f"reference {compiled.SWITCH}=off"
    assert "which is slow" in done.stderr


def test_this_machine_computes_with_what_it_has() -> None:
    found = extension()
    assert found.compiled == (build.find_compiler() is not None), found.reason
    assert frames.in_use == ([found.frames] if found.compiled else [])


@needs_compiler
@pytest.mark.kernels
def test_every_instruction_set_compiles(tmp_path) -> None:
    compiler = build.find_compiler()
    version = subprocess.run([compiler, "-dumpfullversion"], capture_output=True, text=True).stdout
    major = int(match[0]) if (match := re.match(r"\d+", version)) else 0
    if 0 < major < 11:
        pytest.skip(f"gcc {major} does not know AVX-VNNI")
    assert build.compile_into(tmp_path, compiler, build.SETS.get(platform.machine(), {}))[1] == []


def program(folder: Path, compiler: str, sets: dict[str, tuple[str, ...]], *flags: str) -> Path:
    """``exact.cpp`` with the kernels of ``sets``."""
    objects, _ = build.compile_into(folder, compiler, sets, flags)
    options = ["-std=c++17", "-ffp-contract=off", f"-I{build.SOURCES}", "-pthread", *flags]
    command = [compiler, *options, str(EXACT), *map(str, objects), "-o", str(folder / "exact")]
    subprocess.run(command, check=True, capture_output=True)
    return folder / "exact"


@needs_compiler
@pytest.mark.kernels
def test_address_and_undefined_behaviour_sanitizers_are_silent(tmp_path) -> None:
    sanitize = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1")
    try:
        exact = program(tmp_path, build.find_compiler(), build.SETS.get(platform.machine(), {}), *sanitize)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no sanitizers here: {error.stderr}")
    done = subprocess.run([exact, "80", "3"], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "80 cases exact" in done.stdout


IMMINTRIN = """
#pragma once
#include_next <immintrin.h>
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#ifndef _mm256_dpbusd_avx_epi32
#define _mm256_dpbusd_avx_epi32 simde_mm256_dpbusd_epi32
#endif
// Not in every release of SIMDe.
typedef int Integers __attribute__((vector_size(64)));
typedef float Reals __attribute__((vector_size(64)));
static inline __m512 converted(__m512i v) { return (__m512)__builtin_convertvector((Integers)v, Reals); }
#define _mm512_cvtepi32_ps converted
// A macro of four arguments there.
#undef _mm512_madd_epi16
#define _mm512_madd_epi16 simde_mm512_madd_epi16
static inline __m512 loaded(unsigned mask, const float* from) {
  float lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = mask >> i & 1 ? from[i] : 0.0f;
  return _mm512_loadu_ps(lanes);
}
static inline void stored(float* to, unsigned mask, __m512 value) {
  float lanes[16];
  _mm512_storeu_ps(lanes, value);
  for (int i = 0; i < 16; ++i)
    if (mask >> i & 1) to[i] = lanes[i];
}
static inline __m512i rounded_to_whole(__m512 v) {
  float lanes[16];
  int whole[16];
  _mm512_storeu_ps(lanes, v);
  for (int i = 0; i < 16; i += 8)
    _mm256_storeu_si256((__m256i*)(whole + i), _mm256_cvtps_epi32(_mm256_loadu_ps(lanes + i)));
  return _mm512_loadu_si512(whole);
}
template <class T>
static inline T top_of(const T* lanes) {
  T top = lanes[0];
  for (int i = 1; i < 16; ++i) top = lanes[i] > top ? lanes[i] : top;
  return top;
}
static inline int top_of(__m512i v) {
  int lanes[16];
  _mm512_storeu_si512(lanes, v);
  return top_of(lanes);
}
static inline float top_of(__m512 v) {
  float lanes[16];
  _mm512_storeu_ps(lanes, v);
  return top_of(lanes);
}
static inline float sum_of(__m512 v) {
  float lanes[16], sum = 0;
  _mm512_storeu_ps(lanes, v);
  for (int i = 0; i < 16; ++i) sum += lanes[i];
  return sum;
}
static inline __m256i low_halves(__m512i v) {
  int lanes[16];
  short halves[16];
  _mm512_storeu_si512(lanes, v);
  for (int i = 0; i < 16; ++i) halves[i] = (short)lanes[i];
  return _mm256_loadu_si256((const __m256i*)halves);
}
static inline __m512i gathered(__m512i at, const int* from, int) {
  int lanes[16];
  _mm512_storeu_si512(lanes, at);
  for (int i = 0; i < 16; ++i) lanes[i] = from[lanes[i]];
  return _mm512_loadu_si512(lanes);
}
#define _mm512_reduce_max_epi32 top_of
#define _mm512_reduce_max_ps top_of
#define _mm512_reduce_add_ps sum_of
#define _mm512_cvtepi32_epi16 low_halves
#define _mm512_i32gather_epi32 gathered
#define _mm512_cvtps_epi32 rounded_to_whole
#define _mm512_maskz_loadu_ps loaded
#define _mm512_mask_storeu_ps stored
"""


@needs_compiler
@pytest.mark.kernels
@pytest.mark.skipif(platform.machine() != "x86_64", reason="kernels of another architecture")
def test_vnni_kernels_are_exact_where_their_instructions_are_emulated(tmp_path) -> None:
    """Processors without VNNI and AVX-512 run those files with the intrinsics of SIMDe, in instructions of AVX2."""
    compiler = build.find_compiler()
    found = subprocess.run(
        [compiler, "-fsyntax-only", "-x", "c++", "-"], input="#include <simde/x86/avx512.h>", text=True
    )
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    flags = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    if found.returncode or "avx2" not in flags or "clang" in version:
        pytest.skip("wants SIMDe (apt install libsimde-dev), g++ and AVX2")
    (tmp_path / "immintrin.h").write_text(IMMINTRIN)
    emulated = ("-mavx2", "-mfma", f"-I{tmp_path}")
    sets = {**build.SETS["x86_64"], "floats_avx512": (*emulated, build.FUSED)}
    sets |= {"x86_avxvnni": emulated, "x86_avx512vnni": emulated}
    del sets["x86_avx512bf16"]  # whose numbers SIMDe has no form for
    exact = program(tmp_path, compiler, sets, "-D__builtin_cpu_supports(name)=true")
    done = subprocess.run([exact, "60", "5"], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    kernels = [line.split(":")[0] for line in done.stdout.splitlines()]
    assert kernels == ["avx512vnni", "avxvnni", "avx2", "portable"]


TILES = (
    "-DTILES_EMULATED"  # the same source, with the instructions of AMX in plain C++ that gives the same bits
)


@needs_compiler
@pytest.mark.kernels
@pytest.mark.parametrize("sanitized", [True, False])
def test_kernels_of_tiles_are_exact_where_their_instructions_are_emulated(tmp_path, sanitized: bool) -> None:
    """With one thread and with several, on any CPU."""
    flags = [TILES, "-O1"]
    if sanitized:
        flags += ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g"]
    exact = program(tmp_path, build.find_compiler(), {"x86_amx": ()}, *flags)
    done = subprocess.run([exact, "60", "5"], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["amx", "portable"]


def library_of_emulated_tiles(folder: Path) -> Path:
    """A library with the kernels of tiles for any CPU, and with the portable kernels."""
    compiler = build.find_compiler()
    objects, left_out = build.compile_into(folder, compiler, {"x86_amx": ()}, (TILES,))
    assert left_out == []
    path = folder / build.NAME
    subprocess.run([compiler, "-shared", "-pthread", *map(str, objects), "-o", str(path)], check=True)
    return path


@needs_compiler
@pytest.mark.kernels
def test_a_library_with_tiles_is_checked_and_timed_before_it_is_taken(tmp_path, monkeypatch) -> None:
    """With emulated instructions, which are slower than plain loops: what is best by name is not taken."""
    path = library_of_emulated_tiles(tmp_path)
    monkeypatch.setattr(compiled, "build", lambda: build.Built(path, "a test"))
    found = compiled._load("")
    assert (found.kernels, found.available) == ("portable", ("amx", "portable"))
    assert re.fullmatch(
        r"a test; ms of a small product, measured here: amx [\d.]+, portable [\d.]+", found.reason
    )
    tiles = compiled._load("amx")  # equal to the reference, or it would not be there
    assert (tiles.kernels, tiles.reason, tiles.panels) == (
        "amx",
        "a test",
        (lowbit.PANELS, lowbit.BF16_TILES),
    )
    random = torch.Generator().manual_seed(0)
    for rows, k, channels in (
        *((1, 8, 16), (16, 64, 32), (17, 72, 48), (33, 720, 16), (70, 1000, 80)),
        (34, 6200, 48),  # longer than a part of k
    ):
        x = torch.randn(rows, k, generator=random)
        weight = torch.randint(0, 256, (channels, k), generator=random, dtype=torch.uint8)
        scale, bias = torch.rand(channels, generator=random), torch.randn(channels, generator=random)
        laid = torch.empty_like(weight)
        tiles.lay_out(weight, laid)
        assert torch.equal(laid, lowbit.lay_out(weight))
        wanted = lowbit.reference(x, weight, scale, bias, "int8", lowbit.TINY)
        for threads in (1, 2):
            monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)  # of the kernels
            (y,) = tiles.multiply_all(x, [laid], [scale], [bias], lowbit.PANELS, lowbit.TINY)
            assert torch.equal(y, wanted), (rows, k, channels, threads)
            halves = lowbit.lay_out(torch.randn(channels, k, generator=random).bfloat16())
            (y,) = tiles.multiply_all(x, [halves], [None], [bias], lowbit.BF16_TILES, lowbit.TINY)
            order = (lowbit.BF16_TILES, lowbit.TINY)
            assert torch.equal(y, lowbit.reference(x, halves, None, bias, *order)), (
                rows,
                k,
                channels,
                threads,
            )


Emulated = Callable[..., bytes]


@pytest.fixture(scope="module")
def arm(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    """``exact.cpp`` on an emulated ARM CPU: a function of the CPU, the standard input and the arguments."""
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
    if platform.machine() == "aarch64":
        pytest.skip("ARM kernels run natively here")
    if compiler is None or emulator is None:
        pytest.skip(
            "wants aarch64-linux-gnu-g++ and qemu-aarch64 (apt install g++-aarch64-linux-gnu qemu-user)"
        )
    exact = program(tmp_path_factory.mktemp("arm"), compiler, build.SETS["aarch64"], "-static")

    def run(cpu: str, given: bytes, *arguments: object) -> bytes:
        command = [emulator, "-cpu", cpu, exact, *map(str, arguments)]
        done = subprocess.run(command, input=given, capture_output=True, timeout=1800)
        assert done.returncode == 0, (done.stdout[-2000:], done.stderr)
        return done.stdout

    return run


@pytest.mark.kernels
def test_arm_kernels_are_exact_under_an_emulator(arm: Emulated) -> None:
    lines = arm("max", b"", 60, 5).decode().splitlines()
    assert [line.split(":")[0] for line in lines] == ["neon-i8mm", "neon-dotprod", "portable"]


@pytest.mark.kernels
def test_kernels_of_arm_are_chosen_by_the_features_of_the_cpu(arm: Emulated) -> None:
    """Orin's CPU is a Cortex-A78AE, with the instructions of a Cortex-A76; Graviton 2 has a Neoverse N1."""
    fused, odd, fours, eights = (
        PANELS_NUMBERS[order] for order in (lowbit.BF16_FUSED, lowbit.BF16_ODD, lowbit.FOURS, lowbit.EIGHTS)
    )
    both = [
        f"neon-i8mm {eights} {odd}, attention bf16-odd",
        f"neon-dotprod {fours} {fused}, attention float32",  # without an instruction for products of bfloat16
        f"portable {fours}, attention float32",
    ]
    for cpu, kernels in (
        ("max", both),
        ("cortex-a76", both[1:]),
        ("neoverse-n1", both[1:]),
        ("cortex-a72", both[2:]),  # a Raspberry Pi 4 has this CPU
    ):
        assert arm(cpu, b"", "kernels").decode().splitlines() == kernels, cpu


SPECIAL = (0.0, -0.0, math.inf, -math.inf, math.nan, 2.0**-126, 2.0**-127, -(2.0**-133), 3e38, -3e38)


@pytest.mark.kernels
@pytest.mark.parametrize("order", [lowbit.BF16_FUSED, lowbit.BF16_ODD])
def test_products_of_bfloat16_on_arm_equal_the_reference(arm: Emulated, order: str) -> None:
    """In every bit, with 1, 2 and 3 threads: odd numbers of rows, sums that cancel, and numbers without an inverse."""
    random = torch.Generator().manual_seed(0)
    for rows, k, channels, kind in (
        *((1, 8, 16, "plain"), (2, 24, 16, "special"), (5, 40, 48, "tiny"), (11, 72, 32, "special")),
        *((23, 104, 80, "cancelled"), (31, 264, 16, "huge"), (50, 768, 64, "plain"), (13, 3080, 16, "plain")),
    ):
        x, weight = (torch.randn(size, k, generator=random) for size in (rows, channels))
        if kind == "special":
            for each in (x, weight):
                at = torch.randint(0, each.numel(), (len(SPECIAL),), generator=random)
                each.view(-1)[at] = torch.tensor(SPECIAL)
        elif kind == "tiny":
            x *= 1e-38
        elif kind == "huge":
            x *= 1e38
        elif kind == "cancelled":
            x[:, 1::2], weight[:, 1::2] = x[:, ::2], -weight[:, ::2]
        laid = lowbit.lay_out(weight.bfloat16())
        given = x.numpy().tobytes() + laid.numpy().tobytes()
        made = arm("max", given, PANELS_NUMBERS[order], rows, k, channels)
        wanted = lowbit.reference(x, laid, None, None, order, lowbit.TINY)
        assert (kind in ("special", "huge")) == (not wanted.isfinite().all())
        for y in torch.frombuffer(bytearray(made), dtype=torch.float32).view(3, rows, channels):
            torch.testing.assert_close(y, wanted, rtol=0, atol=0, equal_nan=True, msg=f"{kind} {rows} x {k}")


def test_a_server_that_ends_does_not_wait_for_a_compiler_without_processor_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the lowest priority on a busy machine it gets no time to end: here it ignores the signal and its input."""
    (tmp_path / "starved.py").write_text(
        "import os, pathlib, signal, time\nsignal.signal(signal.SIGTERM,"
        " signal.SIG_IGN)\npathlib.Path('pid').write_text(str(os.getpid()))\ntime.sleep(600)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(frame_kernels, "missing", lambda: True)
    monkeypatch.setattr(prepare, "python_module", lambda: [sys.executable, str(tmp_path / "starved.py")])
    with prepare.compiling_frames():
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.02)
    pid = int((tmp_path / "pid").read_text())
    os.kill(pid, 0)  # it is still there: nobody waited for its end
    os.kill(pid, signal.SIGKILL)
